"""What waits in the gateway counts for the Python server, and the other way round."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from minisgl.config import Limits
from minisgl.frontend.output_processor import OutputProcessor, RequestState, Subscriber, request_states
from minisgl.sampling_params import SamplingParams
from minisgl.server.api_keys import KeyUse
from minisgl.server.errors import ApiError
from minisgl.server.waiting import Queue
from minisgl.tokenizer import Tokenizer
from tests.helpers.gateway import Recording

LIMITS = Limits(max_queued_requests=4, max_queued_tokens=100)


def state(num_tokens: int) -> RequestState:
    prompt = np.zeros(num_tokens, np.int32)
    (found,) = request_states([prompt], SamplingParams(), Tokenizer.echo(), 512, Subscriber(lambda: None))
    return found


def test_limits_count_what_waits_in_the_gateway() -> None:
    gateway = Recording()
    queue = Queue(OutputProcessor(), LIMITS, KeyUse(()), gateway)
    queue.check_room(4, 1000)  # alone
    gateway.found["num_waiting"], gateway.found["num_waiting_tokens"] = 3, 60
    assert queue.num_requests == 3
    queue.check_room(1, 40)
    with pytest.raises(ApiError, match="3 requests wait already, the limit is 4") as too_many:
        queue.check_room(2)
    assert too_many.value.status == 429
    with pytest.raises(ApiError, match="prompts of 60 tokens wait already, the limit is 100"):
        queue.check_room(1, 41)
    assert queue.num_in_flight() == 0 and gateway.num_readings == 0, "no more is read than is asked for"


def test_the_gateway_hears_what_waits_here_once_a_turn() -> None:
    gateway = Recording()
    processor = OutputProcessor()

    async def run() -> None:
        queue = Queue(processor, LIMITS, KeyUse(()), gateway)
        requests = [state(num_tokens) for num_tokens in (5, 7)]
        for number, one in enumerate(requests):
            processor.add(one, number)
        queue.encodes(1)
        await asyncio.sleep(0)
        assert gateway.published == [(3, 12, 2)]
        queue.encodes(-1)
        queue.encodes(1)
        await asyncio.sleep(0)
        assert len(gateway.published) == 1, "what did not change is no news"
        assert processor.remove(requests[0])
        await asyncio.sleep(0)
        assert gateway.published[1:] == [(2, 7, 1)]
        processor.fail("gone")
        queue.encodes(-1)
        await asyncio.sleep(0)
        assert gateway.published[-1] == (0, 0, 0)

    asyncio.run(run())
