"""What the step loop remembers of live requests: prompt, sampling parameters, generated tokens; requests whose grammar
is not compiled yet, or whose next mask takes long, of which the scheduler hears later; what a step means for clients,
as messages; and going on with another scheduler when one breaks while serving.

Invariants: O(1) Python work per step whatever the batch size: outputs are kept as they come, and flushed into the
requests when a sequence is asked for, or when too many wait. A request with a grammar leaves once: with a matcher,
refused, or told to end. When a scheduler breaks no token is lost or repeated: the tokens of the steps in flight are
taken in step order by the same end test that a scheduler makes (an end in one step drops the token of the next); what
was asked to end ends.
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
RETURNS_AT_ONCE = 1  # in a step, which computes some of their tokens again


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """`tokens` is the sequence known after the last flush, [num_prompt + generated] int32."""

    req_id: int
    sampling: SamplingParams
    tokens: Int32Array
    num_prompt: int
    priority: int = 0
    background: bool = False
    pin: bool = False
    admitted: bool = False
    grammar: Matcher | None = None
    namespace: int = 0  # of the prefix cache
    space: bytes = b""  # the same in a store, where it lasts
    number: int = 0  # of arrivals before it
    stored: StoredPages | None = None  # until it gets a slot: what was read of its pages
    is_judged: bool = False  # its score is of its last token, which sees those before it alone

    @property
    def no_match(self) -> bool:
        """Whether all of its prompt is computed, whatever is cached."""
        pools_all = self.sampling.embedding is not None and not self.is_judged
        return self.sampling.prompt_logprobs is not None or pools_all

    def stored_len(self, page_size: int) -> int:
        """Up to where its pages can be loaded: the last token is computed."""
        end = 0 if self.stored is None else self.stored.columns[1]
        return min(end, (len(self.tokens) - 1) // page_size) * page_size

    def arrival(self) -> Arrival:
        """The event for a scheduler: a new request, or with what it has generated, after a failover."""
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
        return SlotAssignment(
            slot, self.req_id, self.sampling, self.tokens, self.num_prompt, self.grammar, stored, self.space
        )


class RequestTracker:
    """`judges`: the score of a prompt is made of its last token."""

    def __init__(self, *, judges: bool = False) -> None:
        self._judges = judges
        self._live: dict[int, TrackedRequest] = {}
        self._pending: list[StepOutput] = []  # not flushed
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
        """`tokens`: the prompt, and what was generated elsewhere."""
        request = TrackedRequest(req_id, sampling, tokens, num_prompt, priority, background, pin)
        request.namespace = sampling.adapter
        request.is_judged = self._judges and sampling.embedding == SCORE
        self._live[req_id] = request
        return request

    def drop(self, req_id: int) -> None:
        """Forget a request that never reached the scheduler."""
        del self._live[req_id]

    def record(self, output: StepOutput) -> None:
        """Remember the output of a commit. Ended requests are forgotten at the next flush."""
        if len(output):
            self._pending.append(output)
            self._num_pending += len(output)
            if self._num_pending >= MAX_PENDING:
                self.flush()

    def get(self, req_id: int) -> TrackedRequest:
        """The request with its sequence up to date. Flushes only if the request may have generated something."""
        request = self._live[req_id]
        if request.admitted and self._pending:
            self.flush()
        return request

    def peek(self, req_id: int) -> TrackedRequest | None:
        """The request as it was at the last flush; None if it is forgotten."""
        return self._live.get(req_id)

    def live(self) -> list[TrackedRequest]:
        """In order of arrival, with their sequences up to date."""
        self.flush()
        return list(self._live.values())

    def adapters(self) -> set[int]:
        """The adapters that live requests name."""
        self.flush()
        return {request.sampling.adapter for request in self._live.values()}

    def flush(self) -> None:
        """Bring every sequence up to date, and forget what has ended."""
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
        self._returning: list[int] = []  # of them, those whose masks are there

    @property
    def any_returns(self) -> bool:
        """Whether a step would take somebody back."""
        return bool(self._returning)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, req_id: int) -> bool:
        return req_id in self._waiting

    def adapters(self) -> set[int]:
        """The adapters that waiting requests name."""
        return {waiting.sampling.adapter for waiting in self._waiting.values()}

    def add(self, message: AddRequest) -> str:
        """Why it is refused at once; empty if it is not."""
        grammar = message.sampling.grammar
        assert grammar is not None
        if self._compiler is None:
            return "this engine knows none"
        if message.req_id in self._waiting:
            raise ValueError(f"request id {message.req_id} was used twice")
        self._waiting[message.req_id] = message
        self._compiler.submit(message.req_id, grammar)
        return ""

    def hold(self, request: TrackedRequest) -> None:
        """Its next mask takes long. The scheduler has let it go."""
        assert self._compiler is not None and request.grammar is not None
        self._waiting[request.req_id] = request
        self._compiler.prepare(request.req_id, request.grammar)

    def drop(self, req_id: int) -> bool:
        """Whether it was here."""
        if self._waiting.pop(req_id, None) is None:
            return False
        assert self._compiler is not None
        self._compiler.cancel(req_id)
        return True

    def take(self) -> Iterator[Ready]:
        """Those that are done: the request without its grammar's text, its matcher, or why it has none."""
        if not self._waiting:
            return
        assert self._compiler is not None
        for one in self._compiler.take():
            waiting = self._waiting[one.key]
            if isinstance(waiting, AddRequest):
                sampling = msgspec.structs.replace(waiting.sampling, grammar=None)
                waiting = msgspec.structs.replace(waiting, sampling=sampling)
                del self._waiting[one.key]
                yield waiting, one.matcher, one.error
            else:
                self._returning.append(one.key)
        returning, self._returning = self._returning[:RETURNS_AT_ONCE], self._returning[RETURNS_AT_ONCE:]
        for req_id in returning:
            if (held := self._waiting.pop(req_id, None)) is not None:
                yield held, None, ""

    def wait(self) -> None:
        """Until one is done. Only with some."""
        assert self._compiler is not None
        self._compiler.wait()


