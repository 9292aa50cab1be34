"""Profiles of simulated devices: a step costs nothing, or a roofline, or interpolates a table of measured latencies
over a grid of (rows, tokens beyond one a row, mean length of a row).

A profile is data that is checked when it is read; every assumption stands in its file; an unknown key is an error. The
same load always takes the same time. At a grid point of a table the time is the measured one; between points it is
linear along each axis; beyond an end of an axis it is extrapolated with the slope at that end.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from minisgl.config import ConfigError


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of step latencies: `ms[i][j][k]` is the time in milliseconds of a step with `rows[i]` rows,
    `prefill_tokens[j]` tokens more than rows, and rows of `kv_len[k]` tokens on average after the step. Axes ascend; an
    axis with one point has no effect."""

    rows: tuple[float, ...]
    prefill_tokens: tuple[float, ...]
    kv_len: tuple[float, ...]
    ms: tuple[tuple[tuple[float, ...], ...], ...]

    def seconds(self, rows: int, tokens: int, kv_tokens: int) -> float:
        """Return the time of a step in seconds; `tokens` and `kv_tokens` are sums over all rows."""
        i, x = _locate(self.rows, rows)
        j, y = _locate(self.prefill_tokens, tokens - rows)
        k, z = _locate(self.kv_len, kv_tokens / rows if rows else 0.0)
        total = 0.0
        for di, wx in ((0, 1.0 - x), (1, x)):
            for dj, wy in ((0, 1.0 - y), (1, y)):
                for dk, wz in ((0, 1.0 - z), (1, z)):
                    if weight := wx * wy * wz:
                        total += weight * self.ms[i + di][j + dj][k + dk]
        return max(total, 0.0) / 1e3

    def check(self) -> None:
        """Raise `ConfigError` unless axes ascend and `ms` has their shape."""
        for name in ("rows", "prefill_tokens", "kv_len"):
            axis = getattr(self, name)
            if not axis or any(not low < high for low, high in itertools.pairwise(axis)):
                raise ConfigError(f"table.{name}: {list(axis)}: must be one or more ascending numbers")
        for i, plane in enumerate(self.ms):
            for j, line in enumerate(plane):
                if len(line) != len(self.kv_len) or any(not 0 <= ms < math.inf for ms in line):
                    raise ConfigError(f"table.ms[{i}][{j}]: must be {len(self.kv_len)} times, 0 or more")
            if len(plane) != len(self.prefill_tokens):
                raise ConfigError(f"table.ms[{i}]: has {len(plane)} lists, prefill_tokens {len(self.prefill_tokens)}")
        if len(self.ms) != len(self.rows):
            raise ConfigError(f"table.ms: must have {len(self.rows)} lists, one for each of rows, not {len(self.ms)}")


def _locate(axis: tuple[float, ...], at: float) -> tuple[int, float]:
    """Return the grid cell of `at`, and the relative position in it: 0 to 1, beyond that outside of the axis."""
    if len(axis) == 1:
        return 0, 0.0
    low = min(max(bisect_right(axis, at) - 1, 0), len(axis) - 2)
    return low, (at - axis[low]) / (axis[low + 1] - axis[low])


NULL = "null"
_SUFFIX = ".yaml"


class StepLoad(NamedTuple):
    """The work of a step: the counts that its simulated time depends on."""

    rows: int
    tokens: int  # computed, of all rows
    samples: int  # rows whose last token goes through the output matrix
    kv_tokens: int  # sum of the rows' lengths after the step
    pairs: int  # (token, attended token) pairs of attention, itself included


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a dense decoder, named as in its config.json."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool  # the output matrix is the embedding

    @property
    def layer_weights(self) -> int:
        """The number of weights of all layers: four attention projections and a gated MLP's three matrices, without
        norms."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def output_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def weights(self) -> int:
        return self.layer_weights + self.output_weights * (1 if self.tied else 2)

    @property
    def kv_values(self) -> int:
        """The number of key and value elements of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


