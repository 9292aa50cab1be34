"""The compiled part of the package; stubtest holds this file against it."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, final, type_check_only

import numpy as np
from numpy.typing import NDArray

from minisgl.engine.api import SlotAssignment
from minisgl.scheduler.api import ControlPlaneConfig, Stats
from minisgl.step import Events, Int32Array, Int64Array, StepBuffers

__all__ = [
    "ControlPlane",
    "CpuEngine",
    "CpuSampler",
    "RadixCacheHandle",
    "RadixCacheManager",
    "StepOutput",
    "StepPlan",
    "build_info",
    "decode_blocks",
    "encode_blocks",
    "gguf_head_bytes",
    "gguf_header",
    "make_input_mapping",
    "make_metadata_buffers",
    "make_positions",
    "make_write_mapping",
    "prefill_admission_plan",
    "quantize_weights",
    "run_load",
]

@type_check_only
class BuildInfo(TypedDict):
    version: str
    profile: str  # release or debug
    features: list[str]

def build_info() -> BuildInfo: ...

@type_check_only
class LoadResult(TypedDict):
    """One row per request that was begun, by index; times are seconds since `started`, NaN for what did not happen."""

    index: NDArray[np.int64]
    scheduled: NDArray[np.float64]  # its arrival; closed loop: when its client was free
    connected: NDArray[np.float64]  # NaN: over a connection that was there
    sent: NDArray[np.float64]
    headers: NDArray[np.float64]
    first: NDArray[np.float64]  # first and last event with text
    last: NDArray[np.float64]
    end: NDArray[np.float64]
    events: NDArray[np.int64]
    text_events: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]  # of the server's `usage`; -1: it said nothing
    completion_tokens: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    status: NDArray[np.int64]  # HTTP; 0: none came
    failure: NDArray[np.int64]  # index into `failures`; 0: none
    bytes: NDArray[np.int64]  # of the body
    gaps: NDArray[np.float32]  # seconds between events with text, of one request after the other
    num_gaps: NDArray[np.int64]  # how many of `gaps` are whose
    errors: list[str]
    failures: list[str]  # names
    started: float  # on the clock of `time.monotonic`
    duration_s: float
    cpu_s: float  # of the generator's threads

def run_load(
    url: str,
    bodies: Sequence[bytes],
    *,
    chains: Sequence[int],
    arrivals: Sequence[float] | None = None,
    concurrency: int = 0,
    ramp_s: float = 0.0,
    stop_after_s: float = ...,
    method: str = "POST",
    headers: Sequence[tuple[str, str]] = ...,
    keep_alive: bool = True,
    connect_timeout_s: float = 10.0,
    timeout_s: float = 600.0,
    threads: int = 1,
    progress: Callable[[int, int, int, int], object] | None = None,
) -> LoadResult:
    """Send requests to `url` (http only), wait for the ends. Request i has body `i % len(bodies)`; `chains` are numbers
    of requests that follow one another. Open loop with `arrivals` (ascending seconds, one per chain), else closed loop
    with `concurrency` clients that begin over `ramp_s` seconds and nothing after `stop_after_s`. `progress` gets the
    requests finished, of these failed, in flight, and the text events, ten times a second. `ValueError` for a plan that
    makes no sense, `RuntimeError` if the generator broke; a signal's exception cancels the run."""

@type_check_only
class GgufHeader(TypedDict):
    metadata: dict[str, Any]  # int, float, bool, str, or a list of one of them
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # ggml's name of the type; shape, outermost first
    places: dict[str, tuple[int, int]]  # first byte in the file, and the first after it
    head_bytes: int  # where the tensors begin

def gguf_header(path: str | PathLike[str]) -> GgufHeader:
    """What a GGUF file says before its tensors, all checked against its size. `ValueError` names what is wrong."""

def gguf_head_bytes(path: str | PathLike[str]) -> int:
    """The same checks, and only where the tensors begin: ten times as fast."""

def decode_blocks(kind: str, data: bytes) -> bytes:
    """Whole blocks of a ggml type, such as Q4_K, as little-endian float32: the exact values. `ValueError` for a type
    without a decoder."""

def encode_blocks(kind: Literal["Q8_0", "Q4_1"], numbers: bytes) -> bytes:
    """Little-endian float32 as ggml's reference quantization has it. `ValueError` if one is not finite."""

def quantize_weights(
    source: str | PathLike[str],
    quantization: Literal["q8", "q4"],
    file: str | PathLike[str],
    progress: Callable[[int, int], object],
) -> bool:
    """A GGUF file of the matrices of `source`, a GGUF file or folder of safetensors, in blocks of 8 or 4 bits; made now
    if it is not there, damaged, or of other weights. False, and no file: all of `source` is in blocks already.
    `progress` gets the bytes done and all bytes, if it is made; what it raises ends the work. `ValueError` of
    (fault, text), as of `CpuEngine`."""

