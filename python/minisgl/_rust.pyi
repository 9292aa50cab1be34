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
from minisgl.prompt_image import PromptImage
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
    "ImageFeatures",
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
    """Result of a load test: a row for each request sent. Times in seconds since `started`, NaN if missing."""

    index: NDArray[np.int64]
    scheduled: NDArray[np.float64]  # arrival time; closed loop: when the client was free
    connected: NDArray[np.float64]  # NaN for a reused connection
    sent: NDArray[np.float64]
    headers: NDArray[np.float64]
    first: NDArray[np.float64]  # first and last event with text
    last: NDArray[np.float64]
    end: NDArray[np.float64]
    events: NDArray[np.int64]
    text_events: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]  # from the server's `usage`; -1 if missing
    completion_tokens: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    status: NDArray[np.int64]  # HTTP status; 0 without a response
    failure: NDArray[np.int64]  # index into `failures`; 0 for no failure
    bytes: NDArray[np.int64]  # length of the response body
    gaps: NDArray[np.float32]  # seconds between text events, concatenated over the requests
    num_gaps: NDArray[np.int64]  # number of each request's `gaps`
    errors: list[str]
    failures: list[str]  # names of the failure kinds
    started: float  # start, on the clock of `time.monotonic`
    duration_s: float
    cpu_s: float  # processor time of the generator's threads

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
    """Send requests to `url` (http only) and wait until all have ended. Raises `ValueError` for an invalid plan,
    `RuntimeError` if the generator fails; an exception of a signal handler cancels the run. Request i has body `i %
    len(bodies)`; `chains` are the numbers of requests that follow one another. Open loop with `arrivals` (ascending
    seconds, one for each chain), else closed loop with `concurrency` clients that start over `ramp_s` seconds and send
    nothing after `stop_after_s`. `progress` gets the requests finished, of these failed, in flight, and the text
    events, ten times a second."""

@type_check_only
class GgufHeader(TypedDict):
    metadata: dict[str, Any]  # int, float, bool, str, or a list of one of them
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # ggml type name; shape, outermost dimension first
    places: dict[str, tuple[Path, int, int]]  # file, first byte, end
    head_bytes: int  # offset of the tensors in the first file

def gguf_header(path: str | PathLike[str]) -> GgufHeader:
    """Read the header of a GGUF file, or of all parts if it is the first of several, checked against the file size.
    Raises `ValueError` that names the damage."""

def gguf_parts(path: str | PathLike[str]) -> list[Path]:
    """Return the files of the GGUF model that begins in `path`. Raises `ValueError` that names a missing one."""

def gguf_head_bytes(path: str | PathLike[str]) -> int:
    """Return only the offset of the tensors, in bytes, after the checks of `gguf_header`: ten times as fast."""

GGUF_TYPES: tuple[str, ...]
"""Tensor types that `decode_blocks` and the CPU engine can read."""

def decode_blocks(kind: str, data: bytes) -> bytes:
    """Decode whole blocks of a ggml type, such as Q4_K, to exact little-endian float32. Raises `ValueError` for a type
    without a decoder."""

def encode_blocks(kind: Literal["Q8_0", "Q4_1"], numbers: bytes) -> bytes:
    """Quantize little-endian float32 values as ggml's reference does. Raises `ValueError` if one is not finite."""

def quantize_weights(
    source: str | PathLike[str],
    quantization: Literal["q8", "q4"],
    file: str | PathLike[str],
    progress: Callable[[int, int], object],
) -> bool:
    """Write a GGUF file with the matrices of `source`, a GGUF file or folder of safetensors, in blocks of 8 or 4 bits,
    unless a valid one for these weights exists. Returns `False`, and writes nothing, if all of `source` is quantized
    already. `progress` gets the bytes done and all bytes; what it raises ends the work. Raises `ValueError` of (fault,
    text), as `CpuEngine` does."""

@final
class StepPlan:
    """Header of a step: the attributes of `minisgl.step.StepPlan`, read-only."""

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
    """Result of a commit: the attributes of `minisgl.step.StepOutput`; the arrays are read-only."""

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
    """Handle of a matched prefix. While unlocked, it is valid until pages are evicted."""

    @property
    def cached_len(self) -> int:
        """Length of the prefix in tokens (whole pages)."""

