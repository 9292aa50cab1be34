"""Locating a model: a folder, a GGUF file, the embedded model, or a hub. Every failure says what to do."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from minisgl.config import MODEL_SMOLLM2, ConfigError, LoadFormat, ModelSource
from minisgl.utils.installed import find_smollm2, need_extension
from minisgl.utils.progress import Report
from minisgl.weights.hub_names import HubRequest, parse, similar_names

__all__ = ["find_model", "find_smollm2", "find_tokenizer", "folder_at_hand", "is_gguf", "place_of", "resolve_model"]
_GGUF = b"GGUF"
A_GGUF_FILE = "a GGUF file, unlike a folder of safetensors,"


def is_gguf(path: Path) -> bool:
    """Return whether a file begins like a GGUF file, whatever its name: Ollama's have no suffix. Raises `OSError`."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_GGUF)) == _GGUF


def folder_at_hand(model: str) -> Path | None:
    """Return the folder of `model` for an engine that reads GGUF files, if nothing has to be downloaded; else None."""
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
    load_format: LoadFormat = "auto",
    own_tokenizer: bool = True,
) -> Path:
    """Return a local folder for `model`, which may be downloaded; a GGUF file is imported. Raises `ConfigError`."""
    path = find_model(model, say, load_format=load_format)
    if path.is_dir():
        return path
    need_extension(f"--model {model}: {A_GGUF_FILE}")
    from minisgl.weights.gguf_import import import_gguf

    return import_gguf(path, say, own_tokenizer=own_tokenizer)


def find_tokenizer(model: str, say: Report, *, source: ModelSource = "auto") -> Path:
    """Return a local folder with the tokenizer of `model`, if possible without its weights. Raises `ConfigError`."""
    path = find_model(model, say, source=source, load_format="dummy", flag="--tokenizer")
    if path.is_dir():
        return path
    need_extension(f"--tokenizer {model}: {A_GGUF_FILE}")
    from minisgl.weights.gguf_folder import gguf_folder

    return gguf_folder(path)


def find_model(
    model: str,
    say: Report,
    *,
    source: ModelSource = "auto",
    revision: str | None = None,
    load_format: LoadFormat = "auto",
    flag: str = "--model",
    mmproj: bool = False,
) -> Path:
    """Return a local (or downloaded) folder or GGUF file for `model`; errors name `flag`. `mmproj`: download the file
    of a GGUF model's vision tower, too. Raises `ConfigError`."""
    located = place_of(model, source, revision, flag)
    if isinstance(located, Path):
        return located
    located = replace(located, mmproj=mmproj)
    from minisgl.weights import hub  # imports an HTTP client

    try:
        return hub.fetch(located, say, weights=load_format != "dummy")
    except ConfigError as error:
        raise ConfigError(f"{flag} {model}: {error}") from error


def place_of(model: str, source: ModelSource, revision: str | None, flag: str = "--model") -> Path | HubRequest:
    """Return the local folder or GGUF file of `model`, or its hub repository; asks no hub. Raises `ConfigError`."""
    path = Path(model).expanduser()
    if model == MODEL_SMOLLM2 and not path.exists():
        path = find_smollm2()
    if path.is_dir():
        return path
    try:
        if is_gguf(path):
            return path
        if os.path.lexists(path):
            raise ConfigError(f"{flag} {model}: is neither a folder nor a GGUF file, which begins with GGUF")
    except OSError as error:
        raise ConfigError(f"{flag} {model}: {error.strerror}") from error
    if model.startswith((".", "/", "~")):
        what = "no such file" if path.suffix == ".gguf" else "no such folder or file"
        raise ConfigError(f"{flag} {model}: {what}: check the spelling")
    wanted = parse(model, source, revision)
    if wanted is None and path.suffix == ".gguf":
        raise ConfigError(f"{flag} {model}: no such file, and not one of a hub (OWNER/REPO/FILE.gguf)")
    if wanted is None:
        hint = similar_names(model)
        raise ConfigError(f"{flag} {model}: no such folder, and not a hub id (OWNER/REPO): check the spelling{hint}")
    return wanted