@final
class StepPlan:
    """The attributes of `minisgl.step.StepPlan`, read-only."""

    @property
    def step(self) -> int: ...
    @property
    def ring_index(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_decode_rows(self) -> int: ...
    @property
    def padded_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def num_page_table_updates(self) -> int: ...
    @property
    def num_page_ids(self) -> int: ...
    @property
    def num_assigned(self) -> int: ...
    @property
    def num_freed(self) -> int: ...
    @property
    def num_retracted(self) -> int: ...
    @property
    def num_free_pages(self) -> int: ...
    @property
    def num_evictable_pages(self) -> int: ...

@final
class StepOutput:
    """The attributes of `minisgl.step.StepOutput`; the arrays are read-only."""

    @property
    def step(self) -> int: ...
    @property
    def req_ids(self) -> Int64Array: ...
    @property
    def tokens(self) -> Int32Array: ...
    @property
    def reasons(self) -> Int32Array: ...
    @property
    def rows(self) -> Int32Array: ...
    def __len__(self) -> int: ...

@final
class ControlPlane:
    def __new__(cls, config: ControlPlaneConfig, buffers: StepBuffers) -> ControlPlane: ...
    @property
    def config(self) -> ControlPlaneConfig: ...
    @property
    def buffers(self) -> StepBuffers: ...
    @property
    def metadata_ns(self) -> int: ...
    def schedule(self, step: int, events: Events) -> StepPlan: ...
    def commit(self, step: int, tokens: Int32Array) -> StepOutput: ...
    def stats(self) -> Stats: ...
    def check(self) -> None: ...
    # for tests
    def tree_pages(self) -> list[tuple[tuple[int, ...], int]]: ...
    def page_table(self, req_id: int) -> list[int]: ...
    def free_pages(self) -> list[int]: ...
    reserve_ratio: int

@final
class CpuSampler:
    """The CPU engine's sampler without its engine, for the suite that holds it against the torch engine's."""

    def __new__(cls, num_slots: int, vocab_size: int, eos_ids: Sequence[int]) -> CpuSampler: ...
    def bind(self, binding: SlotAssignment) -> None: ...
    def step(
        self, logits: NDArray[np.float32], slots: Sequence[int], positions: Sequence[int]
    ) -> tuple[list[int], list[tuple[float, list[int], list[float]] | None]]:
        """Change `logits` [n, vocab_size] in place as the slots ask, and record the tokens [n] that are returned, with
        the log probability of each, the most likely ids and theirs, where a slot asks."""

    def record(self, slot: int, token: int) -> None: ...
    def prompt_part(self, slot: int, start: int, count: int) -> tuple[int, int, list[int], int] | None:
        """Request, first position, tokens and number of alternatives of the prompt log probabilities that a row of
        `count` positions from `start` on gives."""

# ---------------------------------------------------------------------------------- functions, see docs/scheduler.md

@final
class RadixCacheHandle:
    """The end of a matched prefix. Unlocked, it is good until the next eviction."""

    @property
    def cached_len(self) -> int: ...

@final
class RadixCacheManager:
    """A prefix cache over pages 0 .. num_pages - 1, which the caller gives out and gets back.

    Raises `ValueError` for bad arguments (nothing is changed then), `ControlPlaneError` for a broken invariant.
    """

    def __new__(
        cls, num_pages: int, page_size: int = 1, policy: Literal["lru", "lfu"] = "lru"
    ) -> RadixCacheManager: ...
    def match_prefix(self, tokens: Int32Array) -> tuple[RadixCacheHandle, Int32Array]:
        """The handle of the longest cached prefix of `tokens`, and its pages [cached_len // page_size]."""

    def lock_handle(self, handle: RadixCacheHandle, unlock: bool = False) -> None:
        """Keep the pages of a handle from eviction, or take one such lock back."""

    def insert_prefix(self, tokens: Int32Array, pages: Int32Array) -> int:
        """Let `tokens` [len(pages) * page_size] enter with their pages; returns how many of the first pages the cache
        had already: the caller keeps its own of those."""

    def evict(self, num_pages: int) -> Int32Array:
        """Take pages out, those of the prefixes that are due first. They are the caller's then."""

    def size_info(self) -> tuple[int, int]:
        """Pages that may be evicted, and pages that are locked."""

    def check_integrity(self) -> None:
        """Check everything that must hold. O(everything)."""

    def tree_pages(self) -> list[tuple[tuple[int, ...], int]]: ...

def prefill_admission_plan(
    num_tokens: Int32Array,
    num_matched_pages: Int32Array,
    max_output: Int32Array,
    *,
    budget: int,
    num_slots: int,
    num_pages: int,
    page_size: int = 1,
    reserve_ratio: int = 716,
    needed_by_started: int = 0,
    any_started: bool = False,
) -> tuple[Int32Array, Int32Array]: ...
def make_positions(starts: Int32Array, extend_lens: Int32Array) -> Int32Array: ...
def make_input_mapping(req_slots: Int32Array, extend_lens: Int32Array) -> Int32Array: ...
def make_write_mapping(seq_lens: Int32Array, samples: Int32Array) -> Int32Array: ...
def make_metadata_buffers(
    page_tables: Int32Array, starts: Int32Array, extend_lens: Int32Array, page_size: int = 1
) -> dict[str, Int32Array]: ...

@final
class CpuEngine:
    """The CPU engine's tensors, kernels and sampling. Failed loads raise `ValueError` of (fault, text), failed steps
    `RuntimeError`."""

    def __new__(cls, settings: str, say: Callable[[int, int], object]) -> CpuEngine: ...
    @staticmethod
    def page_bytes(settings: str) -> int: ...
    def about(self) -> dict[str, Any]: ...
    def times(self) -> dict[str, float]: ...
    def step(
        self,
        input_ids: Int32Array,
        positions: Int32Array,
        out_loc: Int32Array,
        req_slots: Int32Array,
        seq_lens: Int32Array,
        extend_lens: Int32Array,
        sample_rows: Int32Array,
        page_table_updates: Int32Array,
        page_ids: Int32Array,
        num_decode_rows: int,
        bindings: Sequence[SlotAssignment],
    ) -> tuple[
        Int32Array,
        tuple[list[int], list[float], list[list[int]], list[list[float]]] | None,
        list[tuple[int, int, list[float], list[list[int]], list[list[float]]]],
    ]: ...
    def prompt_logits(self, tokens: Int32Array) -> bytes: ...
    def close(self) -> None: ...
