"""State of live requests in the step loop: prompt, sampling parameters, generated tokens. Also holds requests whose
grammar is being compiled or whose next mask is late, builds the messages for clients, and takes over the steps in
flight when a scheduler breaks.

Invariants: O(1) Python work per step whatever the batch size: outputs are stored as they come, and applied to the
requests when a sequence is needed or too many are pending. A request with a grammar leaves `Compiling` once: with a
matcher, refused, or ended by its client. When a scheduler breaks no token is lost or repeated: the tokens of the steps
in flight are applied in step order with the scheduler's own stop conditions (an end in one step drops the token of the
next); requested ends take effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from minisgl.engine import api as engine_api
from minisgl.engine.api import SlotAssignment, StepLogprobs, StepResult, StoredPages
from minisgl.grammar.compiler import GrammarCompiler
from minisgl.grammar.slots import LATE, Matcher
from minisgl.message import AddRequest, Embedding, PromptLogprobs, StepTokens, TokenLogprobs
from minisgl.prompt_image import PromptImage
from minisgl.sampling_params import SCORE, SamplingParams
from minisgl.step import (
    NOT_FINITE,
    Arrival,
    FinishReason,
    Int32Array,
    RingEntry,
    StepLimits,
    StepOutput,
    StepPlan,
    step_output,
)

MAX_PENDING = 65_536
RETURNS_AT_ONCE = 1  # per step, which recomputes some of their tokens


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A live request. `tokens` is the sequence known after the last flush, int32 [num_prompt + generated]."""

    req_id: int
    sampling: SamplingParams
    tokens: Int32Array
    num_prompt: int
    priority: int = 0
    background: bool = False
    pin: bool = False
    admitted: bool = False
    grammar: Matcher | None = None
    namespace: int = 0  # namespace of the prefix cache
    space: bytes = b""  # its name in the page store
    number: int = 0  # number of earlier arrivals
    stored: StoredPages | None = None  # pages read from the store, until it gets a slot
    is_judged: bool = False  # scored from the last token by a causal model
    images: tuple[PromptImage, ...] = ()  # of the prompt
    features: Sequence[object] = ()  # what holds the features of images, until it gets a slot

    @property
    def no_match(self) -> bool:
        """Whether the whole prompt must be computed, even if it is cached."""
        pools_all = self.sampling.embedding is not None and not self.is_judged
        return self.sampling.prompt_logprobs is not None or pools_all

    def stored_len(self, page_size: int) -> int:
        """Return the position up to which stored pages can be loaded; the last token is always computed."""
        end = 0 if self.stored is None else self.stored.columns[1]
        return min(end, (len(self.tokens) - 1) // page_size) * page_size

    def arrival(self) -> Arrival:
        """Return the arrival event: of a new request, or after a failover with the tokens generated so far."""
        sampling = self.sampling
        assert sampling.max_tokens is not None
        stored_from, stored_to = (0, 0) if self.stored is None else self.stored.columns
        return Arrival(
            req_id=self.req_id,
            tokens=np.ascontiguousarray(self.tokens),
            num_prompt=self.num_prompt,
            max_tokens=sampling.max_tokens,
            num_generated=len(self.tokens) - self.num_prompt,
            stop_ids=sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            priority=self.priority,
            no_match=self.no_match,
            background=self.background,
            pin=self.pin,
            namespace=self.namespace,
            no_drafts=sampling.depends_on_output or self.grammar is not None,
            stored_from=stored_from,
            stored_to=stored_to,
        )

    def assignment(self, slot: int) -> SlotAssignment:
        stored, self.stored = self.stored, None
        features, self.features = self.features, ()
        return SlotAssignment(
            slot,
            self.req_id,
            self.sampling,
            self.tokens,
            self.num_prompt,
            self.grammar,
            stored,
            self.space,
            self.images,
            features,
        )


class RequestTracker:
    """The live requests of a step loop, by id. `judges`: the model scores a prompt from its last token only."""

    def __init__(self, *, judges: bool = False) -> None:
        self._judges = judges
        self._live: dict[int, TrackedRequest] = {}
        self._pending: list[StepOutput] = []  # outputs not applied yet
        self._num_pending = 0

    def __contains__(self, req_id: int) -> bool:
        return req_id in self._live

    def add(
        self,
        req_id: int,
        sampling: SamplingParams,
        tokens: Int32Array,
        num_prompt: int,
        priority: int = 0,
        *,
        background: bool = False,
        pin: bool = False,
    ) -> TrackedRequest:
        """Track a new request. `tokens` are the prompt and what another engine has generated."""
        request = TrackedRequest(req_id, sampling, tokens, num_prompt, priority, background, pin)
        request.namespace = sampling.adapter
        request.is_judged = self._judges and sampling.embedding == SCORE
        self._live[req_id] = request
        return request

    def drop(self, req_id: int) -> None:
        """Remove a request that never reached the scheduler."""
        del self._live[req_id]

    def record(self, output: StepOutput) -> None:
        """Store the output of a commit. Ended requests are removed at the next flush; their pixels go at once."""
        if len(output):
            for req_id in output.req_ids[output.reasons != FinishReason.NONE].tolist():
                if (request := self._live.get(req_id)) is not None:
                    request.images = request.features = ()
            self._pending.append(output)
            self._num_pending += len(output)
            if self._num_pending >= MAX_PENDING:
                self.flush()

    def get(self, req_id: int) -> TrackedRequest:
        """Return the request with its sequence up to date, flushing outputs if it may have some. Raises `KeyError`."""
        request = self._live[req_id]
        if request.admitted and self._pending:
            self.flush()
        return request

    def peek(self, req_id: int) -> TrackedRequest | None:
        """Return the request as of the last flush, or `None` if it is not tracked."""
        return self._live.get(req_id)

    def live(self) -> list[TrackedRequest]:
        """Return all requests in order of arrival, with their sequences up to date."""
        self.flush()
        return list(self._live.values())

    def adapters(self) -> set[int]:
        """Return the adapter ids of live requests."""
        self.flush()
        return {request.sampling.adapter for request in self._live.values()}

    def flush(self) -> None:
        """Apply the pending outputs: bring every sequence up to date and remove ended requests."""
        if not self._pending:
            return
        ids = np.concatenate([o.req_ids for o in self._pending])
        tokens = np.concatenate([o.tokens for o in self._pending])
        reasons = np.concatenate([o.reasons for o in self._pending])
        self._pending.clear()
        self._num_pending = 0
        order = np.argsort(ids, kind="stable")
        ids, tokens, reasons = ids[order], tokens[order], reasons[order]
        starts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
        for start, end in zip(starts, np.r_[starts[1:], len(ids)], strict=True):
            req_id = int(ids[start])
            if reasons[end - 1] != FinishReason.NONE:
                self._live.pop(req_id, None)
            elif (request := self._live.get(req_id)) is not None:
                request.tokens = np.concatenate([request.tokens, tokens[start:end]])


Ready = tuple[AddRequest | TrackedRequest, Matcher | None, str]


class Compiling:
    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._waiting: dict[int, AddRequest | TrackedRequest] = {}
        self._returning: list[int] = []  # waiting requests whose masks are computed

    @property
    def has_returns(self) -> bool:
        """Whether the next step will readmit a request whose mask was late."""
        return bool(self._returning)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, req_id: int) -> bool:
        return req_id in self._waiting

    def adapters(self) -> set[int]:
        """Return the adapter ids of waiting requests."""
        return {waiting.sampling.adapter for waiting in self._waiting.values()}

    def add(self, message: AddRequest) -> str:
        """Start compiling the request's grammar. Returns the reason if it is refused at once, else an empty string."""
        grammar = message.sampling.grammar
        assert grammar is not None
        if self._compiler is None:
            return "this engine supports no grammars"
        if message.req_id in self._waiting:
            raise ValueError(f"request id {message.req_id} was used twice")
        self._waiting[message.req_id] = message
        self._compiler.submit(message.req_id, grammar)
        return ""

    def hold(self, request: TrackedRequest) -> None:
        """Hold a request, which has left the scheduler, until its next mask is computed."""
        assert self._compiler is not None and request.grammar is not None
        self._waiting[request.req_id] = request
        self._compiler.prepare(request.req_id, request.grammar)

    def drop(self, req_id: int) -> bool:
        """Remove a waiting request. Returns whether it waited here."""
        if self._waiting.pop(req_id, None) is None:
            return False
        assert self._compiler is not None
        self._compiler.cancel(req_id)
        return True

    def take(self) -> Iterator[Ready]:
        """Yield finished requests (new ones without grammar source), each with its matcher or `None`, and the error."""
        if not self._waiting:
            return
        assert self._compiler is not None
        for result in self._compiler.take():
            waiting = self._waiting[result.key]
            if isinstance(waiting, AddRequest):
                sampling = msgspec.structs.replace(waiting.sampling, grammar=None)
                waiting = msgspec.structs.replace(waiting, sampling=sampling)
                del self._waiting[result.key]
                yield waiting, result.matcher, result.error
            else:
                self._returning.append(result.key)
        returning, self._returning = self._returning[:RETURNS_AT_ONCE], self._returning[RETURNS_AT_ONCE:]
        for req_id in returning:
            if (request := self._waiting.pop(req_id, None)) is not None:
                yield request, None, ""

    def wait(self) -> None:
        """Block until a grammar or mask is done. Call it only while requests wait."""
        assert self._compiler is not None
        self._compiler.wait()


