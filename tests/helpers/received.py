"""Messages that a step loop sent, by request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl.message import FromEngine, StepTokens
from minisgl.step import FinishReason


class Received:
    """Outputs by request; asserts that nothing follows an end. `logprobs`: of each token, with the likeliest ids and
    theirs; `cached`: cached tokens when the request was last admitted."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.errors: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.logprobs: dict[int, list[tuple[float, tuple[int, ...], tuple[float, ...]]]] = {}
        self.prompt_logprobs: dict[int, dict[int, float]] = {}  # by position
        self.embeddings: dict[int, bytes] = {}

    def take(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            assert isinstance(message, StepTokens), f"not expected here: {message}"
            self.take_step(message)

    def take_step(self, message: StepTokens) -> None:
        self.errors |= message.errors
        self.embeddings |= {one.req_id: one.numbers for one in message.embeddings}
        admitted = np.frombuffer(message.admitted_ids, np.int64).tolist()
        self.cached |= dict(zip(admitted, np.frombuffer(message.cached_lens, np.int32).tolist(), strict=True))
        ids = np.frombuffer(message.req_ids, np.int64).tolist()
        for one in message.logprobs:
            self.logprobs.setdefault(ids[one.index], []).append((one.logprob, one.top_ids, one.top_logprobs))
        for chunk in message.prompt_logprobs:
            self.prompt_logprobs.setdefault(chunk.req_id, {}).update(enumerate(chunk.logprobs, chunk.first))
        tokens = np.frombuffer(message.tokens, np.int32).tolist()
        for req_id, token, reason in zip(ids, tokens, np.frombuffer(message.reasons, np.int32).tolist(), strict=True):
            assert req_id not in self.reasons, f"request {req_id} was told something after its end"
            if token >= 0:
                self.tokens.setdefault(req_id, []).append(token)
            if reason:
                self.reasons[req_id] = FinishReason(reason)
