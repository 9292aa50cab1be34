"""What an engine is: it runs plans in order and returns tokens by row.

Invariants: forwards run in the order of their launches; a launch never blocks on the device; slots, page-table updates
and rows of one plan take effect in that order, within the forward's own order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from minisgl.grammar.slots import Matcher
from minisgl.sampling_params import SamplingParams
from minisgl.step import Int32Array, StepBuffers, StepPlan

Float32Array = npt.NDArray[np.float32]


ModelKind = Literal["decoder", "encoder", "cross_encoder", "judge"]
"""What a model computes: text and embeddings; embeddings alone; scores of texts, as an encoder; the same as a decoder,
which reads two texts as a chat."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the rest of the server must know of a loaded engine. Sizes of the KV pool exclude the scratch page."""

    name: str  # cpu, torch, echo, sim
    model_dir: str | None  # where tokenizer and chat template lie; None if the engine has no model
    vocab_size: int
    context_len: int
    eos_ids: tuple[int, ...]
    num_pages: int
    page_size: int
    device: str
    dtype: str
    simulated: str = ""  # the profile of a simulated engine: its texts and times are not a model's
    details: str = ""  # for people: how it computes, such as instruction set, threads and what is rounded
    graph_sizes: tuple[int, ...] = ()  # row counts to which steps of one token a row are padded
    num_checkpoints: int | None = None  # slots for the states of a model that has some, beside those of its rows
    kind: ModelKind = "decoder"

    @property
    def shares_prefixes(self) -> bool:
        """False where tokens attend to those behind them: what one text leaves is of no use to another."""
        return self.kind not in ("encoder", "cross_encoder")


class StoredPages(Protocol):
    """Pages of a request's text that were computed before, and are at hand."""

    @property
    def columns(self) -> tuple[int, int]:
        """The first page of the text that is at hand, and the end."""

    def page(self, column: int) -> bytes:
        """The KV of a page, as the engine gave it away."""

    @property
    def state(self) -> bytes | None:
        """The state behind the last of the pages, of a model that has states."""


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """What has come of pages and states in the folder of a store, as far as one engine knows."""

    num_bytes: int
    num_written: int  # pages
    num_loaded: int
    num_dropped: int  # of both, what the disk did not follow
    num_failed: int  # could not be written or read
    num_damaged: int
    num_written_states: int
    num_loaded_states: int


class PageReader(Protocol):
    """Pages on a disk."""

    def stage(self, tokens: Int32Array, first: int, most: int, space: bytes) -> StoredPages:
        """Read the pages of `tokens` in `space` from `first` on, as far as they are there, at most `most` of them; of a
        model that has states, up to the last behind which one is there. In any thread. Whatever is wrong with the disk,
        there are fewer."""


@runtime_checkable
class Stores(Protocol):
    """An engine that gives the pages which fill to a store, and loads those of it that a plan says."""

    @property
    def store(self) -> PageReader | None:
        """None: it was not asked to."""

    def store_counts(self) -> StoreCounts | None: ...

    def adapter_digest(self, number: int) -> bytes:
        """The digest of all that an adapter which is there changes: two with the same one compute the same."""


@runtime_checkable
class Exports(Protocol):
    """An engine whose pages of a text can go to a file."""

    def export_pages(self, tokens: Int32Array, path: Path) -> None:
        """Write the whole pages of a text that is computed. Raises `ConfigError`."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotAssignment:
    """Which request a slot holds from this plan on. `tokens` is the whole sequence known at this moment, of which the
    first `num_prompt` are the prompt (penalties count them apart); `sampling.seed` is resolved, never None. `grammar`
    is the request's own: the engine restarts it with what was generated, in forward order. `stored` has at least the
    pages that plans load for the slot; those that it fills go to the store, in `space`: pages are shared within one."""

    slot: int
    req_id: int
    sampling: SamplingParams
    tokens: Int32Array
    num_prompt: int
    grammar: Matcher | None = None
    stored: StoredPages | None = None
    space: bytes = b""

    def generated(self) -> list[int]:
        """By the request so far; for its grammar."""
        return self.tokens[self.num_prompt :].tolist() if self.grammar is not None else []


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """Natural-log probabilities (raw model distribution, before temperature) of the rows that asked for them."""

    rows: Int32Array  # [m] row indices, ascending
    token_logprobs: Sequence[float]  # [m] of the sampled token
    top_ids: Sequence[Sequence[int]]  # [m][k], most likely first, k as the row asked
    top_logprobs: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """The same of prompt tokens from position `first` on, for a request with `prompt_logprobs`. Chunks come in order;
    after a retraction they come again."""

    req_id: int
    first: int
    token_logprobs: Sequence[float]
    top_ids: Sequence[Sequence[int]]
    top_logprobs: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The embedding of a prompt whose request asked for it, in the step of its last token: hidden states behind the
    final norm, pooled over the whole prompt in float32, of no particular length."""

    req_id: int
    numbers: Float32Array  # [hidden size]


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    tokens: Int32Array  # [num_rows] by row; -1 where the row does not sample, `NOT_FINITE` where it is not finite
    logprobs: StepLogprobs | None = None
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    # by row: why its request cannot go on; its token is `NOT_FINITE` or, for its grammar, an end of sequence.
    # `grammar.slots.LATE`: it can, once the next mask of its grammar is made
    failures: Mapping[int, str] = field(default_factory=dict)
    embeddings: Sequence[Embedding] = ()


NOT_FINITE_TEXT = "the model's output for it is not finite (overflow? try --dtype bfloat16 or float32)"


class EngineStepError(RuntimeError):
    """The forward of one step failed, the device is usable: the next launch may succeed.
    Anything else that `wait` raises means that the engine is dead."""


class StepHandle(Protocol):
    def wait(self) -> StepResult:
        """Block until the step is done and its ring entry is no longer read. Raises `EngineStepError`."""

    def done(self) -> bool: ...

    def span(self) -> tuple[float, float]:
        """From when to when the engine computed it, seconds of `time.perf_counter`; for profiles, after `wait`."""


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        """Queue a plan (zero rows too: slots and page-table updates count). `plan` and the ring entry stay untouched
        until the handle is done; `assignments` belong to the plan's `assigned` entries, in their order."""

    def close(self) -> None:
        """Stop threads and free memory. Idempotent; a step under way is finished first."""
