"""The interface of an engine: it runs plans in order and returns sampled tokens by row.

Invariants: forwards run in the order of their launches; a launch never blocks on the device; slots, page-table updates
and rows of one plan take effect in that order, within the forward's own order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from minisgl.grammar.slots import Matcher
from minisgl.prompt_image import PromptImage
from minisgl.sampling_params import SamplingParams
from minisgl.step import Int32Array, StepBuffers, StepPlan

Float32Array = npt.NDArray[np.float32]


ModelKind = Literal["decoder", "encoder", "cross_encoder", "judge"]
"""Kind of a model: decoder (text and embeddings), encoder (embeddings), cross encoder (scores of text pairs), judge (a
decoder that scores text pairs, which it reads as a chat)."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of a loaded engine for the rest of the server. Sizes of the KV pool exclude the scratch page."""

    name: str  # "cpu", "torch", "echo" or "sim"
    model_dir: str | None  # folder of the tokenizer and chat template; None if the engine has no model
    vocab_size: int
    context_len: int
    eos_ids: tuple[int, ...]
    num_pages: int
    page_size: int
    device: str
    dtype: str
    simulated: str = ""  # name of the profile of a simulated engine, whose output and times are not a model's
    details: str = ""  # description for logs of how it computes: instruction set, threads, rounding
    graph_sizes: tuple[int, ...] = ()  # row counts to which steps with one token a row are padded
    num_checkpoints: int | None = None  # slots for saved recurrent states; None if the model has no states
    kind: ModelKind = "decoder"
    sees: bool = False  # it has loaded the model's vision tower, and accepts images
    patch_bytes: int = 0  # pixel values of a patch of an image
    patches_per_side: int = 0  # patches of a token, in each direction

    @property
    def shares_prefixes(self) -> bool:
        """Return whether sequences can share a prefix's KV: false for encoders, where tokens attend to later ones."""
        return self.kind not in ("encoder", "cross_encoder")


class StoredPages(Protocol):
    """KV pages of a request's sequence that were read from the page store and are ready to be loaded."""

    @property
    def columns(self) -> tuple[int, int]:
        """Return the range of page indexes in the sequence that are staged: the first one and the end (exclusive)."""

    def page(self, column: int) -> bytes:
        """Return the KV bytes of the page with index `column` in the sequence, in the engine's storage format."""

    @property
    def state(self) -> bytes | None:
        """Return the recurrent state after the last staged page; None if the model has no states."""


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Counters of pages and states that one engine wrote to and read from the folder of its page store."""

    num_bytes: int
    num_written: int  # pages
    num_loaded: int
    num_dropped: int  # pages and states that were not written because the disk was too slow
    num_failed: int  # pages and states that could not be written or read
    num_damaged: int
    num_written_states: int
    num_loaded_states: int


class PageReader(Protocol):
    """A reader of KV pages that are stored on disk."""

    def stage(self, tokens: Int32Array, first: int, most: int, space: bytes) -> StoredPages:
        """Read up to `most` stored pages of `tokens` from page index `first` on, among those of the namespace `space`.
        Stops at the first missing page; with recurrent states, at the last page that has a stored state. Callable from
        any thread. Disk errors are not raised: they only reduce the number of pages."""


@runtime_checkable
class Stores(Protocol):
    """An engine that writes full KV pages to a page store and loads the stored pages that a plan names."""

    @property
    def store(self) -> PageReader | None:
        """Return the page store; None if the engine was configured without one."""

    def store_counts(self) -> StoreCounts | None: ...

    def adapter_digest(self, number: int) -> bytes:
        """Return the digest of the weights of the loaded adapter `number`: equal digests give equal results."""


class ImageCounts(NamedTuple):
    """Counters of one engine's images, and what it holds now."""

    num_runs: int = 0  # images that the vision tower computed
    num_hits: int = 0  # images whose features were held
    num_images: int = 0
    num_bytes: int = 0  # bytes of their features


@runtime_checkable
class Drafts(Protocol):
    """An engine whose model may have an MTP layer, which drafts the token after each sequence."""

    def draft_tokens(self, sequences: Sequence[tuple[int, int]]) -> list[int]:
        """Return the draft tokens after sequences, given as (request id, length), as of the last step; -1 where there
        is none. Waits for the step in progress."""


class ImageRun(Protocol):
    """A slice of the vision tower's run over an image."""

    def done(self) -> bool: ...

    def wait(self) -> tuple[bool, object]:
        """Block until the slice has ended. Return whether the image has ended, and its features: while this object is
        held, they stay with the engine. None: the tower has failed, and fails the step that needs it, too."""


