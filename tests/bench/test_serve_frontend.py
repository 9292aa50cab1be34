"""The scenario `frontend`: its targets are judged in their direction."""

from __future__ import annotations

from minisgl.bench.load import Measured
from minisgl.bench.serve_frontend import frontend_table
from minisgl.bench.serve_metrics import Slo, figures
from tests.helpers.bench import result


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
