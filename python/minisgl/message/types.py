"""The messages themselves. Token ids and request ids travel as packed little-endian arrays, never as lists.

Keeps true: a message means the same on both sides as long as `SCHEMA_VERSION` agrees (checked by codec.py).
Doesn't know: sockets, processes, torch.
"""

from __future__ import annotations

import msgspec

from minisgl.sampling_params import SamplingParams

SCHEMA_VERSION = 5


class AddRequest(msgspec.Struct, tag="add", frozen=True, array_like=True):
    """`tokens` int32 bytes of the prompt. `sampling` is checked and resolved: seed and max_tokens are set, n is 1."""

    req_id: int
    tokens: bytes
    sampling: SamplingParams
    priority: int = 0


class AbortRequest(msgspec.Struct, tag="abort", frozen=True, array_like=True):
    req_id: int


class FinishRequest(msgspec.Struct, tag="finish", frozen=True, array_like=True):
    """A stop string was found in the text of the request."""

    req_id: int


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True, array_like=True):
    """Abort what lives, close the engine, exit with 0."""


ToEngine = AddRequest | AbortRequest | FinishRequest | Shutdown


class LoadProgress(msgspec.Struct, tag="progress", frozen=True, array_like=True):
    """What the engine process is doing before it is ready: a line, or with `total` how far the step `text` is."""

    text: str
    done: int = 0
    total: int = 0


class EngineReady(msgspec.Struct, tag="ready", frozen=True, array_like=True):
    """Weights are loaded and the engine is warm. The fields are those of `engine.api.EngineInfo`."""

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
    cpu_backend_fallback: str = ""  # why it is not the one that was asked for
    simulated: str = ""
    engine_details: str = ""


class MeterReading(msgspec.Struct, frozen=True, array_like=True):
    """How often something happened, and how long it took: altogether, at most since the start, at most in the last 10
    to 20 seconds. `spread`: how many by bucket of metrics.spread, where that is counted."""

    count: int
    total_s: float
    longest_s: float
    recent_s: float
    spread: dict[int, int] = {}


class RankUsage(msgspec.Struct, frozen=True, array_like=True):
    """What the process of a tensor-parallel rank above 0 said of itself last; it does so every half second."""

    rank: int
    cpu_s: float
    resident_bytes: int


class EngineStats(msgspec.Struct, tag="stats", frozen=True, array_like=True):
    """A snapshot after a step, sent at most every 100 ms while busy and once when idle."""

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
    cpu_backend: str = ""  # the one that serves now
    num_control_plane_calls_total: int = 0
    num_failovers_total: int = 0
    failover_reason: str = ""
    num_rows_total: int = 0  # of all steps, and their tokens
    num_step_tokens_total: int = 0
    batch_rows: int = 0  # of the last step
    cpu_s: float = 0.0  # of the engine process
    resident_bytes: int = 0
    meters: dict[str, MeterReading] = {}  # by the names of metrics.steps
    ranks: tuple[RankUsage, ...] = ()


class Heartbeat(msgspec.Struct, tag="beat", frozen=True, array_like=True):
    """Every half second: the loop of a process is idle, working, or waiting for the forward of `step`, and for how
    long. A tensor-parallel rank also says what it has used."""

    phase: str
    age_s: float
    step: int = -1
    cpu_s: float = 0.0
    resident_bytes: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    index: int  # into StepTokens
    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of the prompt tokens from position `first` on; may come again after a retraction."""

    req_id: int
    first: int
    logprobs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]


class StepTokens(msgspec.Struct, tag="step", frozen=True, array_like=True):
    """All tokens and ends of one step, the arrays of `step.StepOutput`; one message per step.

    `admitted_ids` (int64 bytes) and `cached_lens` (int32 bytes) name the requests admitted for the first time since the
    last message and how many of their prompt tokens were in the cache. `errors` explains reasons of ERROR.
    """

    step: int
    req_ids: bytes  # int64
    tokens: bytes  # int32
    reasons: bytes  # int32
    admitted_ids: bytes = b""
    cached_lens: bytes = b""
    errors: dict[int, str] = {}
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class Narration(msgspec.Struct, tag="narration", frozen=True, array_like=True):
    """Lines about a step for the log, at level debug."""

    lines: tuple[str, ...]


class EngineFailed(msgspec.Struct, tag="failed", frozen=True, array_like=True):
    """The last message of an engine process that cannot go on: what happened and, if known, what to change."""

    text: str


FromEngine = LoadProgress | EngineReady | EngineStats | Heartbeat | StepTokens | Narration | EngineFailed
