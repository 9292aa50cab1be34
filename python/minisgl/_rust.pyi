"""The compiled part of the package; stubtest holds this file against it."""

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, final, type_check_only

import numpy as np
from numpy.typing import NDArray

from minisgl.engine.api import SlotAssignment
from minisgl.metrics.gateway import Readings
from minisgl.metrics.keys import KeyReading
from minisgl.parsers.api import Part
from minisgl.routing.api import Placed
from minisgl.scheduler.api import ControlPlaneConfig, Stats, TreeView
from minisgl.scheduler.parts import Candidate, PlannedChunk, PrefixMatch, PrefixTree
from minisgl.step import Events, Int32Array, Int64Array, StepBuffers

__all__ = [
    "GGUF_TYPES",
    "AnswerParser",
    "AnswerTools",
    "ContentScan",
    "ControlPlane",
    "CpuAdapter",
    "CpuEngine",
    "CpuHead",
    "CpuSampler",
    "EnginePool",
    "Gateway",
    "GrammarMatcher",
    "GrammarTokenizer",
    "PageStore",
    "RadixCacheHandle",
    "RadixCacheManager",
    "RadixMatch",
    "Router",
    "StagedPages",
    "StepOutput",
    "StepPlan",
    "TextDecoder",
    "TextStream",
    "TextTokenizer",
    "Thinking",
    "ToolFormat",
    "answer_rules",
    "build_info",
    "check_grammar",
    "cpu_limits",
    "decode_blocks",
    "encode_blocks",
    "gguf_head_bytes",
    "gguf_header",
    "gguf_parts",
    "make_input_mapping",
    "make_metadata_buffers",
    "make_positions",
    "make_write_mapping",
    "prefill_admission_plan",
    "quantize_weights",
    "recode_from_engine",
    "recode_to_engine",
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
    places: dict[str, tuple[Path, int, int]]  # the file, the first byte in it, and the first after it
    head_bytes: int  # where the first file's tensors begin

def gguf_header(path: str | PathLike[str]) -> GgufHeader:
    """What a GGUF file, or the parts of which it is the first, says before its tensors, all checked against its size.
    `ValueError` names what is wrong."""

def gguf_parts(path: str | PathLike[str]) -> list[Path]:
    """The files of the model that begins in `path`. `ValueError` names what is missing."""

def gguf_head_bytes(path: str | PathLike[str]) -> int:
    """The same checks, and only where the tensors begin: ten times as fast."""

GGUF_TYPES: tuple[str, ...]
"""The types of tensors that `decode_blocks` and the CPU engine read."""

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
    @property
    def num_state_begins(self) -> int: ...
    @property
    def num_state_saves(self) -> int: ...
    @property
    def num_page_loads(self) -> int: ...
    @property
    def num_background(self) -> int: ...

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
    def tree_view(self, limit: int) -> TreeView: ...
    def cached_pages(self, tokens: Int32Array, namespace: int) -> int: ...
    def drafts_wanted(self) -> list[tuple[int, int]]: ...
    def check(self) -> None: ...
    # for tests
    def tree_pages(self) -> list[tuple[tuple[int, ...], int]]: ...
    def tree_states(self) -> list[tuple[tuple[int, ...], int]]: ...
    def page_table(self, req_id: int) -> list[int]: ...
    def free_pages(self) -> list[int]: ...
    reserve_ratio: int

# ------------------------------------------------------------------------------- minisgl.hotpath, see docs/scheduler.md

_Numbers: TypeAlias = list[int] | Int32Array

@final
class RadixCacheHandle:
    """The end of a matched prefix. Unlocked, it can be used until pages leave the cache."""

    @property
    def cached_len(self) -> int:
        """Tokens of the prefix, whole pages."""

@final
class RadixMatch(PrefixMatch): ...  # type: ignore[misc]  # what a protocol declares counts as abstract

@final
class RadixCacheManager(PrefixTree):  # type: ignore[misc]  # as above
    """A prefix cache: a radix tree over whole pages, and the pool of its pages 0 .. num_pages - 1.

    The methods here are for scripts. As a `PrefixTree` it has nodes that are numbers; a number that is no node is a
    broken invariant.
    """

    def __new__(
        cls,
        num_pages: int,
        page_size: int = 1,
        policy: Literal["lru", "lfu", "naive"] = "lru",
        num_checkpoints: int | None = None,
    ) -> RadixCacheManager: ...
    def take(self, num_pages: int) -> list[int]:
        """Get free pages; the cache evicts what lacks."""

    def free(self, pages: _Numbers) -> None:
        """Give pages back that were taken; the last of them is given out first."""

    def insert_prefix(self, tokens: _Numbers, pages: _Numbers, namespace: int = 0) -> int:
        """Cache `tokens` [len(pages) * page_size] in `pages` that were taken; returns how many of the first ones the
        cache had already: those stay with the caller."""

    def match_prefix(self, tokens: _Numbers, namespace: int = 0) -> tuple[RadixCacheHandle, list[int]]:
        """The longest cached prefix of `tokens` and its pages [cached_len // page_size]. It counts as used."""

    def lock_handle(self, handle: RadixCacheHandle, unlock: bool = False) -> None:
        """Keep the pages of a handle from eviction, or take one such lock back."""

    def evict(self, num_pages: int) -> list[int]:
        """Evict the prefixes that are due first; returns their pages, which are free then."""

    def size_info(self) -> tuple[int, int]:
        """Cached pages that may be evicted, and those that are locked."""

    def check_integrity(self) -> None:
        """Check all that must hold; raises `ControlPlaneError`. O(everything)."""

def prefill_admission_plan(
    candidates: list[Candidate],
    *,
    budget: int,
    available: int,
    page_size: int = 1,
    max_page_changes: int = 65_536,
    reserve_ratio: int = 716,
    needed: int = 0,
) -> list[PlannedChunk]:
    """The chunks of waiting prompts, in order, to the first that gets nothing or lacks pages by the estimate.

    `budget` tokens and `available` pages (free or evictable) are there; `reserve_ratio` / 1024 of the tokens that a
    request may make are expected, and `needed` pages for those that run.
    """

def make_positions(starts: _Numbers, extend_lens: _Numbers) -> Int32Array:
    """The position of each token of a step [sum(extend_lens)]."""

def make_input_mapping(req_slots: _Numbers, extend_lens: _Numbers) -> Int32Array:
    """The request slot of each token of a step [sum(extend_lens)]."""

def make_write_mapping(seq_lens: _Numbers, samples: _Numbers) -> Int32Array:
    """The position of the token that each row samples [num_rows], -1 where `samples` is 0."""

def make_metadata_buffers(
    starts: _Numbers, extend_lens: _Numbers, pages: _Numbers, page_size: int = 1
) -> dict[str, Int32Array]:
    """The arrays of `MakeMetadata`, each a view of the array `packed`."""

@final
class CpuSampler:
    """The CPU engine's sampler without its engine, for the suite that holds it against the torch engine's."""

    def __new__(cls, num_slots: int, vocab_size: int, eos_ids: Sequence[int]) -> CpuSampler: ...
    def bind(self, binding: SlotAssignment) -> None: ...
    def step(
        self,
        logits: NDArray[np.float32],
        slots: Sequence[int],
        positions: Sequence[int],
        masks: Sequence[Int32Array | None] | None = None,
    ) -> tuple[list[int], list[tuple[float, list[int], list[float]] | None]]:
        """Change `logits` [n, vocab_size] in place as the slots ask and `masks` [n] let, and record the tokens [n] that
        are returned, with the log probability of each, the most likely ids and theirs, where a slot asks."""

    def record(self, slot: int, token: int) -> None: ...
    def prompt_part(self, slot: int, start: int, count: int) -> tuple[int, int, list[int], int] | None:
        """Request, first position, tokens and number of alternatives of the prompt log probabilities that a row of
        `count` positions from `start` on gives."""

@final
class Router:
    """`minisgl.routing.api.Router`."""

    def __new__(cls, config: str) -> Router:
        """A `minisgl.routing.api.RouterConfig` as JSON. Raises `ValueError`."""

    def engine_up(self, engine: int, num_pages: int | None = None) -> None: ...
    def engine_down(self, engine: int) -> list[int]: ...
    def report(self, engine: int, num_waiting: int, num_running: int) -> None: ...
    def add(
        self,
        req_id: int,
        tokens: Int32Array,
        priority: int = 0,
        key: int = 0,
        *,
        again: bool = False,
        namespace: int = 0,
    ) -> None: ...
    def place(self) -> list[Placed]: ...
    def remove(self, req_id: int, num_generated: int = 0) -> None: ...
    def loads(self) -> list[int]: ...
    @property
    def num_waiting(self) -> int: ...

@final
class CpuAdapter:
    """An adapter as the CPU engine computes it. `pairs`: layer, part such as "q_proj", A and B as bytes of float32."""

    def __new__(cls, settings: str, pairs: Sequence[tuple[int, str, bytes, bytes]]) -> CpuAdapter: ...

@final
class CpuHead:
    """A table of halves, "bfloat16" or "float16", [rows, columns] as uint8, by which float32 rows are multiplied.
    `gomp_parallel`: where the process has that function of GNU's OpenMP, whose threads are used then; 0: nowhere.
    Raises `ValueError`, of (fault, text) where the table or the processor is at fault."""

    def __new__(
        cls, table: object, kind: str, shape: tuple[int, int], isa: str | None, threads: int, gomp_parallel: int
    ) -> CpuHead: ...
    @staticmethod
    def isa(held_down_by: str | None) -> str: ...
    @property
    def width(self) -> int:
        """_Numbers of a row of products, a multiple of 16."""
    def product(self, x: object, out: object, bf16: bool) -> None:
        """float32 arrays: [n, columns] -> [n, width]. `bf16`: the numbers of `x` are bfloat16's."""

def cpu_limits(threads: int, seconds: float) -> list[tuple[str, str, float]]:
    """(what, instruction set, how much a second): `read` in GB/s, `f32`, `int8`, `bf16` in G multiply-adds."""

@final
class CpuEngine:
    """The CPU engine's tensors, kernels and sampling. Failed loads raise `ValueError` of (fault, text), failed steps
    `RuntimeError`."""

    def __new__(cls, settings: str, say: Callable[[int, int], object]) -> CpuEngine: ...
    @staticmethod
    def page_bytes(settings: str) -> int: ...
    @staticmethod
    def state_bytes(settings: str) -> int: ...
    @staticmethod
    def operations(settings: str) -> str: ...
    def about(self) -> dict[str, Any]: ...
    def times(self) -> dict[str, float]: ...
    def keep(self, store: PageStore) -> None: ...
    def set_heads(
        self,
        embedding: Sequence[tuple[str, bytes, bytes, float]],
        score: tuple[str, Sequence[tuple[str, bytes, bytes, float]]] | None,
    ) -> None: ...
    def add_adapter(self, number: int, adapter: CpuAdapter) -> None: ...
    def remove_adapter(self, number: int) -> None: ...
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
        freed: Int32Array,
        state_begins: Int32Array,
        state_saves: Int32Array,
        page_loads: Int32Array | None = None,
    ) -> tuple[
        Int32Array,
        tuple[list[int], list[float], list[list[int]], list[list[float]]] | None,
        list[tuple[int, int, list[float], list[list[int]], list[list[float]]]],
        list[tuple[int, bytes]],
        dict[int, str],
    ]: ...
    def prompt_logits(self, tokens: Int32Array) -> bytes: ...
    @property
    def keeps_panels(self) -> bool: ...
    def keep_panels(self) -> int | None: ...
    def close(self) -> None: ...