@final
class RadixMatch(PrefixMatch): ...  # type: ignore[misc]  # what a protocol declares counts as abstract

@final
class RadixCacheManager(PrefixTree):  # type: ignore[misc]  # as above
    """Prefix cache: a radix tree over whole pages, and the pool of its pages 0 .. num_pages - 1. The methods here are
    for scripts. As a `PrefixTree` it identifies nodes by integers; an integer that is no node is a broken invariant."""

    def __new__(
        cls,
        num_pages: int,
        page_size: int = 1,
        policy: Literal["lru", "lfu", "naive"] = "lru",
        num_checkpoints: int | None = None,
    ) -> RadixCacheManager: ...
    def take(self, num_pages: int) -> list[int]:
        """Allocate free pages. Evicts cached prefixes if too few are free."""

    def free(self, pages: _Numbers) -> None:
        """Free pages that the caller allocated; the last of them is allocated first."""

    def insert_prefix(self, tokens: _Numbers, pages: _Numbers, namespace: int = 0) -> int:
        """Cache `pages`, allocated by the caller, as the KV of `tokens` [len(pages) * page_size]. Returns how many of
        the first pages were cached already: the caller still owns its own pages for those."""

    def match_prefix(self, tokens: _Numbers, namespace: int = 0) -> tuple[RadixCacheHandle, list[int]]:
        """Return a handle of the longest cached prefix of `tokens`, and its pages [cached_len // page_size]. Counts as
        used."""

    def lock_handle(self, handle: RadixCacheHandle, unlock: bool = False) -> None:
        """Protect the pages of a handle from eviction; with `unlock`, remove one such lock."""

    def evict(self, num_pages: int) -> list[int]:
        """Evict `num_pages` pages in policy order and return them. They are free then."""

    def size_info(self) -> tuple[int, int]:
        """Return the number of evictable and of locked pages in the cache."""

    def check_integrity(self) -> None:
        """Check every invariant. Raises `ControlPlaneError` at the first broken one. O(everything)."""

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
    """Plan the chunks of waiting prompts in order, up to the first that gets none or exceeds the page estimate.
    `budget` is in tokens; `available` pages are free or evictable; `reserve_ratio` / 1024 is the expected share of the
    tokens that a request may generate; `needed` pages are reserved for running requests."""

def make_positions(starts: _Numbers, extend_lens: _Numbers) -> Int32Array:
    """Return the position of each token of a step [sum(extend_lens)]."""

def make_input_mapping(req_slots: _Numbers, extend_lens: _Numbers) -> Int32Array:
    """Return the request slot of each token of a step [sum(extend_lens)]."""

def make_write_mapping(seq_lens: _Numbers, samples: _Numbers) -> Int32Array:
    """Return the position of the token that each row samples [num_rows], -1 where `samples` is 0."""

def make_metadata_buffers(
    starts: _Numbers, extend_lens: _Numbers, pages: _Numbers, page_size: int = 1
) -> dict[str, Int32Array]:
    """Return the arrays of `MakeMetadata`, each a view of the array `packed`."""

@final
class CpuSampler:
    """Sampler of the CPU engine without the engine, for the tests that compare it with the torch engine's."""

    def __new__(cls, num_slots: int, vocab_size: int, eos_ids: Sequence[int]) -> CpuSampler: ...
    def bind(self, binding: SlotAssignment) -> None: ...
    def step(
        self,
        logits: NDArray[np.float32],
        slots: Sequence[int],
        positions: Sequence[int],
        masks: Sequence[Int32Array | None] | None = None,
    ) -> tuple[list[int], list[tuple[float, list[int], list[float]] | None]]:
        """Process `logits` [n, vocab_size] in place by the slots' parameters and `masks` [n], and sample. Returns the
        tokens [n], which are also recorded, and for slots with log probabilities: that of the token, the most likely
        ids, and theirs."""

    def record(self, slot: int, token: int) -> None: ...
    def prompt_part(self, slot: int, start: int, count: int) -> tuple[int, int, list[int], int] | None:
        """Return the prompt log probabilities due for a row of `count` positions from `start` on: request id, first
        position, tokens, number of alternatives. `None` if none are due."""