def reply(
    output: StepOutput,
    result: StepResult,
    admitted: Sequence[int],
    cached_lens: Sequence[int],
    errors: dict[int, str],
) -> StepTokens:
    """`admitted`: ids of requests, `cached_lens` of them."""
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
    """The end of a request of which no scheduler knows; `error`: why it was not taken."""
    output = step_output(step, [(req_id, -1, reason, -1)])
    return StepTokens(
        step=output.step,
        req_ids=output.req_ids.tobytes(),
        tokens=output.tokens.tobytes(),
        reasons=output.reasons.tobytes(),
        errors={req_id: error} if reason is FinishReason.ERROR else {},
    )


def failed_rows(output: StepOutput, failures: Mapping[int, str]) -> tuple[StepOutput, dict[int, str], list[int]]:
    """`output` with errors instead of the ends in the rows of `failures`, and the texts by request; without the ends in
    rows that are late, and whose they are."""
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
    """Why requests ended with an error: `of_rows` by request, `of_step` whatever it has no other reason for."""
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
    """Log probabilities by row of the step -> by index of the output."""
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
    """A step whose commit never came. `result` None: its forward failed."""

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
    """The output that a commit of `step` would have given; `owners` are the requests by slot. Records nothing."""
    requests.flush()
    entries: list[Ended] = []
    slots = step.entry.req_slots[: step.plan.num_rows].tolist()
    if step.result is None:
        for slot in slots:
            if (req_id := owners[slot]) in requests and req_id not in ending:
                entries.append((req_id, -1, FinishReason.ERROR, -1))
        return step_output(step.plan.step, entries)
    texts: dict[int, _Text] = {}  # by slot
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
    """What a step adds to a request's text, `length` tokens long. Rows of its slot behind the first are those of its
    draft: each counts if the text has become what it was computed from."""

    length: int
    last: int = -1
    reason: FinishReason = FinishReason.NONE

    def take(self, token: int) -> None:
        self.last = token
        self.length += 1

    def goes_on_in(self, row: int, entry: RingEntry) -> bool:
        """Decode rows, which these are, have a token each."""
        known = entry.seq_lens[row] == self.length and entry.input_ids[row] == self.last
        return self.reason == FinishReason.NONE and bool(known)


def ends_of(ending: Mapping[int, FinishReason], requests: RequestTracker, step: int) -> StepOutput:
    """The ends that the scheduler was asked for and did not report."""
    return step_output(step, [(i, -1, reason, -1) for i, reason in ending.items() if i in requests])


def _end_test(
    request: TrackedRequest, token: int, length: int, limits: StepLimits, eos_ids: Sequence[int]
) -> FinishReason:
    """As `Request.accept` of the schedulers, of a text that `token` has made `length` tokens long."""
    sampling = request.sampling
    assert sampling.max_tokens is not None
    stops = token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos)
    if stops and length >= request.num_prompt + sampling.min_tokens:
        return FinishReason.STOP
    if length >= min(request.num_prompt + sampling.max_tokens, limits.max_seq_len):
        return FinishReason.LENGTH
    return FinishReason.NONE
