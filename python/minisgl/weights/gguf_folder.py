"""A GGUF file as the model folder that the rest of minisgl reads: config.json and the tokenizer, from its header alone,
and the heads of encoders (`gguf_heads`). The other tensors stay in the file; `gguf_import` makes folders with weights.

Invariants: the folder appears whole or not at all. Its key is the state of one model: the path, the sizes and times of
its parts, the header of the first part.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.extension import _rust
from minisgl.utils.made_once import made_once
from minisgl.weights.gguf_config import FACTORS, Fields, config_of, pooling_of
from minisgl.weights.gguf_heads import with_head, write_heads

FORMAT = "9"  # part of the key: increase it when the written files change
BARE = "-bare"  # suffix of a folder without a tokenizer
SOURCE = "source.json"
_MAX_FACTORS = 4096


def gguf_folder(file: Path, *, own_tokenizer: bool = True) -> Path:
    """Return the (cached) folder for a GGUF file, without a tokenizer unless `own_tokenizer`. Raises `ConfigError`."""
    named, target = file.absolute(), file.resolve()  # parts are found by name, not by where links lead
    try:
        head_bytes = _rust.gguf_head_bytes(named)
        with target.open("rb") as opened:
            head = opened.read(head_bytes)
        now = [part.stat() for part in _rust.gguf_parts(named)]
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    key = hashlib.sha256(head)
    key.update("".join([f"\n{target}", *(f"\n{status.st_size}\n{status.st_mtime_ns}" for status in now)]).encode())
    name = f"{key.hexdigest()[:32]}-{FORMAT}{'' if own_tokenizer else BARE}"
    return made_once(envs.cache_dir() / "gguf-text" / name, lambda partial: _write(named, partial, own_tokenizer))


def gguf_file(folder: Path) -> Path | None:
    """Return the GGUF file that `gguf_folder` made `folder` from; None for any other folder. Raises `ConfigError`."""
    try:
        file = Path(json.loads((folder / SOURCE).read_text(encoding="utf-8"))["gguf"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / SOURCE}: {error!r}: remove the folder") from error
    return file


def _write(file: Path, folder: Path, own_tokenizer: bool) -> None:
    header = read_header(file)
    write_text_files(file, header, folder, own_tokenizer)
    try:
        write_heads(header, folder)
    except ConfigError as error:
        raise ConfigError(f"{file.name}: {error}") from error
    (folder / SOURCE).write_text(json.dumps({"gguf": str(file)}), encoding="utf-8")


def read_header(file: Path) -> _rust.GgufHeader:
    """Read the header of a GGUF file. Raises `ConfigError` if it is malformed."""
    try:
        return _rust.gguf_header(file)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def write_text_files(file: Path, header: _rust.GgufHeader, folder: Path, own_tokenizer: bool) -> dict[str, Any]:
    """Write config.json, generation_config.json and the tokenizer (without `own_tokenizer` only its chat template) to
    `folder`. Returns the config. Raises `ConfigError`."""
    # needs a library that serving does not need
    from minisgl.weights.gguf_tokenizer import end_ids, template_files, tokenizer_files

    try:
        fields = Fields(header["metadata"])
        shapes = {name: shape for name, (_, shape) in header["tensors"].items()}
        config = with_head(config_of(fields, shapes, _factors(header)), fields, shapes)
        generation: dict[str, Any] = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
        if len(ends := end_ids(fields)) > 1:
            generation["eos_token_id"] = ends
        files = {
            "config.json": json.dumps(config, indent=2, ensure_ascii=False),
            "generation_config.json": json.dumps(generation, indent=2),
            **(tokenizer_files(fields) if own_tokenizer else template_files(fields)),
        }
        if pooling := pooling_of(fields):
            files["1_Pooling/config.json"] = json.dumps(pooling)
    except ConfigError as error:
        raise ConfigError(f"{file.name}: {error}") from error
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    return config


def _factors(header: _rust.GgufHeader) -> dict[str, Sequence[float]]:
    """Read the divisors of RoPE frequencies that a config needs, by tensor name."""
    factors = dict[str, Sequence[float]]()
    for name in FACTORS:
        if name not in header["tensors"]:
            continue
        kind, shape = header["tensors"][name]
        file, start, end = header["places"][name]
        if kind != "F32" or len(shape) != 1 or shape[0] > _MAX_FACTORS:
            raise ConfigError(f"tensor {name}: {list(shape)} in {kind} is not imported")
        with file.open("rb") as opened:
            opened.seek(start)
            factors[name] = struct.unpack(f"<{shape[0]}f", opened.read(end - start))
    return factors