@final
class Router:
    """Router that assigns requests to engines; implements `minisgl.routing.api.Router`."""

    def __new__(cls, config: str) -> Router:
        """Create a router from the JSON of a `minisgl.routing.api.RouterConfig`. Raises `ValueError`."""

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
    """LoRA adapter for the CPU engine. `pairs`: layer, module such as "q_proj", A and B as bytes of float32."""

    def __new__(cls, settings: str, pairs: Sequence[tuple[int, str, bytes, bytes]]) -> CpuAdapter: ...

@final
class CpuHead:
    """LM head: a 16-bit matrix ("bfloat16" or "float16") of [rows, columns], given as uint8, that multiplies float32
    rows. `gomp_parallel`: address of that function of GNU OpenMP, whose threads are used then; 0 for own threads.
    Raises `ValueError`, of (fault, text) if the matrix or the processor is at fault."""

    def __new__(
        cls, table: object, kind: str, shape: tuple[int, int], isa: str | None, threads: int, gomp_parallel: int
    ) -> CpuHead: ...
    @staticmethod
    def isa(held_down_by: str | None) -> str: ...
    @property
    def width(self) -> int:
        """Elements in a row of the result, a multiple of 16."""
    def product(self, x: object, out: object, bf16: bool) -> None:
        """Multiply float32 arrays: [n, columns] -> [n, width]. `bf16`: all values of `x` are exact in bfloat16."""

def cpu_limits(threads: int, seconds: float) -> list[tuple[str, str, float]]:
    """Measure (quantity, instruction set, rate): `read` in GB/s; `f32`, `int8`, `bf16` in G multiply-adds/s."""

@final
class ImageFeatures:
    """Features of an image, which stay in the cache of the CPU engine while this object lives."""

@final
class CpuEngine:
    """CPU engine: tensors, kernels, sampling. A failed load raises `ValueError` of (fault, text), a step
    `RuntimeError`."""

    def __new__(cls, settings: str, say: Callable[[int, int], object]) -> CpuEngine: ...
    @staticmethod
    def page_bytes(settings: str) -> int: ...
    @staticmethod
    def image_bytes(settings: str, tokens: int) -> int: ...
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
    def see_ahead(self, image: PromptImage, begins: bool, slice_s: float) -> tuple[bool, ImageFeatures | None]: ...
    def give_up_image(self) -> None: ...
    def image_counts(self) -> tuple[int, int, int, int] | None: ...
    def draft_tokens(self, sequences: Sequence[tuple[int, int]]) -> list[int]: ...
    def prompt_logits(
        self, tokens: Int32Array, images: Sequence[PromptImage] | None = None, mtp: bool = False
    ) -> bytes: ...
    @property
    def keeps_panels(self) -> bool: ...
    def keep_panels(self) -> int | None: ...
    def close(self) -> None: ...

@final
class StagedPages:
    """Staged pages of a sequence, read from disk. See `minisgl.engine.api.StoredPages`."""

    @property
    def columns(self) -> tuple[int, int]: ...
    def page(self, column: int) -> bytes: ...  # `column` within `columns`
    @property
    def state(self) -> bytes | None: ...