class Roofline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A roofline model of step time: memory traffic or arithmetic, whichever takes longer, plus a fixed overhead; with
    several GPUs both are divided among them, and two all-reduces a layer are added.

    Achievable bandwidths in bytes/s and `flops` in FLOP/s, of one GPU; `memory` is bytes of one GPU, of which
    `memory_ratio` is for weights and KV.
    """

    model: Model
    bandwidth: float
    flops: float
    memory: float
    memory_ratio: float
    overhead_us: float  # of a step, in addition to its kernels
    layer_overhead_us: float  # of a layer: start, ramp-up and drain of its kernels
    bytes_per_weight: float = 2.0
    bytes_per_kv_value: float = 2.0
    gpus: int = 1
    all_reduce_us: float = 0.0  # latency of one all-reduce before its first byte
    link_bandwidth: float = 1.0  # bytes/s of one GPU, one way

    def seconds(self, load: StepLoad) -> float:
        """Return the time of a step in seconds. Memory: all weights once, the KV of every row once, new KV written.
        Arithmetic: 2 FLOP per weight and token, 4 per query head, dimension and attended pair. An all-reduce moves 2 (g
        - 1) / g of the activations (bf16)."""
        model, gpus = self.model, self.gpus
        weights = (model.layer_weights + model.output_weights) * self.bytes_per_weight
        kv = (load.kv_tokens + load.tokens) * self.kv_bytes
        flops = 2.0 * (model.layer_weights * load.tokens + model.output_weights * load.samples)
        flops += 4.0 * model.layers * model.heads * model.head_dim * load.pairs
        compute = max((weights + kv) / (self.bandwidth * gpus), flops / (self.flops * gpus))
        overhead = 1e-6 * (self.overhead_us + self.layer_overhead_us * model.layers)
        if gpus == 1:
            return compute + overhead
        moved = 2.0 * (gpus - 1) / gpus * load.tokens * model.hidden * 2.0
        return compute + overhead + 2 * model.layers * (1e-6 * self.all_reduce_us + moved / self.link_bandwidth)

    @property
    def kv_bytes(self) -> float:
        """The number of bytes of one token's keys and values, on all GPUs together."""
        return self.model.kv_values * self.bytes_per_kv_value

    @property
    def num_kv_tokens(self) -> int:
        """The number of tokens whose KV fits next to the weights."""
        room = self.gpus * self.memory * self.memory_ratio - self.model.weights * self.bytes_per_weight
        return int(room / self.kv_bytes)


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device that runs a model: a step takes the time of `roofline` or `table`, plus `step_ms`."""

    name: str
    about: str = ""
    roofline: Roofline | None = None
    table: Table | None = None
    context_len: int | None = None
    num_kv_tokens: int | None = None  # capacity of the KV pool; a roofline computes it from its memory
    step_ms: float = 0.0
    eos_one_in: int = 0  # n: one token in n ends a sequence; 0: clients set the lengths

    @property
    def takes_time(self) -> bool:
        return self.roofline is not None or self.table is not None or self.step_ms > 0

    def seconds(self, load: StepLoad) -> float:
        if self.roofline is not None:
            seconds = self.roofline.seconds(load)
        else:
            seconds = 0.0 if self.table is None else self.table.seconds(load.rows, load.tokens, load.kv_tokens)
        return seconds + self.step_ms / 1000

    def alone_s(self, length: int, most: int) -> float:
        """Return the seconds that a prompt of `length` tokens takes alone, in steps of at most `most` tokens."""
        total = 0.0
        for done in range(0, length, most):
            new = min(most, length - done)
            end = done + new
            load = StepLoad(1, new, int(end == length), end, new * end - new * (new - 1) // 2)
            total += self.seconds(load)
        return total

    @property
    def pool_tokens(self) -> int | None:
        """The capacity of the KV pool in tokens; None if the profile does not define it."""
        if self.num_kv_tokens is not None or self.roofline is None:
            return self.num_kv_tokens
        return self.roofline.num_kv_tokens

    def check(self) -> Profile:
        """Raise `ConfigError` at the first invalid value, else return self."""
        if self.roofline is not None and self.table is not None:
            raise ConfigError("give either roofline or table, not both")
        for name in ("context_len", "num_kv_tokens"):
            if (value := getattr(self, name)) is not None and value < 2:
                raise ConfigError(f"{name}: {value}: must be at least 2")
        if not 0 <= self.step_ms <= 60_000:
            raise ConfigError(f"step_ms: {self.step_ms}: must be at least 0 and at most 60000")
        if self.eos_one_in < 0:
            raise ConfigError(f"eos_one_in: {self.eos_one_in}: must be at least 0")
        if self.roofline is not None:
            _check_roofline(self.roofline)
        if self.table is not None:
            self.table.check()
        return self


def _check_roofline(roofline: Roofline) -> None:
    for part, prefix in ((roofline.model, "roofline.model"), (roofline, "roofline")):
        for name in part.__struct_fields__:
            value = getattr(part, name)
            may_be_zero = name.endswith("_us") or isinstance(value, bool)
            if isinstance(value, (int, float)) and (value < 0 or (value == 0 and not may_be_zero)):
                raise ConfigError(f"{prefix}.{name}: {value}: must be above 0")
    if not roofline.memory_ratio <= 1:
        raise ConfigError(f"roofline.memory_ratio: {roofline.memory_ratio}: must be at most 1")
    if roofline.num_kv_tokens < 2:
        raise ConfigError(f"roofline.memory: {roofline.memory}: the weights leave no memory for KV")


def profile_names() -> list[str]:
    """Return the names of the profiles that come with minisgl."""
    files = resources.files(f"{__package__}.profiles").iterdir()
    return [NULL, *sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))]


def load_profile(name: str) -> Profile:
    """Load a profile that comes with minisgl, by name, or a YAML or JSON file, by path. Raises `ConfigError`."""
    if name == NULL:
        return Profile(name=NULL, about="returns at once")
    try:
        if name in profile_names():
            text = resources.files(f"{__package__}.profiles").joinpath(name + _SUFFIX).read_text(encoding="utf-8")
        else:
            text = Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(profile_names())
        raise ConfigError(f"--sim-profile {name}: no such profile or file; profiles: {names}") from error
    import yaml

    try:
        raw: Any = yaml.safe_load(text)  # parses JSON, too
        if isinstance(raw, dict):
            raw = {"name": Path(name).stem, **raw}
        return msgspec.convert(raw, Profile, strict=False).check()  # not strict: YAML 1.1 reads 4.3e12 as a string
    except (yaml.YAMLError, msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"--sim-profile {name}: {error}") from error
