"""Requests of front ends to an echo engine behind a socket, and the tokens that each of them received."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from minisgl.message import AddRequest, FromEngine, StepTokens
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason

LENGTH = int(FinishReason.LENGTH)
Stream = tuple[list[int], int]


def add(req_id: int, prompt: Iterable[int], max_tokens: int) -> AddRequest:
    return AddRequest(
        req_id, np.array([*prompt], np.int32).tobytes(), SamplingParams(max_tokens=max_tokens, seed=7, ignore_eos=True)
    )


def streams(messages: Iterable[FromEngine]) -> dict[int, Stream]:
    """Return tokens and finish reason by request; reason 0: not ended yet."""
    streams: dict[int, Stream] = {}
    for message in messages:
        if isinstance(message, StepTokens):
            arrays = (message.req_ids, np.int64), (message.tokens, np.int32), (message.reasons, np.int32)
            for req_id, token, reason in zip(*(np.frombuffer(a, t).tolist() for a, t in arrays), strict=True):
                tokens, ended = streams.get(req_id, ([], 0))
                assert not ended, f"{req_id} goes on after its end"
                streams[req_id] = ([*tokens, token] if token >= 0 else tokens, reason)
    return streams
