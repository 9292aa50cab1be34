"""`benchmark.shares`: with a key file a flood keeps nobody else waiting."""

from __future__ import annotations

import numpy as np

from benchmark.shares import PARTS, measure
from minisgl.bench.traces import TraceRequest


def test_each_caller_gets_its_part() -> None:
    draw = np.random.default_rng(3)
    lens = draw.integers((200, 20), (2000, 200), (4000, 2)).tolist()
    trace = [TraceRequest(i / 10, given, made) for i, (given, made) in enumerate(lens)]
    without, equal, weighted = measure(trace)
    assert without["parts"][0] > 0.6 and without["jain"] < 0.6
    assert max(equal["parts"]) < 0.35 and min(equal["jain"], weighted["jain"]) > 0.95
    assert weighted["parts"][0] > 0.4 and len(weighted["parts"]) == len(PARTS)
    first, others = equal["ttft_p50_s"]
    assert others < min(first, without["ttft_p50_s"][1])