@final
class PageStore:
    """Folder of KV pages, and states if `state_bytes` is not 0, of one model computed in one way. Disk I/O runs without
    the GIL; only opening a folder, `put` and `put_state` raise `OSError`."""

    def __new__(
        cls, folder: str, limit: int, identity: bytes, page_size: int, page_bytes: int, state_bytes: int = 0
    ) -> PageStore: ...
    @property
    def identity(self) -> bytes: ...
    @property
    def state_bytes(self) -> int: ...
    def stage(self, tokens: Int32Array, first: int, most: int, space: bytes = ...) -> StagedPages: ...
    def page(self, tokens: Int32Array, column: int) -> bytes | None:
        """Read page `column` of a sequence. `None` if it is not stored. Ignores states."""

    def put(self, tokens: Int32Array, first: int, pages: Sequence[bytes]) -> None:
        """Write pages of a sequence now, from page index `first` on, even if they exist. Raises `OSError`."""

    def put_state(self, tokens: Int32Array, num_pages: int, state: bytes) -> None:
        """Write the state after the first `num_pages` pages now, even if it exists. Raises `OSError`."""

    def slow_down(self, seconds: float) -> None:
        """Delay each page read by `seconds` from now on. For tests."""

    def counts(self) -> tuple[int, int, int, int, int, int, int, int]: ...
    def take_trouble(self) -> str | None:
        """Return the reason of the last failed page since the last call, if any."""

    def flush(self, seconds: float) -> None: ...
    @staticmethod
    def totals(folder: str) -> tuple[int, int, int, int]:
        """Count pages, states, bytes of their files and damaged files. `clear` and `verify` return the same."""

    @staticmethod
    def clear(folder: str) -> tuple[int, int, int, int]: ...
    @staticmethod
    def verify(folder: str) -> tuple[int, int, int, int]: ...
    @staticmethod
    def digest(files: Sequence[str]) -> bytes: ...

@final
class Gateway:
    """HTTP gateway in front of the Python server: answers requests for text, whose preparation it asks of Python, and
    forwards all others. Its thread starts with the object and needs no interpreter."""

    def __new__(cls, listener_fd: int, engine: str, fallback: str) -> Gateway:
        """Accept clients on a duplicate of the descriptor. `engine` and `fallback` are the Unix sockets of the engine
        process and of the Python server. Raises `OSError`."""

    def serve(self, config: str, tokenizer: TextTokenizer) -> bool:
        """Answer requests for text from now on. `config`: JSON of `server.gateway_config`. Returns `False` if the
        engine process does not answer yet. Raises `ValueError`."""

    def questions_fd(self) -> int:
        """Return a descriptor that is readable when there are questions. Read it empty before taking them."""

    def questions(self) -> list[tuple[int, str, str, list[tuple[bytes, bytes]], bytes | None]]:
        """Take the waiting questions: id, method, target, headers, body (`None`: may the client send one?)."""

    def withdrawn(self) -> list[int]:
        """Return the ids of questions whose clients disconnected, or that took too long. Call before `questions`."""

    def answer(self, number: int, prepared: bytes) -> bool:
        """Answer a question with a frame of `message.prepared`. Its generation counts as waiting from now on. Returns
        `False` if the client does not wait any more. Raises `ValueError`."""

    def drain(self) -> None:
        """Forward all requests from now on."""

    def fail(self, reason: str) -> None:
        """Forward all requests from now on, and end those in progress with the error `reason`."""

    def stop(self, grace_s: float) -> None:
        """Close all connections, after `grace_s` seconds at the latest. Idempotent."""

    def beat(self) -> None:
        """Heartbeat of the Python server's event loop. Without one for a while, `/readyz` is forwarded."""

    @property
    def num_open(self) -> int:
        """Number of requests in progress."""

    def waiting(self) -> tuple[int, int, int]:
        """Return the number of choices without a row, of tokens of their prompts, and of all choices that the engine
        has. Cheap, unlike `readings`, because it is called for every request."""

    def key(self, number: int) -> KeyReading | None:
        """Return the usage of an API key in the gateway. `None` before `serve`."""

    def readings(self) -> Readings:
        """Return all counters and measurements since the start."""