@final
class StagedPages:
    """Pages of a text, read: see `minisgl.engine.api.StoredPages`."""

    @property
    def columns(self) -> tuple[int, int]: ...
    def page(self, column: int) -> bytes: ...  # of those that there are
    @property
    def state(self) -> bytes | None: ...

@final
class PageStore:
    """Pages of KV, and states if `state_bytes` says so, in a folder, of one model that computes in one way. Whatever
    touches the disk runs without the GIL; only what opens a folder raises `OSError`."""

    def __new__(
        cls, folder: str, limit: int, identity: bytes, page_size: int, page_bytes: int, state_bytes: int = 0
    ) -> PageStore: ...
    @property
    def identity(self) -> bytes: ...
    @property
    def state_bytes(self) -> int: ...
    def stage(self, tokens: Int32Array, first: int, most: int, space: bytes = ...) -> StagedPages: ...
    def page(self, tokens: Int32Array, column: int) -> bytes | None:
        """If it is there, whatever states are."""

    def put(self, tokens: Int32Array, first: int, pages: Sequence[bytes]) -> None:
        """Write them now, whatever is there. Raises `OSError`."""

    def put_state(self, tokens: Int32Array, num_pages: int, state: bytes) -> None:
        """The same of the state behind so many pages."""

    def slow_down(self, seconds: float) -> None:
        """For tests: from now on the disk takes so much longer for a page."""

    def counts(self) -> tuple[int, int, int, int, int, int, int, int]: ...
    def take_trouble(self) -> str | None:
        """Why the last page that failed did, if any has since this was asked."""

    def flush(self, seconds: float) -> None: ...
    @staticmethod
    def totals(folder: str) -> tuple[int, int, int, int]:
        """Pages, states, bytes of their files, damaged files; so of the next two."""

    @staticmethod
    def clear(folder: str) -> tuple[int, int, int, int]: ...
    @staticmethod
    def verify(folder: str) -> tuple[int, int, int, int]: ...
    @staticmethod
    def digest(files: Sequence[str]) -> bytes: ...

