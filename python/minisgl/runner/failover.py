"""When a scheduler breaks while serving: clients get the tokens of the steps in flight, and another scheduler goes on
with what still lives.

Invariants: no token is lost or repeated; the tokens of the steps in flight are taken in step order by the same end test
that a scheduler makes (an end in one step drops the token of the next); what was asked to end ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minisgl.engine.api import StepResult
from minisgl.runner.request_tracker import RequestTracker, TrackedRequest
from minisgl.step import (
    FinishReason,
    RingEntry,
    StepLimits,
    StepOutput,
    StepPlan,
    step_output,
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
        text.take(token)
        text.reason = _end_test(request, token, text.length, limits, eos_ids)
        entries.append((req_id, token, text.reason, row))
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
