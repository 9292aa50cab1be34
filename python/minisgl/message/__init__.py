"""Typed messages between the HTTP process and the engine process. Token ids and request ids are packed little-endian
arrays, never lists. Sockets belong to the two ends (`frontend/engine_socket.py`, `runner/front_ends.py`). Start with
`AddRequest` and `StepTokens`; docs/request.md#messages has the bytes.

Invariants: a message means the same on both sides as long as `SCHEMA_VERSION` agrees (checked by codec.py).
"""

from __future__ import annotations

import msgspec

from minisgl.prompt_image import PromptImage
from minisgl.sampling_params import SamplingParams

SCHEMA_VERSION = 17
ID_BITS = 40  # bits of a front end's request ids; the engine process uses the higher ones
ID_LIMIT = 1 << ID_BITS
WATCH_S = 3.0  # seconds that a `Watch` lasts
GRAMMAR_REFUSED = "grammar: "  # prefix of the error for a grammar that the engine process cannot compile


class Hello(msgspec.Struct, tag="hello", frozen=True, array_like=True):
    """First message of a connection: the sender's name, for the log."""

    name: str


class AddRequest(msgspec.Struct, tag="add", frozen=True, array_like=True):
    """A new request. `req_id` is the front end's own: at least 0, below `ID_LIMIT`, and above all earlier ones of its
    connection. `tokens` are int32 bytes: the prompt (with the virtual ids of `images`, which are in order), then
    `num_generated` tokens that a lost engine had generated. `sampling` is checked and resolved: seed and max_tokens are
    set, n is 1. `key` is the index of the client's API key in the key file (0: none), for the routing among engines.
    `background`: low priority (`step.Arrival`)."""

    req_id: int
    tokens: bytes
    sampling: SamplingParams
    priority: int = 0
    num_generated: int = 0
    key: int = 0
    background: bool = False
    images: tuple[PromptImage, ...] = ()


class AbortRequest(msgspec.Struct, tag="abort", frozen=True, array_like=True):
    req_id: int


class FinishRequest(msgspec.Struct, tag="finish", frozen=True, array_like=True):
    """Order to end a request because its text contains a stop string."""

    req_id: int


class AddPrefix(msgspec.Struct, tag="add_prefix", frozen=True, array_like=True):
    """Order to compute these tokens (int32 bytes) when the engine is idle and keep them in the prefix cache: with `pin`
    until `RemovePrefix`, else as long as other pages are kept. `prefix_id` is chosen by the sender, and counts for the
    engine, not the connection. Answered by `PrefixChanged`."""

    prefix_id: int
    tokens: bytes
    pin: bool = False


class RemovePrefix(msgspec.Struct, tag="remove_prefix", frozen=True, array_like=True):
    """Order to forget a prefix; its pages may be evicted from now on."""

    prefix_id: int


class ClearCache(msgspec.Struct, tag="clear_cache", frozen=True, array_like=True):
    """Order to empty the prefix cache, except for pages of live requests and pins. Answered by `CacheCleared`."""


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True, array_like=True):
    """Order to load the adapter in the folder `path`. Requests may name its id in `SamplingParams.adapter` at once;
    they wait until it is loaded. The id is chosen by the sender, above 0, counts for the engine, and is never reused.
    `name` is for logs. Answered by `AdapterChanged`."""

    adapter: int
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True, array_like=True):
    """Order to unload an adapter that no further request will name; running requests keep it to their end. Answered by
    `AdapterChanged`."""

    adapter: int


class Watch(msgspec.Struct, tag="watch", frozen=True, array_like=True):
    """Request for views: with `steps`, of every step in the next `WATCH_S` seconds; with `tree`, once of the prefix
    cache. Repeated while someone watches, and never cancelled. Answered by `Watched` to all front ends."""

    steps: bool
    tree: bool


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True, array_like=True):
    """Order to abort all requests, close the engine and exit with code 0."""


ToEngine = (
    Hello
    | AddRequest
    | AbortRequest
    | FinishRequest
    | AddPrefix
    | RemovePrefix
    | ClearCache
    | LoadAdapter
    | UnloadAdapter
    | Watch
    | Shutdown
)


class LoadProgress(msgspec.Struct, tag="progress", frozen=True, array_like=True):
    """Progress of a loading engine process: a line of text, or with `total` how much of the task `text` is done."""

    text: str
    done: int = 0
    total: int = 0


