"""What the step loop remembers of its requests."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.runner import request_tracker
from minisgl.runner.request_tracker import RequestTracker
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason, step_output

SAMPLING = SamplingParams(max_tokens=9, seed=1, stop_token_ids=(7,), min_tokens=2, ignore_eos=True)
GOES_ON, ENDS = FinishReason.NONE, FinishReason.LENGTH


def tracker(*req_ids: int) -> RequestTracker:
    found = RequestTracker()
    for req_id in req_ids:
        found.add(req_id, SAMPLING, np.array([10 * req_id, 10 * req_id + 1], np.int32), 2, priority=req_id)
        found.get(req_id).admitted = True
    return found


def test_a_request_is_its_prompt_and_what_it_generated() -> None:
    requests = tracker(1, 2)
    requests.record(step_output(0, [(2, 5, GOES_ON, 0), (1, 6, GOES_ON, 1)]))
    requests.record(step_output(1, [(1, 7, GOES_ON, 0)]))
    assert requests.get(1).tokens.tolist() == [10, 11, 6, 7]
    assert [request.tokens.tolist() for request in requests.live()] == [[10, 11, 6, 7], [20, 21, 5]]


def test_what_has_ended_is_forgotten_at_the_next_flush() -> None:
    requests = tracker(1, 2)
    requests.record(step_output(0, [(1, 5, ENDS, 0)]))
    assert 1 in requests and requests.peek(1) is not None
    requests.flush()
    assert 1 not in requests and requests.peek(1) is None
    assert [request.req_id for request in requests.live()] == [2]


def test_a_request_that_was_not_admitted_needs_no_flush() -> None:
    requests = tracker(1)
    requests.record(step_output(0, [(1, 5, GOES_ON, 0)]))
    new = requests.add(2, SAMPLING, np.array([3], np.int32), 1)
    assert requests.get(2) is new
    peeked = requests.peek(1)
    assert peeked is not None and peeked.tokens.tolist() == [10, 11]


def test_too_much_that_waits_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_tracker, "MAX_PENDING", 2)
    requests = tracker(1)
    for step in range(2):
        requests.record(step_output(step, [(1, step, GOES_ON, 0)]))
    peeked = requests.peek(1)
    assert peeked is not None and peeked.tokens.tolist() == [10, 11, 0, 1]


def test_an_arrival_is_the_request_with_what_it_has_generated() -> None:
    requests = tracker(3)
    assert requests.get(3).arrival().num_generated == 0
    requests.record(step_output(0, [(3, 5, GOES_ON, 0)]))
    event = requests.get(3).arrival()
    assert (event.req_id, event.tokens.tolist(), event.num_prompt, event.num_generated) == (3, [30, 31, 5], 2, 1)
    assert (event.max_tokens, event.min_tokens, event.stop_ids) == (9, 2, (7,))
    assert event.ignore_eos and event.priority == 3 and not event.no_match
