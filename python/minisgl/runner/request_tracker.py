"""What the step loop remembers of live requests: prompt, sampling parameters, generated tokens.

Invariants: O(1) Python work per step whatever the batch size: outputs are kept as they come, and flushed into the
requests when a sequence is asked for, or when too many wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl.engine.api import SlotAssignment
from minisgl.grammar.slots import Matcher
from minisgl.sampling_params import SamplingParams
from minisgl.step import Arrival, FinishReason, Int32Array, StepOutput

MAX_PENDING = 65_536


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

    def arrival(self) -> Arrival:
        """The event for a scheduler: a new request, or with what it has generated, after a failover."""
        sampling = self.sampling
        assert sampling.max_tokens is not None
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
            no_match=sampling.prompt_logprobs is not None or sampling.embedding is not None,
            background=self.background,
            pin=self.pin,
            namespace=self.namespace,
            no_drafts=sampling.depends_on_output or self.grammar is not None,
        )

    def assignment(self, slot: int) -> SlotAssignment:
        return SlotAssignment(slot, self.req_id, self.sampling, self.tokens, self.num_prompt, self.grammar)


class RequestTracker:
    def __init__(self) -> None:
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
        """That live requests name."""
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
