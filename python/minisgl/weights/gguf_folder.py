"""A GGUF file as the model folder that the rest of minisgl reads: config.json and the tokenizer, from its header alone,
the heads of encoders (`gguf_heads`), and the description of a vision tower in a second file (`gguf_tower`). The other
tensors stay in the file; `gguf_import` makes folders with weights.

Invariants: the folder appears whole or not at all. Its key is the state of one model: the path, the sizes and times of
its parts, the header of the first part, and the same of the tower's file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from minisgl import envs
from minisgl.config import ConfigError
from minisgl.extension import _rust
from minisgl.utils.made_once import made_once
from minisgl.weights.gguf_config import FACTORS, Fields, config_of, pooling_of
from minisgl.weights.gguf_heads import with_head, write_heads
from minisgl.weights.gguf_tower import add_marker, may_see, tower_files
from minisgl.weights.hub_names import mmprojs

FORMAT = "11"  # part of the key: increase it when the written files change
BARE = "-bare"  # suffix of a folder without a tokenizer
SOURCE, SNAPSHOTS = "source.json", "snapshots"
NO_TOWER = "none"
_MAX_FACTORS = 4096


def gguf_folder(file: Path, *, own_tokenizer: bool = True, tower: Path | None = None) -> Path:
    """Return the (cached) folder for a GGUF file, without a tokenizer unless `own_tokenizer`. `tower`: the file of its
    vision tower, which the folder describes, too. Raises `ConfigError`."""
    named = file.absolute()  # parts are found by name, not by where links lead
    key = hashlib.sha256()
    for one in (named,) if tower is None else (named, tower.absolute()):
        _add_state(key, one)
    name = f"{key.hexdigest()[:32]}-{FORMAT}{'' if own_tokenizer else BARE}"
    return made_once(
        envs.cache_dir() / "gguf-text" / name, lambda partial: _write(named, tower, partial, own_tokenizer)
    )


def _add_state(key: hashlib._Hash, file: Path) -> None:
    """Add the header, place, sizes and times of a GGUF file to `key`. Raises `ConfigError`."""
    target = file.resolve()
    try:
        head_bytes = _rust.gguf_head_bytes(file)
        with target.open("rb") as opened:
            key.update(opened.read(head_bytes))
        now = [part.stat() for part in _rust.gguf_parts(file)]
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    key.update("".join([f"\n{target}", *(f"\n{status.st_size}\n{status.st_mtime_ns}" for status in now)]).encode())


def seeing_folder(file: Path, mmproj: str | None, *, own_tokenizer: bool = True) -> tuple[Path, str]:
    """Return the folder for a GGUF file with its vision tower, and the reason if it has none. `mmproj`: the tower's
    file, "none", or None for the first file beside the model that fits it. Raises `ConfigError`, not for the latter."""
    if mmproj == NO_TOWER:
        return gguf_folder(file, own_tokenizer=own_tokenizer), f"--mmproj {NO_TOWER}"
    if mmproj is not None:
        try:
            return gguf_folder(file, own_tokenizer=own_tokenizer, tower=Path(mmproj).expanduser()), ""
        except ConfigError as error:
            raise ConfigError(f"--mmproj {mmproj}: {error}") from error
    reason = ""
    for tower in _beside(file.absolute()):
        try:
            return gguf_folder(file, own_tokenizer=own_tokenizer, tower=tower), ""
        except ConfigError as error:
            reason = reason or str(error)
    folder = gguf_folder(file, own_tokenizer=own_tokenizer)
    if not reason and "may_see" in _source(folder):
        reason = "no mmproj-*.gguf beside the model: name one by --mmproj"
    return folder, reason


def _beside(file: Path) -> list[Path]:
    """Return the files of vision towers beside a model, or above it in the snapshot of a hub; the preferred first."""
    folders = [file.parent]
    if above := [folder for folder in file.parents if folder.parent.name == SNAPSHOTS]:
        folders = [folder for folder in file.parents if folder.is_relative_to(above[0])]
    root = folders[-1]
    try:
        paths = [one.relative_to(root).as_posix() for folder in folders for one in folder.glob("*.gguf")]
    except OSError:
        return []
    return [root / path for path in mmprojs(file.relative_to(root).as_posix(), paths)]


def gguf_file(folder: Path) -> Path | None:
    """Return the GGUF file that `gguf_folder` made `folder` from; None for any other folder. Raises `ConfigError`."""
    file = _source(folder).get("gguf")
    return None if file is None else Path(file)


def tower_file(folder: Path) -> Path | None:
    """Return the file of the vision tower that `folder` describes; None if it is not in a GGUF file. Raises
    `ConfigError`."""
    file = _source(folder).get("mmproj")
    return None if file is None else Path(file)


def _source(folder: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode((folder / SOURCE).read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / SOURCE}: {error!r}: remove the folder") from error


def _write(file: Path, tower: Path | None, folder: Path, own_tokenizer: bool) -> None:
    header = read_header(file)
    if tower is not None:
        add_marker(header["metadata"])
    config = write_text_files(file, header, folder, own_tokenizer)
    try:
        write_heads(header, folder)
    except ConfigError as error:
        raise ConfigError(f"{file.name}: {error}") from error
    source = {"gguf": str(file)}
    if may_see(header["metadata"], config):
        source["may_see"] = "a tower in a file of its own"
    if tower is not None:
        source["mmproj"] = str(tower.absolute())
        text, vision = Fields(header["metadata"]), read_header(tower)
        try:
            clip = Fields(vision["metadata"], ("clip",))
            shapes = {name: shape for name, (_, shape) in vision["tensors"].items()}
            config, processor = tower_files(text, config, clip, shapes)
        except ConfigError as error:
            raise ConfigError(f"{tower.name}: {error}") from error
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2), encoding="utf-8")
    (folder / SOURCE).write_text(json.dumps(source), encoding="utf-8")


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