@final
class EnginePool:
    """Several engine processes behind one socket: an engine process to front ends, a front end to engine processes. Its
    thread needs no interpreter. Requests of a lost engine (disconnected or silent) continue on others; the pool keeps
    reconnecting and uses it again when it is ready. Front ends get `EngineState`. If no engine is ready or starting, or
    one is lost before all were ready once, they get `EngineFailed` and the pool ends."""

    def __new__(cls, config: str) -> EnginePool:
        """Start a pool. `config`: JSON with `listen` (path of the pool's socket, open at once), `engines` (paths of the
        engines' sockets, which may appear later), `router` (fields of `routing.api.RouterConfig` without `num_engines`)
        and `step_timeout` (maximum seconds of a forward pass). Raises `ValueError`, `OSError`."""

    def restarting(self, engine: int, yes: bool) -> None:
        """Set whether this engine's process is being or will be started: it counts as starting. Raises `ValueError`."""

    def readings(self) -> dict[str, Any]:
        """Return by engine `loads` (requests there), `states` (as in `EngineState`) and `num_losses_total`; in total
        `num_live` requests, `num_waiting` of them queued, and `num_moved_total`."""

    def stop(self) -> None:
        """Close all connections and remove the socket. Idempotent."""

def recode_to_engine(frame: bytes) -> bytes:
    """Decode a message frame to an engine, given without its length, and encode it with its length, as the pool does.
    For comparing the codecs. Raises `ValueError` if it is malformed."""

def recode_from_engine(frame: bytes) -> bytes:
    """Decode a message frame from an engine, given without its length, and encode it with its length, as the pool does
    for front ends."""

@final
class TextTokenizer:
    """Tokenizer of a model, used by `minisgl.tokenizer.Tokenizer` and the gateway. Thread-safe; long calls free the
    GIL."""

    def __new__(
        cls, file: str | PathLike[str] | None = None, text: str | None = None, cache_bytes: int = ...
    ) -> TextTokenizer:
        """Read a `tokenizer.json`: the path `file` or the content `text`. `cache_bytes`: size of the cache with which
        the next turn of a conversation is encoded faster. Raises `ValueError`."""

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None, guards: Sequence[int] = ...
    ) -> Int32Array:
        """Return the ids of `text`, int32. No added token is matched across one of the `guards` (ascending character
        offsets). Raises `NotEncodable`, `TooManyTokens` above `most` ids, and `UnicodeEncodeError` for a lone
        surrogate."""

    def has_markers(self, value: Any) -> bool:
        """Return whether a string in `value` (a string; a dictionary, list or tuple of such values) contains a marker
        or ends with the beginning of one. A marker is an added token that is special or looks like one."""

    def guarded(self, text: str, guard: str, kept: Sequence[str]) -> str:
        """Return `text` with `guard` inserted after the first character of each marker, except markers in `kept`."""

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, most: int | None = None
    ) -> list[Int32Array]: ...
    def encode_pair(self, one: str, other: str) -> Int32Array:
        """Encode two texts as a pair, with the special tokens before, between and after them."""

    def min_tokens(self, text: str, most: int) -> int:
        """Return a lower bound of the token count of `text` without encoding it. Stops once it exceeds `most`."""

    def pieces(self, text: str, size: int) -> list[str]:
        """Split `text` into pieces of at least `size` bytes, each with the ids that it has in the whole."""

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
        """Whether the text between special tokens is encoded separately and cached."""

    def cache_stats(self) -> dict[str, int]: ...
    def decoder(self, skip_special_tokens: bool = True) -> TextDecoder: ...
    def stream(
        self, stop: Sequence[str], shown: Sequence[int], min_tokens: int, formats: _Formats | None = None
    ) -> TextStream:
        """Create a stream. `formats` restrict the search for stop strings to the content of the output."""

@final
class TextDecoder:
    """Incremental decoder of one stream: token ids in, text out, each character once and whole."""

    def push(self, ids: Sequence[int]) -> str: ...
    def place(self, token_id: int) -> tuple[int, str]:
        """Decode one id. Returns how many characters of the new text precede the one in which the id begins (those of
        held-back bytes that it does not continue), and the new text."""

    def flush(self) -> str:
        """Return the held-back bytes of an incomplete character as U+FFFD. Call at the end."""