@final
class Gateway:
    """HTTP in front of the Python server: writes the answers to requests for text, of which it asks Python what is to
    be generated, and passes all else on. Its thread starts with it; it needs no interpreter."""

    def __new__(cls, listener_fd: int, engine: str, fallback: str) -> Gateway:
        """Accept clients on a duplicate of the descriptor. `engine` and `fallback` are the Unix sockets of the engine
        process and of the Python server. Raises `OSError`."""

    def serve(self, config: str, tokenizer: TextTokenizer) -> bool:
        """Answer requests for text, from now on. `config`: `server.gateway_config` as JSON. False: not before the
        engine process answers. Raises `ValueError`."""

    def questions_fd(self) -> int:
        """A descriptor that can be read when there is a question: it is to be read empty before they are taken."""

    def questions(self) -> list[tuple[int, str, str, list[tuple[bytes, bytes]], bytes | None]]:
        """Those that wait: number, method, target, headers, and the body; None: may the caller send one?"""

    def withdrawn(self) -> list[int]:
        """The numbers of questions whose clients have gone, or that took too long: to be asked before `questions`."""

    def answer(self, number: int, prepared: bytes) -> bool:
        """Answer a question by a frame of `message.prepared`. What is to be generated counts as waiting from now on.
        False: nobody waits for it any more. Raises `ValueError`."""

    def drain(self) -> None:
        """Pass everything on, from now on."""

    def fail(self, reason: str) -> None:
        """The same, and end what it is answering with this error."""

    def stop(self, grace_s: float) -> None:
        """Close connections, at the latest after `grace_s`. Idempotent."""

    def beat(self) -> None:
        """The Python server's event loop runs. `/readyz` is passed on when it has not said so for a while."""

    @property
    def num_open(self) -> int:
        """Requests that it is answering."""

    def waiting(self) -> tuple[int, int, int]:
        """Choices without a row, tokens of their prompts, and all choices that the engine has: asked for every request,
        so without the rest of `readings`."""

    def key(self, number: int) -> KeyReading | None:
        """What an API key has used there; None before `serve`."""

    def readings(self) -> Readings:
        """What it has counted and measured since it started."""

