"""The operations that tiny models become, as `minisgl model FOLDER --operations` prints them: a change of how a
layer is computed shows here. `operations/` holds the lists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl.cli import main
from minisgl.config import ConfigError
from minisgl.engine import cpu_loading
from minisgl.models.config import load_config
from tests.helpers.models import save, tiny_model

HELD = Path(__file__).parent / "operations"


@pytest.mark.parametrize("held", sorted(HELD.glob("*.txt")), ids=lambda held: held.stem)
def test_the_operations_of_a_model(held: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tiny_model(held.stem), tmp_path)
    assert main(["model", str(folder), "--operations"]) == 0
    assert capsys.readouterr().out == held.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("variant", "change", "named"),
    [
        ("deepseek3-yarn", {"qkv_bias": True}, "attention_bias: 1: not supported with latent attention"),
        ("qwen3-moe", {"norms": "parallel"}, "an MLP parallel to attention is not supported"),
    ],
)
def test_models_without_an_operation_list_are_refused(
    variant: str, change: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tiny_model(variant), tmp_path)
    model = replace(load_config(folder), **change)
    monkeypatch.setattr(cpu_loading, "load_config", lambda _: model)
    with pytest.raises(ConfigError, match=named):
        cpu_loading.operations(folder)
