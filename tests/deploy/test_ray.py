"""deploy/ray: what the files ask for can be asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from minisgl.ray.args import Args

FILES = sorted((Path(__file__).parents[2] / "deploy" / "ray").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_serve_config_arguments_are_valid(file: Path) -> None:
    (application,) = yaml.safe_load(file.read_text(encoding="utf-8"))["applications"]
    assert application["import_path"] == "minisgl.ray:app"
    assert Args.model_validate(application["args"]).by_name()


@pytest.mark.ray
@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_serve_config_matches_rays_schema(file: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))


def test_serve_configs_are_found() -> None:
    assert {file.stem for file in FILES} == {"models", "smollm2"}
