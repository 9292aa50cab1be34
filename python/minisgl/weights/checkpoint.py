"""Filling of a torch model: from safetensors, tensor by tensor, or with seeded noise. The model's `checkpoint()` maps
tensor names to parameters.

Invariants: memory stays at the weights plus the tensor being copied (files are mapped, and a rank reads only its part);
a checkpoint that does not fit is one error that names every difference, raised before the model is used.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.distributed import Shard
from minisgl.weights.packed import PackedFolder
from minisgl.weights.quantization import Packing
from minisgl.weights.stored import weight_files

Progress = Callable[[int, int], None]
"""Callback for progress: (tensors done, tensors in total)."""
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
    packing: Packing | None = None,
) -> list[str]:
    """Copy every tensor of the folder's safetensors into `wanted`. `stacked`: tensors that may replace several wanted
    ones; name to (parameter to fill, replaced names). `shards`: the part that this rank needs of a tensor. `own_name`:
    maps a name of the folder to one of `wanted`; None leaves the tensor out. `packing`: the format of packed linear
    layers. Returns the names of the tensors that were left out. Raises `ConfigError` if the checkpoint does not fit."""
    folder = Path(model_dir)
    files = weight_files(folder)
    packed = PackedFolder(files, packing) if packing is not None else None
    filling = _Loader(wanted, stacked or {}, shards or {}, own_name, progress or (lambda done, total: None))
    for file in files:
        try:
            with safe_open(file, framework="pt") as shard:
                for stored in shard.keys():  # noqa: SIM118 (not a dict)
                    if packed is None or stored in packed.others:
                        filling.take(stored, shard.get_slice(stored))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file.name}: {error}") from error
    if packed is not None:
        for stored in packed.layers:
            filling.take(stored, torch.from_numpy(packed.full(stored)))
        filling.surplus = [stored for stored in filling.surplus if not packed.is_empty_bias(stored)]
    filling.check(folder.name)
    return filling.left_out


class _Loader:
    """The progress of filling a model: tensors still missing, and tensors that do not fit."""

    def __init__(
        self,
        wanted: Mapping[str, Tensor],
        stacked: Mapping[str, tuple[Tensor, Sequence[str]]],
        shards: Mapping[str, Shard],
        own_name: Callable[[str], str | None],
        progress: Progress,
    ) -> None:
        self._wanted, self._stacked, self._shards = wanted, stacked, shards
        self._own_name, self._progress = own_name, progress
        self._missing, self._misshaped = set(wanted), list[str]()
        self.left_out, self.surplus = list[str](), list[str]()

    def take(self, stored: str, tensor: Any) -> None:
        """Copy a stored tensor to its target. `tensor` is a tensor or a lazy slice of a file, read when indexed."""
        name = self._own_name(stored)
        if name is None:
            self.left_out.append(stored)
            return
        target, filled = _target(name, self._wanted, self._stacked)
        if target is None:
            if not _is_redundant(name, self._wanted):
                self.surplus.append(stored)
            return
        self._missing.difference_update(filled)
        part = self._shards.get(name)
        actual, shape = _shape(tensor), whole_shape(target, part)
        if actual != shape:
            self._misshaped.append(f"{stored} is {list(actual)}, not {list(shape)}")
            return
        if part is None:
            target.copy_(tensor[:])
        else:
            _copy_parts(tensor, target, part)
        self._progress(len(self._wanted) - len(self._missing), len(self._wanted))

    def check(self, folder: str) -> None:
        """Raise `ConfigError` that lists all missing, unknown and misshaped tensors, if there are any."""
        problems = [
            f"{len(names)} {kind}: {', '.join(sorted(names)[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
            for kind, names in (
                ("missing", self._missing),
                ("unknown", self.surplus),
                ("of the wrong shape", self._misshaped),
            )
            if names
        ]
        if problems:
            raise ConfigError(f"{folder}: the weights do not fit the model: {'; '.join(problems)}")


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())


def has_other_head(model_dir: str | Path, own_name: Callable[[str], str | None] = str) -> bool:
    """Return whether the folder has an LM head that differs from its embedding table. Raises `ConfigError`."""
    with contextlib.ExitStack() as opened:
        slices: dict[str, Any] = {}
        for file in weight_files(Path(model_dir)):
            try:
                shard = opened.enter_context(safe_open(file, framework="pt"))
                for stored in shard.keys():  # noqa: SIM118 (not a dict)
                    if (name := own_name(stored)) in (HEAD, TABLE):
                        slices[name] = shard.get_slice(stored)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{file.name}: {error}") from error
        return len(slices) == 2 and not _are_equal(slices[HEAD], slices[TABLE])


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two lazy slices of files have equal values. They are read in chunks."""
    shape = first.get_shape()
    if shape != second.get_shape() or len(shape) != 2:
        return False
    starts = range(0, shape[0], _ROWS)
    return all(bool((first[at : at + _ROWS] == second[at : at + _ROWS]).all()) for at in starts)


def whole_shape(target: Tensor, shard: Shard | None) -> tuple[int, ...]:
    """Return the shape of the unsharded tensor of which `target` holds the part `shard`."""
    shape = list(target.shape)
    if shard is not None:
        shape[shard.dim] = shard.whole
    return tuple(shape)


def _copy_parts(source: Any, target: Tensor, shard: Shard) -> None:
    """Copy the ranges of `shard` from `source`, a tensor or a lazy slice of a file, to `target`."""
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
    """Return whether a tensor is one that no model needs: a rotary table, or the copy of a tied head."""
    return name.endswith(".rotary_emb.inv_freq") or (name == HEAD and name not in wanted)


def dummy_weights(wanted: Mapping[str, Tensor], seed: int, shards: Mapping[str, Shard] | None = None) -> None:
    """Fill with seeded noise that keeps activations finite. A tensor's values depend only on its name, shape, `seed`
    and kind of device, not on fusing or order; a shard has the values of its part of the whole tensor."""
    for name, target in wanted.items():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
            continue
        # the CPU generator reads only the low 32 bits of its seed
        device = target.device if target.is_cuda else "cpu"
        generator = torch.Generator(device=device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        shard = (shards or {}).get(name)
        noise = torch.empty(whole_shape(target, shard), dtype=torch.float32, device=device)
        noise.normal_(0.0, 0.02, generator=generator)
        if shard is None:
            target.copy_(noise)
        else:
            _copy_parts(noise, target, shard)