class EngineReady(msgspec.Struct, tag="ready", frozen=True, array_like=True):
    """Message that the engine has loaded its weights and is warm. The fields are those of `engine.api.EngineInfo`."""

    engine: str
    model_dir: str | None
    vocab_size: int
    max_seq_len: int  # prompt + generated tokens of one request: min(context, pool)
    eos_ids: tuple[int, ...]
    num_pages: int
    page_size: int
    device: str
    dtype: str
    cpu_backend: str
    cpu_backend_fallback: str = ""  # why it is not the requested one
    simulated: str = ""
    engine_details: str = ""
    kind: str = "decoder"  # or "encoder", "cross_encoder", "judge", which generate no text
    sees: bool = False  # it accepts images: those of the model folder's processor

    @property
    def gives_scores(self) -> bool:
        return self.kind in ("cross_encoder", "judge")


class MeterReading(msgspec.Struct, frozen=True, array_like=True):
    """Snapshot of a meter: number of events, and seconds in total, of the longest since the start, and of the longest
    in the last 10 to 20 seconds. `spread` has counts by bucket of metrics.meters, if the meter has some."""

    count: int
    total_s: float
    longest_s: float
    recent_s: float
    spread: dict[int, int] = {}


class RankUsage(msgspec.Struct, frozen=True, array_like=True):
    """Last reported resource usage of a tensor-parallel rank above 0; updated every half second."""

    rank: int
    cpu_s: float
    resident_bytes: int


class PrefixState(msgspec.Struct, frozen=True, array_like=True):
    """State of a prefix from `AddPrefix`, and the number of requests that found it cached."""

    prefix_id: int
    num_tokens: int
    is_ready: bool
    is_pinned: bool
    num_hits: int = 0


SHADOW_RESULTS = ("equal", "different", "failed")
"""Results of a call that a shadow scheduler compared; `EngineStats` counts each."""


class EngineStats(msgspec.Struct, tag="stats", frozen=True, array_like=True):
    """Engine statistics after a step, sent at most every 100 ms while busy and once when idle."""

    num_waiting: int
    num_running: int
    num_pages: int
    num_free_pages: int
    num_evictable_pages: int
    num_protected_pages: int
    num_held_pages: int
    num_retracted_total: int
    num_prompt_tokens_total: int
    num_cached_tokens_total: int
    num_steps_total: int
    cpu_backend: str = ""  # the current scheduler
    num_control_plane_calls_total: int = 0
    num_failovers_total: int = 0
    failover_reason: str = ""
    num_rows_total: int = 0  # rows of all steps; below, their tokens
    num_step_tokens_total: int = 0
    batch_rows: int = 0  # rows of the last step
    cpu_s: float = 0.0  # CPU seconds of the engine process
    resident_bytes: int = 0
    meters: dict[str, MeterReading] = {}  # by the names of metrics.steps
    ranks: tuple[RankUsage, ...] = ()
    num_pinned_pages: int = 0  # protected pages that pins hold
    num_inserted_pages_total: int = 0  # pages that entered the prefix cache
    num_evicted_pages_total: int = 0
    num_hits_total: int = 0  # requests with cached tokens at their first admission
    num_misses_total: int = 0
    prefixes: tuple[PrefixState, ...] = ()
    num_drafted_total: int = 0  # draft tokens that were computed
    num_accepted_total: int = 0  # draft tokens that were accepted
    num_checkpoints: int = 0  # state slots in use, of models with recurrent layers; the totals are in `Stats`
    num_saved_total: int = 0
    num_cut_short_total: int = 0
    num_computed_again_total: int = 0
    store_bytes: int = 0  # size of the page store; the totals are in `StoreCounts`
    num_store_written_total: int = 0
    num_store_loaded_total: int = 0
    num_store_dropped_total: int = 0
    num_store_failed_total: int = 0
    num_store_damaged_total: int = 0
    num_store_written_states_total: int = 0
    num_store_loaded_states_total: int = 0
    num_shadow_equal_total: int = 0  # calls of the scheduler that a shadow compared, by result
    num_shadow_different_total: int = 0
    num_shadow_failed_total: int = 0
    failovers: tuple[tuple[str, str, str], ...] = ()  # scheduler, part, kind of error
    num_tower_runs_total: int = 0  # images that the vision tower computed
    num_tower_hits_total: int = 0  # images whose embeddings were cached
    image_bytes: int = 0  # size of the cache of image embeddings

    def shadow_calls(self) -> dict[str, int]:
        """Return the number of calls that a shadow scheduler compared, by result."""
        return {name: getattr(self, f"num_shadow_{name}_total") for name in SHADOW_RESULTS}


