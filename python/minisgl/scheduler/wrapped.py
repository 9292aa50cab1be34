"""Schedulers that wrap another one and pass on what they do not override. `NarratingControlPlane` logs what each step
does (`--log-level debug`), in counts and request ids; token texts appear only with a `Describe`, which `minisgl
generate --narrate` has and no server has. `FaultyControlPlane` fails on purpose, for tests; after that it refuses every
call, like a broken scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from minisgl.scheduler.api import (
    ControlPlane,
    ControlPlaneError,
    Stats,
    TreeView,
    backend_of,
    metadata_time_ns,
    part_failures,
)
from minisgl.step import Arrival, Events, FinishReason, Int32Array, StepBuffers, StepOutput, StepPlan


class WrappedControlPlane:
    def __init__(self, inner: ControlPlane) -> None:
        self._inner = inner

    def schedule(self, step: int, events: Events) -> StepPlan:
        return self._inner.schedule(step, events)

    def commit(self, step: int, tokens: Int32Array) -> StepOutput:
        return self._inner.commit(step, tokens)

    def stats(self) -> Stats:
        return self._inner.stats()

    def tree_view(self, limit: int) -> TreeView:
        return self._inner.tree_view(limit)

    def cached_pages(self, tokens: Int32Array, namespace: int) -> int:
        return self._inner.cached_pages(tokens, namespace)

    def drafts_wanted(self) -> list[tuple[int, int]]:
        return self._inner.drafts_wanted()

    def check(self) -> None:
        self._inner.check()

    @property
    def buffers(self) -> StepBuffers:
        return self._inner.buffers

    @property
    def metadata_ns(self) -> int:
        return metadata_time_ns(self._inner)

    @property
    def backend(self) -> str:
        return backend_of(self._inner)

    @property
    def part_failures(self) -> dict[str, str]:
        return part_failures(self._inner)


Narrate = Callable[[Sequence[str]], None]
Describe = Callable[[int], str]  # text of a token id, for people
MAX_NAMED = 8  # requests that one line names


class NarratingControlPlane(WrappedControlPlane):
    """A scheduler that passes a few lines to `narrate` for each call of `inner` in which something happens."""

    def __init__(self, inner: ControlPlane, narrate: Narrate, describe: Describe | None = None) -> None:
        super().__init__(inner)
        self._narrate = narrate
        self._describe = describe
        self._num_prompt: dict[int, int] = {}
        self._owners: dict[int, int] = {}  # request id by slot

    def schedule(self, step: int, events: Events) -> StepPlan:
        plan = self._inner.schedule(step, events)
        arrived = [event for event in events if isinstance(event, Arrival)]
        self._num_prompt.update({event.req_id: event.num_prompt for event in arrived})
        lines = [f"request {event.req_id} arrives: {_count(event.num_prompt, 'prompt token')}" for event in arrived]
        if lines := [*lines, *self._describe_plan(step, plan)]:
            self._narrate(lines)
        return plan

    def _describe_plan(self, step: int, plan: StepPlan) -> list[str]:
        entry = self._inner.buffers.ring[plan.ring_index]
        lines = []
        if plan.num_retracted:
            lines.append(f"step {step}: pages are short: back to waiting: {_count(plan.num_retracted, 'request')}")
        for i in range(plan.num_assigned):
            slot, cached = entry.assigned[i].tolist()
            req_id = self._owners[slot] = int(entry.assigned_ids[i])
            lines.append(f"step {step}: request {req_id} starts, {_count(cached, 'token')} cached")
        for row in range(plan.num_decode_rows, plan.num_rows):
            req_id = self._owners[int(entry.req_slots[row])]
            length, end = int(entry.extend_lens[row]), int(entry.seq_lens[row])
            total = max(self._num_prompt.get(req_id, end), end)
            lines.append(
                f"step {step}: prefill of request {req_id}, {_count(length, 'token')}: {end} of {total} are done"
            )
        if plan.num_decode_rows:
            lines.append(f"step {step}: decode, {_count(plan.num_decode_rows, 'row')}, a token each")
        return lines

    def commit(self, step: int, tokens: Int32Array) -> StepOutput:
        output = self._inner.commit(step, tokens)
        sent = output.tokens >= 0
        ids = output.req_ids[sent].tolist()
        if self._describe is None:
            lines = [f"step {step}: sent, a token each: {_named(ids)}"] if ids else []
        else:
            named = zip(ids, map(self._describe, output.tokens[sent].tolist()), strict=True)
            lines = [f"step {step}: request {req_id} gets token {token}" for req_id, token in named]
        for req_id, reason in zip(output.req_ids.tolist(), output.reasons.tolist(), strict=True):
            if reason != FinishReason.NONE:
                lines.append(f"step {step}: request {req_id} ends: {FinishReason(reason).name.lower()}")
                self._num_prompt.pop(req_id, None)
        if lines:
            self._narrate(lines)
        return output


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _named(req_ids: Sequence[int]) -> str:
    more = len(req_ids) - MAX_NAMED
    shown = ", ".join(map(str, req_ids[:MAX_NAMED]))
    return f"{'request' if len(req_ids) == 1 else 'requests'} {shown}" + (f" and {more} more" if more > 0 else "")


Call = Literal["schedule", "commit"]
When = Literal["before", "after"]


class FaultyControlPlane(WrappedControlPlane):
    """A scheduler that raises `ControlPlaneError` in `call` of step `step`, before or after `inner` is called."""

    def __init__(self, inner: ControlPlane, call: Call, step: int, when: When) -> None:
        super().__init__(inner)
        self._fault = (call, step)
        self._when = when
        self._dead = False

    def schedule(self, step: int, events: Events) -> StepPlan:
        self._maybe_fail("schedule", step, "before")
        plan = self._inner.schedule(step, events)
        self._maybe_fail("schedule", step, "after")
        return plan

    def commit(self, step: int, tokens: Int32Array) -> StepOutput:
        self._maybe_fail("commit", step, "before")
        output = self._inner.commit(step, tokens)
        self._maybe_fail("commit", step, "after")
        return output

    def _maybe_fail(self, call: Call, step: int, when: When) -> None:
        if self._dead or ((call, step) == self._fault and when == self._when):
            self._dead = True
            raise ControlPlaneError(f"{call}({step}) fails on order, {when} it took effect")


def make_faulty(inner: ControlPlane, order: str) -> FaultyControlPlane:
    """Wrap `inner` in a scheduler that fails as `order` says: "CALL:STEP:WHEN", such as "commit:40:after". Raises
    `ValueError` for another format."""
    call, _, rest = order.partition(":")
    step, _, when = rest.partition(":")
    if call not in ("schedule", "commit") or when not in ("before", "after") or not step.isdecimal():
        raise ValueError(f"{order!r}: must be like commit:40:after")
    return FaultyControlPlane(inner, call, int(step), when)  # type: ignore[arg-type]
