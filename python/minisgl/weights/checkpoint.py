"""Fill a model: from safetensors, tensor by tensor, or from seeds. A model's `checkpoint()` says which tensors go
where.

Keeps true: memory stays at the weights plus the tensor being copied (files are mapped, and a rank reads only its part);
a checkpoint that does not fit is one error that names every difference, raised before the model is used.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.distributed import Shard

INDEX = "model.safetensors.index.json"
Progress = Callable[[int, int], None]
"""(tensors done, tensors in all)"""
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SHOWN = 8
_ROWS = 4096


def load_weights(
    wanted: Mapping[str, Tensor],
    model_dir: str | Path,
    progress: Progress | None = None,
    *,
    stacked: Mapping[str, tuple[Tensor, Sequence[str]]] | None = None,
    shards: Mapping[str, Shard] | None = None,
    own_name: Callable[[str], str | None] = str,
) -> list[str]:
    """Copy every tensor of the folder's safetensors into `wanted`. `stacked`: tensors that the folder may have in place
    of several wanted ones; name -> what it fills, and whose place it takes. `shards`: of which tensors only a part is
    wanted. `own_name`: what a tensor of the folder is called in `wanted`; None: it is left out. Returns the names of
    those. Raises `ConfigError`."""
    folder = Path(model_dir)
    left_out = list[str]()
    missing, surplus, misshaped = set(wanted), list[str](), list[str]()
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as shard:
                for stored in shard.keys():  # noqa: SIM118 (not a dict)
                    name = own_name(stored)
                    if name is None:
                        left_out.append(stored)
                        continue
                    target, filled = _target(name, wanted, stacked or {})
                    if target is None:
                        if not _is_redundant(name, wanted):
                            surplus.append(stored)
                        continue
                    missing.difference_update(filled)
                    part = (shards or {}).get(name)
                    found, shape = shard.get_slice(stored), whole_shape(target, part)
                    if tuple(found.get_shape()) != shape:
                        misshaped.append(f"{stored} is {list(found.get_shape())}, not {list(shape)}")
                        continue
                    if part is None:
                        target.copy_(shard.get_tensor(stored))
                    else:
                        _copy_parts(found, target, part)
                    if progress is not None:
                        progress(len(wanted) - len(missing), len(wanted))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file.name}: {error}") from error
    problems = [
        f"{len(names)} {kind}: {', '.join(sorted(names)[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        for kind, names in (("missing", missing), ("unknown", surplus), ("of the wrong shape", misshaped))
        if names
    ]
    if problems:
        raise ConfigError(f"{folder.name}: the weights do not fit the model: {'; '.join(problems)}")
    return left_out


def has_other_head(model_dir: str | Path, own_name: Callable[[str], str | None] = str) -> bool:
    """Whether the folder's `HEAD` is there and another table than its `TABLE`. Raises `ConfigError`."""
    with contextlib.ExitStack() as opened:
        found: dict[str, Any] = {}
        for file in weight_files(Path(model_dir)):
            try:
                shard = opened.enter_context(safe_open(file, framework="pt"))
                for stored in shard.keys():  # noqa: SIM118 (not a dict)
                    if (name := own_name(stored)) in (HEAD, TABLE):
                        found[name] = shard.get_slice(stored)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{file.name}: {error}") from error
        return len(found) == 2 and not _same(found[HEAD], found[TABLE])


def _same(one: Any, other: Any) -> bool:
    """Of two slices of files: their values, which come into memory chunk by chunk."""
    shape = one.get_shape()
    if shape != other.get_shape() or len(shape) != 2:
        return False
    starts = range(0, shape[0], _ROWS)
    return all(bool((one[at : at + _ROWS] == other[at : at + _ROWS]).all()) for at in starts)


def whole_shape(target: Tensor, shard: Shard | None) -> tuple[int, ...]:
    """Of the checkpoint's tensor that `target` holds a part of."""
    shape = list(target.shape)
    if shard is not None:
        shape[shard.dim] = shard.whole
    return tuple(shape)


def _copy_parts(source: Any, target: Tensor, shard: Shard) -> None:
    """`source` is a tensor or a slice of a file: indexing reads what is asked for."""
    at = 0
    for start, length in shard.ranges():
        index = (*(slice(None),) * shard.dim, slice(start, start + length))
        target.narrow(shard.dim, at, length).copy_(source[index])
        at += length


def _target(
    name: str, wanted: Mapping[str, Tensor], stacked: Mapping[str, tuple[Tensor, Sequence[str]]]
) -> tuple[Tensor | None, Sequence[str]]:
    if name in stacked:
        return stacked[name]
    return wanted.get(name), (name,)


def _is_redundant(name: str, wanted: Mapping[str, Tensor]) -> bool:
    """Tensors that some exporters write and no model needs: rotary tables, and the copy of a tied head."""
    return name.endswith(".rotary_emb.inv_freq") or (name == HEAD and name not in wanted)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder, by its index if it has one. Raises `ConfigError`."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{INDEX}: {error!r}: not a safetensors index") from error
        files = [folder / name for name in names]
    else:
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder.name}: no *.safetensors: convert the weights, or try --load-format dummy")
    if absent := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{folder.name}: {INDEX} names files that are not there: {', '.join(absent[:_SHOWN])}")
    return files


def dummy_weights(wanted: Mapping[str, Tensor], seed: int, shards: Mapping[str, Shard] | None = None) -> None:
    """Fill with seeded noise that keeps activations finite. A tensor's values depend on its name, its shape, `seed` and
    the kind of its device only, not on what it is merged with or on the order; a shard's are those of the whole
    tensor."""
    for name, target in wanted.items():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
            continue
        # the CPU generator reads the low 32 bits of its seed only
        place = target.device if target.is_cuda else "cpu"
        generator = torch.Generator(device=place).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        shard = (shards or {}).get(name)
        noise = torch.empty(whole_shape(target, shard), dtype=torch.float32, device=place)
        noise.normal_(0.0, 0.02, generator=generator)
        if shard is None:
            target.copy_(noise)
        else:
            _copy_parts(noise, target, shard)