@final
class TextStream:
    """Text of one output as its ids arrive; `stopped` once a stop string has matched. The joined deltas are the text
    before the first match, for any chunks: the match that ends first; of those that end together, the one that begins
    first. Stop strings are ignored in the first `min_tokens` ids."""

    def push(self, ids: Sequence[int]) -> str:
        """Return the new text of ids that come before the end."""

    def take(self, ids: Sequence[int], ended: bool, by_token: bool) -> tuple[str, int]:
        """Return the new text, and how many of the ids count: all, or those up to the one that completes a stop string.
        `ended` ends the output with them, which releases held-back text. `by_token`: the last id, if any, is the stop
        token. It counts, unless a stop string comes before it, but has no text."""

    @property
    def stopped(self) -> bool: ...
    @property
    def matched_stop(self) -> str | None: ...

@final
class GrammarTokenizer:
    """Tokenizer in llguidance's form, from the content of a `tokenizer.json`, with at least `vocab_size` ids. Built
    without the GIL. Raises `ValueError`."""

    def __new__(
        cls, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int], max_time_s: float = 30.0
    ) -> GrammarTokenizer:
        """Build the tokenizer. `max_time_s`: limit of processor time for all masks of a request, in seconds."""

@final
class GrammarMatcher:
    """Grammar state of a request: a `minisgl.grammar.slots.Matcher`. The grammar is compiled without the GIL; if it is
    invalid, `error` has the reason."""

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
    """Return llguidance's error for a grammar; empty if it is accepted. Compiles it and generates `num_steps` bytes,
    preferring one of `first`. Runs without the GIL."""

@final
class ToolFormat:
    """Format in which models write tool calls (`rust/minisgl-text/src/answer/formats.rs`)."""

    def __new__(cls, name: str, template: str, token_id: Callable[[str], int | None]) -> ToolFormat:
        """Find a format by a name of `names`, or, for "auto", by chat template and tokens. Raises `ValueError`."""

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> int:
        """Index in the table of formats."""

    @property
    def markers(self) -> list[str]:
        """Markers that the parser looks for."""

    def explained(self) -> str:
        """Return the instruction how to call a tool, for a model whose chat template has none."""

    def written(self, name: str, arguments: str) -> str:
        """Return a call as the model writes it. `arguments`: JSON text."""

    @staticmethod
    def names() -> list[str]:
        """Return the names of all formats, including those of other servers."""

@final
class Thinking:
    """Format of a model's reasoning: the markers around it."""

    @staticmethod
    def find(name: str, template: str) -> Thinking | None:
        """Find a format by name, or, for "auto", by chat template. `None` for "none". Raises `ValueError`."""

    @staticmethod
    def names() -> list[str]:
        """Return the names of all formats, including those of other servers."""

    @property
    def name(self) -> str: ...
    @property
    def markers(self) -> list[str]:
        """Markers that may be special tokens."""

    @property
    def begin(self) -> str: ...
    @property
    def end(self) -> str: ...
    @property
    def is_open(self) -> bool | None:
        """Whether an output begins inside (`True`) or after (`False`) the reasoning; `None` if the output shows it."""

    def opened(self, is_open: bool | None) -> Thinking: ...

@final
class AnswerTools:
    """Tools of a request, parsed once for all of its choices."""

    def __new__(cls, schemas: str) -> AnswerTools:
        """Parse a JSON object of parameter schemas by tool name. Raises `ValueError`."""

@final
class AnswerParser:
    """Incremental parser of one output: a `minisgl.parsers.api.MessageParser`. `new_id(n, alphabet)` returns n random
    characters."""

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
"""Formats by which an output is parsed: tool calls, reasoning, and the request's tools."""

@final
class ContentScan:
    """Incremental split of one output into content and the rest (reasoning, markers, calls)."""

    def __new__(cls, formats: _Formats) -> ContentScan: ...
    def push(self, text: str, ended: bool) -> list[tuple[str, bool]]:
        """Add `text` and return the stretches decided now, each with whether it is content; all the rest if `ended`."""

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
    """Return the Lark rules of an output that may call tools (`rust/minisgl-text/src/tools.rs`). `body`: grammar of an
    output without calls; `tools`: those that may be called, each with a rule for its arguments and, if they must follow
    it, their schema; `required`: the model must call one; `many`: it may call several; `budget`: token limit of
    reasoning that ends with a token. Raises `ValueError`."""