class Heartbeat(msgspec.Struct, tag="beat", frozen=True, array_like=True):
    """Sign of life, sent every half second: for how long the process's loop has been idle, working, or waiting for the
    forward of `step`. A tensor-parallel rank adds its resource usage."""

    phase: str
    age_s: float
    step: int = -1
    cpu_s: float = 0.0
    resident_bytes: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    index: int  # index into the arrays of StepTokens
    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of the prompt tokens from position `first` on. They may be sent again after a retraction."""

    req_id: int
    first: int
    logprobs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]


class Embedding(msgspec.Struct, frozen=True, array_like=True):
    """Embedding of the prompt of an embedding or score request."""

    req_id: int
    numbers: bytes  # float32


class StepTokens(msgspec.Struct, tag="step", frozen=True, array_like=True):
    """All tokens and ends of one step, as the arrays of `step.StepOutput`; one message per step. `admitted_ids` (int64
    bytes) and `cached_lens` (int32 bytes) are the requests admitted for the first time since the last message and their
    cached prompt tokens. `errors` has texts for ends with ERROR."""

    step: int
    req_ids: bytes  # int64
    tokens: bytes  # int32
    reasons: bytes  # int32
    admitted_ids: bytes = b""
    cached_lens: bytes = b""
    errors: dict[int, str] = {}
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    embeddings: tuple[Embedding, ...] = ()


class Narration(msgspec.Struct, tag="narration", frozen=True, array_like=True):
    """Lines about a step for the log, at level debug."""

    lines: tuple[str, ...]


class PrefixChanged(msgspec.Struct, tag="prefix", frozen=True, array_like=True):
    """State of a prefix. `state`: warming (accepted), ready, refused (for `reason`; `is_full` if only space is
    lacking), failed (could not be computed), removed, unknown."""

    prefix_id: int
    state: str
    reason: str = ""
    is_full: bool = False


class CacheCleared(msgspec.Struct, tag="cleared", frozen=True, array_like=True):
    num_pages: int


class AdapterChanged(msgspec.Struct, tag="adapter", frozen=True, array_like=True):
    """State of an adapter: loaded, refused (for `reason`), or unloaded (its last requests may still run)."""

    adapter: int
    state: str
    reason: str = ""


class StepView(msgspec.Struct, frozen=True, array_like=True):
    """View of a committed step. `at_ms`: Unix time at the start of its loop iteration; `phases`: milliseconds of
    schedule, forward, commit and send. A row: request id, whether it decodes, new tokens, tokens cached at its
    admission, length with the new tokens. `retracted`: requests whose slots are free now; `num_retracted`: requests
    that this step's schedule retracted."""

    step: int
    at_ms: float
    phases: tuple[float, float, float, float]
    rows: list[tuple[int, bool, int, int, int]]
    admitted: list[tuple[int, int]]  # request, cached tokens
    finished: list[tuple[int, int]]  # request, FinishReason
    num_retracted: int
    retracted: list[int]
    num_waiting: int
    num_free_pages: int
    num_rows_left_out: int


TreeNode = tuple[int, int, int, int, int, int, int, bool, bool, list[int]]  # see scheduler.api


class TreeView(msgspec.Struct, frozen=True, array_like=True):
    num_nodes: int
    num_tokens: int
    nodes: list[TreeNode]


class Watched(msgspec.Struct, tag="watched", frozen=True, array_like=True):
    """Step views and tree view for watchers. `at` is the number of steps sent before these. Not queued for a front end
    that cannot follow."""

    at: int
    steps: list[StepView]
    tree: TreeView | None = None


class EngineSays(msgspec.Struct, tag="says", frozen=True, array_like=True):
    """Message of a pool: messages of engine `engine`, encoded as by `codec.encode`, but without the leading version.
    See `codec.decode_said`."""

    engine: int
    messages: bytes


class EngineState(msgspec.Struct, tag="engine", frozen=True, array_like=True):
    """Message of a pool: the state of engine `engine`: starting, ready, silent (it hangs, and its requests moved to
    others), or dead (its process ended or could not start)."""

    engine: int
    state: str
    reason: str = ""


class EngineFailed(msgspec.Struct, tag="failed", frozen=True, array_like=True):
    """Last message of a failed engine process: what happened and, if known, what to change."""

    text: str


FromEngine = (
    LoadProgress
    | EngineReady
    | EngineStats
    | Heartbeat
    | StepTokens
    | Narration
    | PrefixChanged
    | CacheCleared
    | AdapterChanged
    | Watched
    | EngineSays
    | EngineState
    | EngineFailed
)
