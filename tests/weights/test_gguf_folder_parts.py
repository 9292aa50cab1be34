"""A model in several GGUF files, which gguf-py cut: found from the first, and the same model as in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from safetensors.numpy import load_file

from minisgl import envs
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.cpu_loading import load_cpu_engine
from minisgl.weights.gguf_folder import gguf_folder
from minisgl.weights.gguf_import import import_gguf
from tests.helpers.gguf import quiet, write_gguf, written_model

NAMES = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


def write(file: Path, **settings: Any) -> Path:
    return write_gguf(file, written_model("qwen3-tied"), "qwen3", quantise=gguf.GGMLQuantizationType.MXFP4, **settings)


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(envs.CACHE, str(tmp_path / "cache"))
    found = write(tmp_path / "m.gguf", tensors_a_part=12)
    assert sorted(one.name for one in tmp_path.glob("*.gguf")) == NAMES and found.name == NAMES[0]
    return found


def load(path: Path) -> None:
    load_cpu_engine(EngineConfig(model=str(path), engine="cpu", num_pages=4, num_threads=1), quiet).close()


def test_split_file_equals_the_single_file(first: Path, tmp_path: Path) -> None:
    """Also where the parts are links, as in a hub's cache."""
    whole = write(tmp_path / "whole.gguf")
    (tmp_path / "links").mkdir()
    for i, name in enumerate(NAMES):
        (tmp_path / name).rename(tmp_path / f"blob{i}")
        (tmp_path / "links" / name).symlink_to(tmp_path / f"blob{i}")
    parts = tmp_path / "links" / NAMES[0]
    load(parts)
    assert (gguf_folder(parts) / "config.json").read_text() == (gguf_folder(whole) / "config.json").read_text()
    ours, theirs = (load_file(import_gguf(one, quiet) / "model.safetensors") for one in (parts, whole))
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)


def test_invalid_parts_are_refused_with_the_reason(first: Path, tmp_path: Path) -> None:
    second, third = (tmp_path / name for name in NAMES[1:])
    with pytest.raises(ConfigError, match=rf"{NAMES[1]}: a later part of a model: name the first, {NAMES[0]}"):
        load(second)
    content = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(ConfigError, match=rf"{NAMES[2]}: split.no 1 and split.count 3: its name says 2 and 3"):
        load(first)
    third.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=rf"{NAMES[2]}: tensor .* exceed the"):
        load(first)
    third.unlink()
    for read in (load, gguf_folder, lambda path: import_gguf(path, quiet)):
        with pytest.raises(ConfigError, match=rf"{NAMES[0]}: one of 3 parts: {NAMES[2]} is missing beside it"):
            read(first)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(
        ConfigError, match=r"renamed.gguf: part 0 \(from 0\) of 3: its name must end in -00001-of-00003"
    ):
        load(tmp_path / "renamed.gguf")


def test_a_tensor_in_two_parts(first: Path, tmp_path: Path) -> None:
    """Only its number is changed, so its tensors are the second's again."""
    second, third = (tmp_path / name for name in NAMES[1:])
    content, key = second.read_bytes(), b"split.no" + (2).to_bytes(4, "little")  # a whole number of 16 bits
    at = content.index(key) + len(key)
    third.write_bytes(content[:at] + (2).to_bytes(2, "little") + content[at + 2 :])
    for read in (load, gguf_folder):
        with pytest.raises(ConfigError, match=rf"{NAMES[2]}: tensor .*: in another part, too"):
            read(first)
