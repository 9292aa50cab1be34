"""`benchmark.simulate`: nothing is left out, and the result is the same every time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmark.simulate import Simulation, VirtualServer, main, simulate
from minisgl.bench.traces import BLOCK, TraceRequest
from minisgl.config import ConfigError, EngineConfig
from tests.helpers.bench import MOONCAKE, QWEN, lines

PROFILE = {"name": "ten-ms", "table": {"rows": [1], "prefill_tokens": [0], "kv_len": [1], "ms": [[[10]]]}}


@pytest.fixture
def mooncake(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text(lines(*MOONCAKE))
    return str(file)


@pytest.fixture
def engine(tmp_path: Path) -> EngineConfig:
    file = tmp_path / "ten-ms.yaml"
    file.write_text(json.dumps(PROFILE))
    return EngineConfig(engine="sim", sim_profile=str(file), cpu_backend="python", num_pages=400, max_seq_len=2048)


def run(config: EngineConfig, *requests: TraceRequest, host_s: float = 0.0) -> VirtualServer:
    return VirtualServer(config, requests, host_s).run()


def test_an_arrival_in_the_middle_of_a_step_waits_for_the_next_free_plan(engine: EngineConfig) -> None:
    """With overlap the step after the running one is planned already."""
    requests = TraceRequest(0.0, 8, 20), TraceRequest(0.005, 8, 3)
    ahead = run(engine, *requests)
    assert ahead.first_token_s == pytest.approx([0.01, 0.03]) and ahead.last_token_s == pytest.approx([0.20, 0.05])
    plain = run(msgspec.structs.replace(engine, overlap=False), *requests)
    assert plain.first_token_s == pytest.approx([0.01, 0.02]) and plain.last_token_s == pytest.approx([0.20, 0.04])
    assert plain.num_tokens.tolist() == ahead.num_tokens.tolist() == [20, 3]


def test_idle_time_passes_at_once(engine: EngineConfig) -> None:
    found = run(engine, TraceRequest(0.0, 8, 2), TraceRequest(1000.0, 8, 2))
    assert found.first_token_s == pytest.approx([0.01, 1000.01])
    assert found.clock.now() == pytest.approx(1000.02) and found.sim.busy_s == pytest.approx(0.04)
    assert found.loop.num_steps < 20


def test_a_slow_host_shows_only_without_overlap_or_above_the_step(engine: EngineConfig) -> None:
    request = TraceRequest(0.0, 8, 21)
    assert run(engine, request, host_s=0.004).clock.now() == pytest.approx(0.21, abs=0.01)
    alone = msgspec.structs.replace(engine, overlap=False)
    assert run(alone, request, host_s=0.004).last_token_s[0] == pytest.approx(21 * 0.014)


def test_what_does_not_fit_is_refused_and_counted(engine: EngineConfig, mooncake: str) -> None:
    small = msgspec.structs.replace(engine, max_seq_len=900)
    found = run(small, TraceRequest(0.0, 901, 2), TraceRequest(0.0, 10, 2))
    assert found.refused.tolist() == [True, False] and found.num_tokens.tolist() == [0, 2]
    result = simulate(Simulation(engine=small, trace=mooncake))["runs"][0]
    assert result["refused"] == 1 and result["completed"] == 2


def test_figures_of_a_run(engine: EngineConfig, mooncake: str) -> None:
    """One at a time; by hand: 512 + 1000 + 600 in, 1 + 9 + 3 out; 512 of each later prompt are cached."""
    found = simulate(Simulation(engine=engine, trace=mooncake, slo_ttft_s=0.0105))["runs"][0]
    assert found["completed"] == 3 and found["refused"] == 0 and found["steps"] == pytest.approx(13, abs=6)
    assert found["virtual_s"] == pytest.approx(3.03) and found["device_busy"] == pytest.approx(0.13 / 3.03)
    assert found["output_tok_s"] == pytest.approx(13 / 3.03) and found["total_tok_s"] == pytest.approx(2125 / 3.03)
    assert found["hit_rate"] == pytest.approx(1024 / 2112)
    assert found["ttft_s"]["max"] == pytest.approx(0.01) and found["tpot_s"]["mean"] == pytest.approx(0.01)
    assert found["e2e_s"]["max"] == pytest.approx(0.09) and found["within_slo"] == 1.0
    late = simulate(Simulation(engine=engine, trace=mooncake, slo_ttft_s=0.0095))["runs"][0]
    assert late["within_slo"] == 0.0 and late["goodput_req_s"] == 0.0


def test_time_scale_changes_arrivals_alone(engine: EngineConfig, mooncake: str) -> None:
    once, twice = simulate(Simulation(engine=engine, trace=mooncake, time_scales=(1.0, 2.0)))["runs"]
    assert twice["virtual_s"] == pytest.approx(once["virtual_s"] - 1.5) and twice["hit_rate"] == once["hit_rate"]


def test_a_closed_loop_sends_when_an_answer_has_come(engine: EngineConfig) -> None:
    """Two clients, three requests of 10 tokens each; by hand: an end is seen after the step that was planned ahead."""
    settings = Simulation(engine=engine, trace="", lengths=(8, 10), max_requests=6, concurrency=2)
    found = simulate(settings)
    assert found["trace"] == "8 tokens in, 10 out" and found["concurrency"] == 2
    one = found["runs"][0]
    assert one["completed"] == 6 and one["hit_rate"] == 0.0 and one["e2e_s"]["max"] <= 0.11 + 1e-9
    assert one["virtual_s"] == pytest.approx(0.3, abs=0.021) and one["mean_rows"] > 1.7
    alone = simulate(dataclasses.replace(settings, concurrency=1))
    assert alone["runs"][0]["virtual_s"] >= 0.6 and alone["runs"][0]["mean_rows"] <= 1


def test_the_same_settings_give_the_same_result(engine: EngineConfig, tmp_path: Path) -> None:
    """Both schedulers too: they decide the same."""
    rng = np.random.default_rng(3)
    rows = [
        {
            "timestamp": int(ms),
            "input_length": int(length),
            "output_length": int(rng.integers(1, 40)),
            "hash_ids": [0, 1, 2 + i % 5][: -(-int(length) // BLOCK)],
        }
        for i, (ms, length) in enumerate(zip(rng.integers(0, 2000, 40), rng.integers(1, 1500, 40), strict=True))
    ]
    file = tmp_path / "many.jsonl"
    file.write_text(lines(*rows))
    results = [
        simulate(Simulation(engine=msgspec.structs.replace(engine, cpu_backend=plane), trace=str(file)))
        for plane in ("python", "python", "rust_hotpath")
    ]
    assert results[0] == results[1] == results[2]
    assert results[0]["runs"][0]["mean_rows"] > 2


def test_policies_side_by_side(engine: EngineConfig) -> None:
    """One row, and four requests at once: by hand, each is prefilled in a step of 10 ms and ends two later."""
    requests = [TraceRequest(0.0, length, 1) for length in (8, 700, 30, 900, 20)]
    first = {
        policy: run(msgspec.structs.replace(engine, max_running_requests=1, schedule_policy=policy), *requests)
        for policy in ("fcfs", "srpf")
    }
    assert np.argsort(first["fcfs"].first_token_s).tolist() == [0, 1, 2, 3, 4]
    assert np.argsort(first["srpf"].first_token_s).tolist() == [0, 4, 2, 1, 3]


def test_a_comparison_has_a_run_for_each_policy(engine: EngineConfig, mooncake: str) -> None:
    policies = ("fcfs", "lpm", "srpf")
    settings = Simulation(engine=engine, trace=mooncake, time_scales=(1.0, 2.0), policies=policies)
    runs = simulate(settings)["runs"]
    assert [(one["time_scale"], one["policy"]) for one in runs] == [(x, p) for x in (1.0, 2.0) for p in policies]
    classes = runs[0]["ttft_by_prompt_s"]
    assert list(classes) == ["prompts below 1,000", "prompts to 4,000"]


def test_simulate_takes_a_qwen_trace_for_what_it_is(engine: EngineConfig, tmp_path: Path) -> None:
    """As milliseconds it would be over at once; with blocks of 512 nothing of the second prompt would be new."""
    file = tmp_path / "qwen.jsonl"
    second = {**QWEN, "timestamp": 71.5, "input_length": 48, "hash_ids": [4, 5, 9]}
    file.write_text(lines(QWEN, second))
    found = simulate(Simulation(engine=engine, trace=str(file)))["runs"][0]
    assert found["virtual_s"] == pytest.approx(10.07) and found["hit_rate"] == pytest.approx(32 / 81)


def test_the_command(engine: EngineConfig, mooncake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    flags = ["--trace", mooncake, "--sim-profile", engine.sim_profile, "--num-pages", "400", "--out", str(out)]
    assert main(flags) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["bench"] == "simulate" and printed["simulated"] == "ten-ms" and printed["runs"][0]["completed"] == 3
    text = (out / "README.md").read_text()
    assert "imulated" in text and "ten-ms" in text and str(tmp_path) not in text
    assert json.loads((out / "raw.json").read_text())["result"] == printed
    assert "| TTFT s | " in text and "| p50 | p90 | p95 | p99 | max |" in text and "p95" in printed["runs"][0]["ttft_s"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--engine", "echo"], "--engine"),
        (["--sim-profile", "null"], "--sim-profile"),
        (["--time-scale", "0"], "--time-scale"),
        (["--requests", "0"], "--requests"),
        (["--concurrency", "0"], "--concurrency"),
        (["--lengths", "5", "5"], "--lengths"),
        (["--host-us", "-1"], "--host-us"),
    ],
)
def test_settings_that_cannot_be(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2 and complaint in capsys.readouterr().err


def test_loads_are_shares_of_what_it_can_do(engine: EngineConfig, tmp_path: Path) -> None:
    """One row and requests of one step each: by hand, 100 requests a second."""
    rows = [{"timestamp": 1000 * i, "input_length": 8, "output_length": 1, "hash_ids": [i]} for i in range(40)]
    file = tmp_path / "even.jsonl"
    file.write_text(lines(*rows))
    settings = Simulation(
        engine=msgspec.structs.replace(engine, max_running_requests=1), trace=str(file), loads=(0.5, 2.0)
    )
    found = simulate(settings)
    assert found["capacity_req_s"] == pytest.approx(100, rel=0.05)
    half, twice = found["runs"]
    assert (half["load"], twice["load"]) == (0.5, 2.0) and half["time_scale"] * 4 == pytest.approx(twice["time_scale"])
    assert half["ttft_s"]["max"] < 0.03 and twice["ttft_s"]["max"] > 0.15
    for wrong in ({"concurrency": 1}, {"time_scales": (2.0,)}, {"loads": (0.0,)}):
        with pytest.raises(ConfigError, match="--load"):
            simulate(dataclasses.replace(settings, **wrong))  # type: ignore[arg-type]