@final
class EnginePool:
    """Several engine processes behind one socket: to front ends one engine process, to engine processes a front end.
    Its thread needs no interpreter.

    An engine that is lost (its connection ends, or it is silent) loses its requests to others, where they go on. The
    pool connects to its socket again, all the time, and uses it as soon as it is ready. Front ends learn of it by
    `EngineState`. When no engine is ready or starting, or one is lost before all were ready for the first time, they
    get `EngineFailed`, and the pool is done."""

    def __new__(cls, config: str) -> EnginePool:
        """`config` as JSON: `listen` (path of its socket; front ends can connect at once), `engines` (paths of theirs,
        which need not be there yet), `router` (fields of `routing.api.RouterConfig`; `num_engines` follows from
        `engines`), `step_timeout` (seconds that a forward may take). Raises `ValueError`, `OSError`."""

    def restarting(self, engine: int, yes: bool) -> None:
        """While `yes`, a process of this engine is being started, or will be: it counts as starting. Raises
        `ValueError`."""

    def readings(self) -> dict[str, Any]:
        """By engine: `loads` (requests there), `states` (as in `EngineState`), `num_losses_total`. Of all: `num_live`
        requests, `num_waiting` of them in line, `num_moved_total`."""

    def stop(self) -> None:
        """Close all connections and remove the socket. Idempotent."""