def reply(
    output: StepOutput,
    result: StepResult,
    admitted: Sequence[int],
    cached_lens: Sequence[int],
    errors: dict[int, str],
) -> StepTokens:
    """Return a step's output as a message, with the `admitted` request ids and their cached tokens."""
    return StepTokens(
        step=output.step,
        req_ids=output.req_ids.tobytes(),
        tokens=output.tokens.tobytes(),
        reasons=output.reasons.tobytes(),
        admitted_ids=np.array(admitted, np.int64).tobytes(),
        cached_lens=np.array(cached_lens, np.int32).tobytes(),
        errors=errors,
        logprobs=_join_logprobs(output.rows, result.logprobs) if result.logprobs is not None else (),
        prompt_logprobs=tuple(map(_prompt_logprobs, result.prompt_logprobs)),
        embeddings=tuple(Embedding(one.req_id, one.numbers.tobytes()) for one in result.embeddings),
    )


def ended(step: int, req_id: int, reason: FinishReason, error: str = "") -> StepTokens:
    """Return the message that ends a request which is not at the scheduler. `error`: why it was refused."""
    output = step_output(step, [(req_id, -1, reason, -1)])
    return StepTokens(
        step=output.step,
        req_ids=output.req_ids.tobytes(),
        tokens=output.tokens.tobytes(),
        reasons=output.reasons.tobytes(),
        errors={req_id: error} if reason is FinishReason.ERROR else {},
    )


