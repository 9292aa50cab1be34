"""Whether a model sees, and the line that says so at the start."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL
import pytest
from safetensors.torch import load_file, save_file

from minisgl.config import EngineConfig
from minisgl.engine.cpu_loading import load_cpu_engine
from minisgl.engine.sight import Sight, find_sight
from minisgl.models.config import load_config, read_config
from minisgl.utils.installed import how_to_get
from tests.helpers.image_files import BROKEN_PILLOW
from tests.helpers.vision_chat import talking


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking(tmp_path_factory.mktemp("seer"))


def sight(folder: Path, source: Path | None = None, **changes: Any) -> Sight:
    model = replace(load_config(folder), **changes)
    return find_sight(source or folder, folder, read_config(folder)[0], model, dummy=False)


def test_the_start_says_that_the_model_sees_and_when_pillow_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for pillow in (PIL, None, BROKEN_PILLOW):
        monkeypatch.setitem(sys.modules, "PIL", pillow)  # type: ignore[arg-type]  # None: no such module
        config = EngineConfig(model=str(folder), num_pages=8, max_running_requests=1)
        engine = load_cpu_engine(config, lambda text, done=0, total=0: said.append(text))
        assert engine.info.sees
        engine.close()
    why = "does not load (RuntimeError: built for another Python)"
    assert [line for line in said if line.startswith(("images: ", "text only: "))] == [
        "images: the vision tower has 3 layers",
        f"text only: images need Pillow, which is not installed: {how_to_get('images')}",
        f"text only: images need Pillow, which {why}: {how_to_get('images')}",
    ]


def test_a_model_without_a_tower_says_what_is_missing(folder: Path, tmp_path: Path) -> None:
    assert (
        sight(folder, folder / "model.gguf").reason
        == "a GGUF model's must be in a file of its own: name it by --mmproj"
    )
    other = sight(folder, architecture="Gemma3ForCausalLM", other_half=("v.",))
    assert other.reason == "that of Gemma3ForCausalLM is not supported"
    assert sight(folder, architecture="Gemma3ForCausalLM").line() == "", "a model of text"
    copy = talking(tmp_path)
    tensors = {name: one for name, one in load_file(copy / "model.safetensors").items() if "visual" not in name}
    save_file(tensors, copy / "model.safetensors")
    assert sight(copy).reason == "its tensors are missing" and sight(copy).tower is None
    (copy / "preprocessor_config.json").unlink()
    assert (
        sight(copy).line().startswith("text only: the vision part is not loaded: preprocessor_config.json is missing")
    )
