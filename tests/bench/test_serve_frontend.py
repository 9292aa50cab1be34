"""The scenario `frontend`: its targets are judged in their direction."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minisgl.bench.load import Measured
from minisgl.bench.serve_frontend import frontend_table
from minisgl.bench.serve_metrics import Slo, figures

NAN = math.nan

FAILURES = ["", "connect", "status", "broken"]


def result(**changes: Any) -> Any:
    """Three requests: due at 0, 1, 2; the last one failed at once."""
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


def test_targets_are_judged_in_their_direction() -> None:
    point = {
        **figures(Measured(result(), cpu_s={"http": 1e-4}, rss_bytes={"http": 2**20}), Slo()),
        "mode": "closed",
        "value": 256,
        "output_tok_s": 70_000.0,
    }
    text = frontend_table({"points": [point], "cold": {"last_answered_ms": 400.0}, "idle_cpu_percent": {"http": 0.1}})
    verdicts = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in text.splitlines()[2:]}
    assert verdicts["output tok/s, 256 clients"] == "reached"
    assert verdicts["CPU us/token, HTTP process, 256 clients"] == "stretch"
    assert verdicts["TTFT p99 ms, 256 clients"] == "missed"
    assert verdicts["last of 256 cold connections answered, ms"] == "missed"
    assert verdicts["idle CPU, % of a core"] == "stretch"
    assert not any("64 clients" in name for name in verdicts)