def recode_to_engine(frame: bytes) -> bytes:
    """For comparing the codecs: a frame without its length, read as the pool reads it, and written as the pool writes
    it, with its length. `ValueError` if it cannot be read."""

def recode_from_engine(frame: bytes) -> bytes:
    """The same of what a pool says to front ends."""

@final
class TextTokenizer:
    """The text of a model: what `minisgl.tokenizer.Tokenizer` and the gateway encode and decode with. Safe to use from
    several threads, which go on meanwhile."""

    def __new__(
        cls, file: str | PathLike[str] | None = None, text: str | None = None, cache_bytes: int = ...
    ) -> TextTokenizer:
        """From a tokenizer.json: its file or its text. Raises `ValueError`. `cache_bytes`: of what the next turn of a
        conversation need not encode again."""

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None, guards: Sequence[int] = ...
    ) -> Int32Array:
        """Return the ids of `text`; no added token is matched across one of the `guards`, offsets of characters in
        order. Raises `NotEncodable`, `TooManyTokens`, and `UnicodeEncodeError` for half a surrogate."""

    def has_markers(self, value: Any) -> bool:
        """Return whether a text in `value` (a text; a dictionary, list or tuple of such values) spells a marker, or
        ends with the beginning of one. A marker is an added token that is special or looks like one."""

    def guarded(self, text: str, guard: str, kept: Sequence[str]) -> str:
        """Return `text` with `guard` behind the first character of each such place, but for the markers of `kept`."""

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, most: int | None = None
    ) -> list[Int32Array]: ...
    def encode_pair(self, one: str, other: str) -> Int32Array:
        """With the special tokens that stand before, between and behind two texts."""

    def min_tokens(self, text: str, most: int) -> int:
        """A number of tokens that it has at least; no more is found out than whether that is beyond `most`."""

    def pieces(self, text: str, size: int) -> list[str]:
        """As a long text is cut, from `size` bytes on: each has the ids that it has in the whole."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def token_id(self, text: str) -> int | None: ...
    @property
    def num_ids(self) -> int: ...
    @property
    def special_ids(self) -> list[int]: ...
    @property
    def leading_ids(self) -> Int32Array: ...
    @property
    def caches(self) -> bool:
        """Whether the text between special tokens is encoded by itself, and kept."""

    def cache_stats(self) -> dict[str, int]: ...
    def decoder(self, skip_special_tokens: bool = True) -> TextDecoder: ...
    def stream(
        self, stop: Sequence[str], shown: Sequence[int], min_tokens: int, formats: _Formats | None = None
    ) -> TextStream:
        """`formats`: how the answer is taken apart; stop strings are looked for in its content alone."""

@final
class TextDecoder:
    """State of one stream: token ids in, text out, each character once and whole."""

    def push(self, ids: Sequence[int]) -> str: ...
    def place(self, token_id: int) -> tuple[int, str]:
        """`push` of one id, and the number of characters of the new text that stand before the one in which the id
        begins: those of held back bytes, if it does not go on with them."""

    def flush(self) -> str:
        """What was held back: the bytes of an unfinished character as U+FFFD."""

@final
class TextStream:
    """The text of one answer as its ids come; `stopped` once a stop string was found. The deltas joined are the text
    before the first match, whatever the chunks were: the one that ends first; of those that end at the same place, the
    one that begins first. What comes before id number `min_tokens` belongs to no stop string."""

    def push(self, ids: Sequence[int]) -> str:
        """The new text of ids that come before the end."""

    def take(self, ids: Sequence[int], ended: bool, by_token: bool) -> tuple[str, int]:
        """The new text, and how many of the ids count: all, or those up to the one that completes a stop string. With
        `ended` the answer ends with them: text that was held back comes, or completes a stop string, and nothing may
        come after it. `by_token`: the last id, if there is one, is the stop token that ended it. It counts, unless a
        stop string comes before it, and is no text."""

    @property
    def stopped(self) -> bool: ...
    @property
    def matched_stop(self) -> str | None: ...

@final
class GrammarTokenizer:
    """A tokenizer.json's text as the library llguidance wants it, with at least `vocab_size` ids. The GIL is free
    meanwhile. Raises `ValueError`."""

    def __new__(
        cls, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int], max_time_s: float = 30.0
    ) -> GrammarTokenizer:
        """All masks of a request may take `max_time_s` of processor time."""

@final
class GrammarMatcher:
    """A `minisgl.grammar.slots.Matcher`. The GIL is free while its grammar is compiled; what is wrong with it is its
    `error`."""

    def __new__(cls, tokenizer: GrammarTokenizer, grammar: str) -> GrammarMatcher: ...
    @property
    def error(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    def copy(self) -> GrammarMatcher: ...
    def restart(self, generated: Sequence[int]) -> None: ...
    def fill(self, mask: Int32Array) -> None: ...
    def try_fill(self, mask: Int32Array, left_s: float) -> bool: ...
    def prepare(self) -> None: ...
    def consume(self, token: int) -> None: ...

def check_grammar(grammar: str, lexer_fuel: int, num_steps: int, first: bytes) -> str:
    """Why the library llguidance does not take a grammar; empty if it does. It is read, and `num_steps` bytes of an
    answer are begun with it, each one of `first` if that may come. The GIL is free meanwhile."""

@final
class ToolFormat:
    """A format in which models write tool calls (`rust/minisgl-text/src/answer/formats.rs`)."""

    def __new__(cls, name: str, template: str, token_id: Callable[[str], int | None]) -> ToolFormat:
        """`name`: of `names`, or auto: the one of a model with this template and these tokens. Raises `ValueError`."""

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> int:
        """Its place in the table of formats."""

    @property
    def markers(self) -> list[str]:
        """All that its parser looks for."""

    def explained(self) -> str:
        """How to call a tool, for a model whose template does not say it."""

    def written(self, name: str, arguments: str) -> str:
        """A call as the model writes it."""

    @staticmethod
    def names() -> list[str]:
        """The names of all formats, those of other servers among them."""

@final
class Thinking:
    """The markers around what a model thinks."""

    @staticmethod
    def find(name: str, template: str) -> Thinking | None:
        """`name`: of `names`, none, or auto: the one of a model with this chat template. Raises `ValueError`."""

    @staticmethod
    def names() -> list[str]:
        """The names of all that there are, those of other servers among them."""

    @property
    def name(self) -> str: ...
    @property
    def markers(self) -> list[str]:
        """All that its parser looks for."""

    @property
    def begin(self) -> str: ...
    @property
    def end(self) -> str: ...
    @property
    def is_open(self) -> bool | None:
        """An answer begins within the markers; False: behind them; None: the answer shows it."""

    def opened(self, is_open: bool | None) -> Thinking: ...

@final
class AnswerTools:
    """The tools of a request."""

    def __new__(cls, schemas: str) -> AnswerTools:
        """JSON: an object of the schemas of the tools' parameters by the tools' names. Raises `ValueError`."""

@final
class AnswerParser:
    """A `minisgl.parsers.api.MessageParser`. Ids of calls are drawn from `new_id`: so many characters of these."""

    def __new__(
        cls,
        format: ToolFormat | None,
        thinking: Thinking | None,
        tools: AnswerTools | None,
        new_id: Callable[[int, str], str],
    ) -> AnswerParser: ...
    def push(self, text: str) -> list[Part]: ...
    def finish(self, cut: bool = False) -> list[Part]: ...
    @property
    def broken(self) -> list[int]: ...

_Formats = tuple[ToolFormat | None, Thinking | None, AnswerTools | None]
"""How answers are taken apart: calls, what the model thinks, the request's tools."""

@final
class ContentScan:
    """Tells the content of one answer from the rest of its text."""

    def __new__(cls, formats: _Formats) -> ContentScan: ...
    def push(self, text: str, ended: bool) -> list[tuple[str, bool]]:
        """The next pieces of the text that are decided, and whether they are content; with `ended` all that is left."""

def answer_rules(
    format: ToolFormat | None,
    thinking: Thinking | None,
    token_id: Callable[[str], int | None],
    body: str | None,
    tools: Sequence[tuple[str, str, str | None]] | None,
    required: bool,
    many: bool,
    budget: int | None,
) -> str:
    """Lark's rules of an answer (`rust/minisgl-text/src/tools.rs`). `body`: the form of one that is no call; `tools`:
    those that may be called, with a rule for the arguments and their schema if they are bound to it; `required`: it
    must call; `many`: several times; `budget`: tokens of thinking, which a token ends. Raises `ValueError`."""
