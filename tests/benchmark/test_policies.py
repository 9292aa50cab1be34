"""`benchmark.policies`: its jobs run, and its claims are told by their figures."""

from __future__ import annotations

from pathlib import Path

from benchmark import policies
from benchmark.policies import (
    LOADS,
    LONGEST,
    ORACLES,
    SHARED,
    SHORT,
    Job,
    Rows,
    claims,
    main_table,
    plots,
    write_shared,
)
from minisgl.bench.traces import read_trace

PROFILE = policies.PROFILES[0]


def test_the_shared_prefixes_are_a_trace_with_every_policy(tmp_path: Path) -> None:
    file = tmp_path / "shared.jsonl"
    write_shared(file)
    trace = read_trace(str(file))
    assert len(trace) == policies.NUM_SHARED and len({one.blocks[0] for one in trace}) == policies.NUM_PREFIXES
    rows = Job(PROFILE, SHARED, str(file), num_pages=2048, max_requests=300).run((0.9, 1.2))
    assert [(row["load"], row["policy"]) for row in rows] == [
        (load, policy) for load in (0.9, 1.2) for policy in policies.POLICIES
    ]
    assert all(row["refused"] == 0 and 0 < row["fairness"] <= 1 for row in rows)
    assert main_table(rows).count("\n") == 1 + len(rows)
    for shown in plots(tmp_path, PROFILE, SHARED, rows):
        assert (tmp_path / shown.split("(")[-1].rstrip(")")).read_text().startswith("<?xml")


def made(short_p99: float, longest_p99: float, hits: float) -> Rows:
    """fcfs has 10 s, 20 s, 0.1, an oracle finds 0.7."""
    rows: Rows = []
    for load in LOADS:
        for policy, short, longest in (("fcfs", 10.0, 20.0), ("srpf", short_p99, longest_p99)):
            by_prompt = {SHORT: {"p99": short}, LONGEST: {"p99": longest}}
            rows.append({"trace": "azure-code", "policy": policy, "load": load, "ttft_by_prompt_s": by_prompt})
        found = {"fcfs": 0.1, "lpm": hits, **dict.fromkeys(ORACLES, 0.7)}
        rows += [{"trace": SHARED, "policy": one, "load": load, "hit_rate": rate} for one, rate in found.items()]
    return [{"profile": PROFILE, **row} for row in rows]


def test_claims_are_met_or_missed() -> None:
    met = claims(made(4.0, 22.0, 0.31))
    assert "-60.0 %, +10.0 % | met" in met and "0.100, lpm 0.310, unlimited 0.700: 35 % | met" in met
    assert "missed" not in met
    for short, longest in ((6.0, 20.0), (4.0, 24.0)):
        assert claims(made(short, longest, 0.31)).count("missed") == 1
    assert claims(made(4.0, 20.0, 0.25)).count("missed") == len(LOADS) * len(ORACLES)