@runtime_checkable
class Sees(Protocol):
    """An engine that may have a vision tower (`EngineInfo.sees`)."""

    def image_counts(self) -> ImageCounts:
        """Return the counters after the last step. Does not wait for the step in progress."""

    def see_ahead(self, image: PromptImage, begins: bool, slice_s: float, wake: Callable[[], None] | None) -> ImageRun:
        """Queue about `slice_s` seconds of the tower's run over an image, after the steps that were launched. `begins`:
        the image is its request's first, and waits while held features exceed the limit. `wake` is called at the end
        of the slice, in the engine's thread."""

    def give_up_image(self) -> None:
        """Forget the run that `see_ahead` has begun."""


@runtime_checkable
class Exports(Protocol):
    """An engine that can export the KV pages of a sequence to a file."""

    def export_pages(self, tokens: Int32Array, path: Path) -> None:
        """Write the full pages of `tokens`, a sequence that has been computed, to the file `path`. Raises `ConfigError`
        if a page is no longer stored or the file cannot be written."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotAssignment:
    """Assignment of a request slot to a request, from this plan on. `tokens` is the whole sequence known at this
    moment; the first `num_prompt` of them are the prompt (penalties count them separately). `sampling.seed` is
    resolved, never None. `grammar` belongs to this request: the engine restarts it with the generated tokens, in
    forward order. `stored` has at least the pages that plans load for the slot. Pages that the slot fills are stored in
    the namespace `space` and shared only within it. `images` are those of the prompt, by start."""

    slot: int
    req_id: int
    sampling: SamplingParams
    tokens: Int32Array
    num_prompt: int
    grammar: Matcher | None = None
    stored: StoredPages | None = None
    space: bytes = b""
    images: Sequence[PromptImage] = ()
    features: object = None  # what holds the features of images until the step has taken them

    def generated(self) -> list[int]:
        """Return the ids that the request has generated so far, to restart its grammar; empty if it has no grammar."""
        return self.tokens[self.num_prompt :].tolist() if self.grammar is not None else []


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """Log probabilities (natural, of the raw distribution, before temperature) of the rows that asked for them."""

    rows: Int32Array  # [m] row indexes, ascending
    token_logprobs: Sequence[float]  # [m] of the sampled tokens
    top_ids: Sequence[Sequence[int]]  # [m][k], most likely first; k as the row's request asked
    top_logprobs: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log probabilities of prompt tokens from position `first` on. Chunks arrive in order, again after a retraction."""

    req_id: int
    first: int
    token_logprobs: Sequence[float]
    top_ids: Sequence[Sequence[int]]
    top_logprobs: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The embedding of a prompt, with its last token's step: normed final hidden states, pooled in float32,
    unnormalized."""

    req_id: int
    numbers: Float32Array  # [hidden size]


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    tokens: Int32Array  # [num_rows]; -1 for a row that does not sample, `NOT_FINITE` for a row that is not finite
    logprobs: StepLogprobs | None = None
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    # failure reason by row: the request cannot go on, and its token is `NOT_FINITE` or an end of sequence. Exception:
    # with `grammar.slots.LATE` it can, once the next mask of its grammar is ready
    failures: Mapping[int, str] = field(default_factory=dict)
    embeddings: Sequence[Embedding] = ()


NOT_FINITE_TEXT = "the model's output for it is not finite (overflow? try --dtype bfloat16 or float32)"


class EngineStepError(RuntimeError):
    """Error for a failed step after which the next may succeed. Any other exception of `wait` means a dead engine."""


class StepHandle(Protocol):
    def wait(self) -> StepResult:
        """Block until the step is done and its ring entry is no longer read, and return its result. Raises
        `EngineStepError` if only this step failed; any other exception means that the engine is dead."""

    def done(self) -> bool: ...

    def span(self) -> tuple[float, float]:
        """Return start and end of the step's computation, in seconds of `time.perf_counter`; valid after `wait`."""


class Engine(Protocol):
    @property
    def info(self) -> EngineInfo: ...

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        """Queue a plan (zero rows too: slots and page-table updates count). The caller leaves `plan` and the ring entry
        unchanged until the handle is done; `assignments` are those of the plan's `assigned` entries, in the same order.
        """

    def close(self) -> None:
        """Finish the step that is running, stop threads and free memory. Idempotent."""
