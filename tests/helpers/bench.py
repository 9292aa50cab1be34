"""Shared data of tests of `minisgl bench`: a load generator's result, bodies of a workload, a trace."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from minisgl.bench.render import Line, Renderer
from minisgl.bench.workloads import WorkloadSettings, make_workload

TOKENS = Line()  # a word is a token, and nothing is added

MOONCAKE = [
    {"timestamp": 4000, "input_length": 600, "output_length": 3, "hash_ids": [1, 3]},
    {"timestamp": 1000, "input_length": 512, "output_length": 0, "hash_ids": [1]},
    {"timestamp": 3000, "input_length": 1000, "output_length": 9, "hash_ids": [1, 2]},
]

QWEN = {
    "chat_id": 159,
    "parent_chat_id": 55,
    "timestamp": 61.5,
    "input_length": 33,
    "output_length": 7,
    "type": "text",
    "turn": 2,
    "hash_ids": [4, 5, 6],
}
NAN = math.nan

FAILURES = ["", "connect", "status", "broken"]


def result(**changes: Any) -> Any:
    """Return a load result of three requests, due at 0, 1 and 2 s; the last one failed at once."""
    columns: dict[str, Any] = {
        "scheduled": [0.0, 1.0, 2.0],
        "sent": [0.0, 1.5, 2.0],
        "first": [0.1, 1.6, NAN],
        "last": [0.5, 3.6, NAN],
        "end": [0.6, 3.7, 2.1],
        "completion_tokens": [5, 11, -1],
        "prompt_tokens": [100, 200, -1],
        "cached_tokens": [-1, 50, -1],
        "text_events": [3, 11, 0],
        "failure": [0, 0, 2],
        "status": [200, 200, 503],
        "num_gaps": [2, 10, 0],
    }
    made: dict[str, Any] = {name: np.array(values) for name, values in columns.items()}
    made |= {"gaps": np.array([0.1, 0.3] + [0.2] * 10, np.float32), "errors": ["", "", "full"], "failures": FAILURES}
    return made | {"duration_s": 4.0, "cpu_s": 0.016, "started": 0.0, **changes}


def lines(*rows: dict[str, Any]) -> str:
    """Return the rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def bodies(name: str, settings: WorkloadSettings) -> list[dict[str, Any]]:
    renderer = Renderer("m", "chat", TOKENS)
    return [json.loads(renderer.body(one)) for one in make_workload(name, settings).requests]


def prompt_of(body: dict[str, Any]) -> str:
    return "\n".join(f"{one['role']}: {one['content']}" for one in body["messages"])
