"""When a control plane breaks while serving: what is known of the steps in flight is told to the clients, and what
still lives is added to another control plane. Nobody's token is lost or repeated.

Keeps true: the tokens of the steps in flight are taken in step order by the same end test that a control plane makes
(an end in one step drops the token of the next); what was told to end ends; everyone else goes on from prompt and
generated tokens.
Doesn't know: why the control plane broke, how the new one schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.engine.api import StepResult
from minisgl.runner.ledger import Ledger, LiveRequest
from minisgl.step import (
    Arrival,
    Event,
    FinishReason,
    Int32Array,
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
    ledger: Ledger,
    limits: StepLimits,
    eos_ids: Sequence[int],
    told_to_end: Mapping[int, FinishReason],
) -> StepOutput:
    """What a commit of `step` would have told; `owners` are the requests by slot. Records nothing."""
    ledger.fold()
    entries: list[Ended] = []
    slots = step.entry.req_slots[: step.plan.num_rows].tolist()
    if step.result is None:
        for slot in slots:
            if (req_id := owners[slot]) in ledger and req_id not in told_to_end:
                entries.append((req_id, -1, FinishReason.ERROR, -1))
        return step_output(step.plan.step, entries)
    for row in step.entry.sample_rows[: step.plan.num_samples].tolist():
        req_id, token = owners[slots[row]], int(step.result.tokens[row])
        if req_id in ledger and req_id not in told_to_end:
            reason = _end_test(ledger.get(req_id), token, limits, eos_ids)
            entries.append((req_id, token, reason, row))
    return step_output(step.plan.step, entries)


def ends_of(told_to_end: Mapping[int, FinishReason], ledger: Ledger, step: int) -> StepOutput:
    """The ends that the control plane was told of and did not report."""
    return step_output(step, [(i, -1, reason, -1) for i, reason in told_to_end.items() if i in ledger])


def arrivals(ledger: Ledger) -> list[Event]:
    """What lives, in order of arrival, as events for a new control plane."""
    return [arrival(req_id, ledger.get(req_id)) for req_id in ledger.live_ids()]


def arrival(req_id: int, request: LiveRequest) -> Arrival:
    """The request with all that it has generated."""
    sampling = request.sampling
    assert sampling.max_tokens is not None
    tokens: Int32Array = np.ascontiguousarray(request.tokens)
    return Arrival(
        req_id=req_id,
        tokens=tokens,
        num_prompt=request.num_prompt,
        max_tokens=sampling.max_tokens,
        num_generated=len(tokens) - request.num_prompt,
        stop_ids=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        priority=request.priority,
        no_match=sampling.prompt_logprobs is not None,
    )


def _end_test(request: LiveRequest, token: int, limits: StepLimits, eos_ids: Sequence[int]) -> FinishReason:
    """As `Request.accept` of the control planes."""
    sampling = request.sampling
    assert sampling.max_tokens is not None
    length = len(request.tokens) + 1
    stops = token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos)
    if stops and length >= request.num_prompt + sampling.min_tokens:
        return FinishReason.STOP
    if length >= min(request.num_prompt + sampling.max_tokens, limits.max_seq_len):
        return FinishReason.LENGTH
    return FinishReason.NONE