def failed_rows(output: StepOutput, failures: Mapping[int, str]) -> tuple[StepOutput, dict[int, str], list[int]]:
    """Return `output` with error ends for the rows of `failures` and without rows whose mask is late, the error texts
    by request id, and the ids of the late requests."""
    texts: dict[int, str] = {}
    late: list[int] = []
    entries = []
    columns = output.req_ids.tolist(), output.tokens.tolist(), output.reasons.tolist(), output.rows.tolist()
    for req_id, token, reason, row in zip(*columns, strict=True):
        if failures.get(row) == LATE:
            late.append(req_id)
        elif row in failures:
            texts[req_id] = failures[row]
            entries.append((req_id, -1, FinishReason.ERROR, -1))
        else:
            entries.append((req_id, token, reason, row))
    return step_output(output.step, entries), texts, late


def errors_of(
    output: StepOutput, requests: RequestTracker, of_rows: Mapping[int, str], of_step: str, max_seq_len: int
) -> dict[int, str]:
    """Return why requests ended with an error: from `of_rows`, or because the prompt is too long, else `of_step`."""
    errors = {}
    for req_id in output.req_ids[output.reasons == FinishReason.ERROR].tolist():
        request = requests.peek(req_id)
        if req_id in of_rows:
            errors[req_id] = of_rows[req_id]
        elif request is not None and not request.admitted:
            errors[req_id] = f"a prompt of {request.num_prompt} tokens does not fit: the limit is {max_seq_len - 1}"
        else:
            errors[req_id] = of_step
    return errors


