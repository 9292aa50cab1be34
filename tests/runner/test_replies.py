"""Why requests of a step ended with an error."""

from __future__ import annotations

import numpy as np

from minisgl.runner.replies import errors_of
from minisgl.runner.request_tracker import RequestTracker
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason, step_output

ROW, WAITING, RUNNING, FORGOTTEN, WELL = range(5)


def test_each_request_has_its_own_reason() -> None:
    """What is said of its row, of a prompt that never got one, else of the step; nothing of who ended well."""
    requests = RequestTracker()
    for req_id in (ROW, WAITING, RUNNING, WELL):
        requests.add(req_id, SamplingParams(max_tokens=9), np.array([5, 6, 7], np.int32), 3)
        requests.get(req_id).admitted = req_id != WAITING
    failed = [(req_id, -1, FinishReason.ERROR, -1) for req_id in (ROW, WAITING, RUNNING, FORGOTTEN)]
    output = step_output(0, [*failed, (WELL, 5, FinishReason.STOP, 0)])
    assert errors_of(output, requests, {ROW: "no such row"}, "the step broke", 3) == {
        ROW: "no such row",
        WAITING: "a prompt of 3 tokens does not fit: the limit is 2",
        RUNNING: "the step broke",
        FORGOTTEN: "the step broke",
    }
