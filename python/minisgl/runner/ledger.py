"""What the step loop must remember about live requests: their prompt, their sampling, what they generated.

Keeps true: O(1) Python work per step whatever the batch size; outputs are kept packed and folded into the requests
when a sequence is asked for, or when too many lie unfolded.
Doesn't know: pages, rows, slots, text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason, Int32Array, StepOutput

MAX_UNFOLDED = 65_536


@dataclass(slots=True, eq=False)
class LiveRequest:
    """`tokens` is the sequence known after the last fold, [num_prompt + generated] int32."""

    sampling: SamplingParams
    tokens: Int32Array
    num_prompt: int
    priority: int = 0
    admitted: bool = False


class Ledger:
    def __init__(self) -> None:
        self._live: dict[int, LiveRequest] = {}
        self._unfolded: list[StepOutput] = []
        self._num_unfolded = 0

    def __contains__(self, req_id: int) -> bool:
        return req_id in self._live

    def add(self, req_id: int, sampling: SamplingParams, prompt: Int32Array, priority: int = 0) -> None:
        self._live[req_id] = LiveRequest(sampling, prompt, len(prompt), priority)

    def drop(self, req_id: int) -> None:
        """Forget a request that never reached the control plane."""
        del self._live[req_id]

    def record(self, output: StepOutput) -> None:
        """Remember what a commit gave. Ended requests are forgotten at the next fold."""
        if len(output):
            self._unfolded.append(output)
            self._num_unfolded += len(output)
            if self._num_unfolded >= MAX_UNFOLDED:
                self.fold()

    def get(self, req_id: int) -> LiveRequest:
        """The request with its sequence up to date. Folds only if the request may have generated something."""
        request = self._live[req_id]
        if request.admitted and self._unfolded:
            self.fold()
        return request

    def peek(self, req_id: int) -> LiveRequest | None:
        """The request as it was at the last fold; None if it is forgotten."""
        return self._live.get(req_id)

    def live_ids(self) -> list[int]:
        self.fold()
        return list(self._live)

    def fold(self) -> None:
        """Bring every sequence up to date, and forget what has ended."""
        if not self._unfolded:
            return
        ids = np.concatenate([o.req_ids for o in self._unfolded])
        tokens = np.concatenate([o.tokens for o in self._unfolded])
        reasons = np.concatenate([o.reasons for o in self._unfolded])
        self._unfolded.clear()
        self._num_unfolded = 0
        order = np.argsort(ids, kind="stable")
        ids, tokens, reasons = ids[order], tokens[order], reasons[order]
        starts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
        for start, end in zip(starts, np.r_[starts[1:], len(ids)], strict=True):
            req_id = int(ids[start])
            if reasons[end - 1] != FinishReason.NONE:
                self._live.pop(req_id, None)
            elif (request := self._live.get(req_id)) is not None:
                request.tokens = np.concatenate([request.tokens, tokens[start:end]])