def _join_logprobs(rows: Int32Array, logprobs: StepLogprobs) -> tuple[TokenLogprobs, ...]:
    """Return log probabilities by index of the output, given those by row of the step."""
    index_of = {row: index for index, row in enumerate(rows.tolist()) if row >= 0}
    return tuple(
        TokenLogprobs(
            index_of[row],
            logprobs.token_logprobs[i],
            tuple(logprobs.top_ids[i]),
            tuple(logprobs.top_logprobs[i]),
        )
        for i, row in enumerate(logprobs.rows.tolist())
        if row in index_of
    )


def _prompt_logprobs(found: engine_api.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(
        found.req_id,
        found.first,
        tuple(found.token_logprobs),
        tuple(map(tuple, found.top_ids)),
        tuple(map(tuple, found.top_logprobs)),
    )


Ended = tuple[int, int, int, int]  # an entry of a StepOutput


@dataclass(frozen=True, slots=True, eq=False)
class UncommittedStep:
    """A step that the broken scheduler did not commit. `result` is `None` if its forward failed."""

    plan: StepPlan
    entry: RingEntry
    result: StepResult | None


def take_tokens(
    step: UncommittedStep,
    owners: Mapping[int, int],
    requests: RequestTracker,
    limits: StepLimits,
    eos_ids: Sequence[int],
    ending: Mapping[int, FinishReason],
) -> StepOutput:
    """Return the output of a commit of `step`, without recording it. `owners` maps slots to request ids."""
    requests.flush()
    entries: list[Ended] = []
    slots = step.entry.req_slots[: step.plan.num_rows].tolist()
    if step.result is None:
        for slot in dict.fromkeys(slots):  # with drafts a slot has several rows
            if (req_id := owners[slot]) in requests and req_id not in ending:
                entries.append((req_id, -1, FinishReason.ERROR, -1))
        return step_output(step.plan.step, entries)
    texts: dict[int, _Text] = {}  # sequences by slot
    for row in step.entry.sample_rows[: step.plan.num_samples].tolist():
        req_id, token, slot = owners[slots[row]], int(step.result.tokens[row]), slots[row]
        if req_id not in requests or req_id in ending:
            continue
        request = requests.get(req_id)
        if (text := texts.get(slot)) is None:
            text = texts[slot] = _Text(len(request.tokens))
        elif not text.goes_on_in(row, step.entry):
            continue
        if token == NOT_FINITE:
            text.reason = FinishReason.ERROR
            entries.append((req_id, -1, FinishReason.ERROR, row))
            continue
        text.take(token)
        text.reason = _end_test(request, token, text.length, limits, eos_ids)
        entries.append((req_id, token, text.reason, row))
    for row in np.flatnonzero(step.result.tokens == NOT_FINITE).tolist():
        if slots[row] not in texts and (req_id := owners[slots[row]]) in requests and req_id not in ending:
            entries.append((req_id, -1, FinishReason.ERROR, row))
    return step_output(step.plan.step, entries)


@dataclass(slots=True)
class _Text:
    """Sequence of a request within an uncommitted step, `length` tokens long. Later rows of its slot are draft rows:
    each counts if the sequence now ends with the token that the row computed."""

    length: int
    last: int = -1
    reason: FinishReason = FinishReason.NONE

    def take(self, token: int) -> None:
        self.last = token
        self.length += 1

    def goes_on_in(self, row: int, entry: RingEntry) -> bool:
        """Return whether a draft row's token belongs to the sequence: its position and input token match."""
        matches = entry.seq_lens[row] == self.length and entry.input_ids[row] == self.last
        return self.reason == FinishReason.NONE and bool(matches)


def ends_of(ending: Mapping[int, FinishReason], requests: RequestTracker, step: int) -> StepOutput:
    """Return ends that were requested from the scheduler and never reported."""
    return step_output(step, [(i, -1, reason, -1) for i, reason in ending.items() if i in requests])


def _end_test(
    request: TrackedRequest, token: int, length: int, limits: StepLimits, eos_ids: Sequence[int]
) -> FinishReason:
    """Return why `token` ends a sequence of `length` tokens, or `NONE`, by the rule of `Request.accept`."""
    sampling = request.sampling
    assert sampling.max_tokens is not None
    stops = token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos)
    if stops and length >= request.num_prompt + sampling.min_tokens:
        return FinishReason.STOP
    if length >= min(request.num_prompt + sampling.max_tokens, limits.max_seq_len):
        return FinishReason.LENGTH
    return FinishReason.NONE
