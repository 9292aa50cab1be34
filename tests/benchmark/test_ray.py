"""`benchmark.ray` without Ray: parts, pieces, ratios, loads, and that a report says what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmark.ray import __main__ as program
from benchmark.ray import overhead, routing
from benchmark.ray.pieces import chunks_of, pieces_of
from benchmark.ray.processes import part_of, per_replica, why_not
from benchmark.ray.ratios import ratio, shown, there_and_back
from benchmark.ray.tables import costs
from minisgl.bench.report import Report, read_raw
from minisgl.bench.traces import TraceRequest

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (["ray::ServeReplica:minisgl:minisgl", "", ""], "ingress"),
        (["ray::ServeReplica:minisgl:minisgl.handle_request_streaming"], "ingress"),
        (["ray::ServeReplica:minisgl:echo.handle_request_streaming"], "replica"),
        (["ray::ServeReplica:minisgl:Qwen-Qwen3-0.6B"], "replica"),
        (["ray::ProxyActor"], "proxy"),
        (["ray::ServeController.listen_for_change"], "controller"),
        (["python", "-m", "minisgl", "serve", "--host", "127.0.0.1", "--managed"], "server"),
        (["python", "-m", "minisgl.runner.process", "7"], "engine"),
        (["gcs_server", "--log_dir=logs"], "ray"),
        (["ray::IDLE"], "ray"),
        ([], "ray"),
    ],
)
def test_a_process_is_one_part(command: list[str], part: str) -> None:
    assert part_of(command) == part


def chunked(*parts: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def test_pieces_are_what_the_server_wrote() -> None:
    one = b'data: {"text": "a"}\n\n'
    last = b'data: {"usage": {"prompt_tokens": 9, "completion_tokens": 4}}\n\ndata: [DONE]\n\n'
    answer = chunked(one + one, one, b": a comment\n\n", last)
    assert chunks_of(answer) == [one + one, one, b": a comment\n\n", last]
    found = pieces_of([answer, answer])
    assert (found.chunks, found.events, found.tokens) == (6, 8, 8)
    assert found.tokens_per_chunk == pytest.approx(8 / 6)


@pytest.mark.parametrize("size", range(len(HEAD) - 4, len(chunked(b"data: {}", b"more"))))
def test_an_answer_that_is_cut_is_no_figure(size: int) -> None:
    with pytest.raises(ValueError, match=r"cut|chunked"):
        chunks_of(chunked(b"data: {}", b"more")[:size])


def test_an_error_is_no_figure() -> None:
    with pytest.raises(ValueError, match="503"):
        chunks_of(chunked(b"data: {}").replace(b"200 OK", b"503 Busy"))
    with pytest.raises(ValueError, match="how many tokens"):
        pieces_of([chunked(b"data: {}")])


def test_ratios_are_of_the_same_round() -> None:
    found = ratio({"a": [2.0, 20.0, 200.0], "b": [1.0, 10.0, 100.0]}, "a", "b")
    assert found is not None and [found.estimate, found.low, found.high] == pytest.approx([2.0, 2.0, 2.0])
    assert ratio({"a": [1.0, 1.0], "b": [0.0, 1.0]}, "a", "b") is None
    assert ratio({"a": [1.0], "b": [None]}, "a", "b") is None
    alone = ratio({"a": [3.0], "b": [1.0]}, "a", "b")
    assert shown(alone) == "3.00" and shown(None) == "-"


def test_turns_go_there_and_back() -> None:
    assert [there_and_back("ab", turn) for turn in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_memory_that_does_not_suffice_is_said() -> None:
    memory = {"replica": 400, "server": 300, "engine": 100, "ray": 50, "proxy": 25}
    assert per_replica(memory, 4) == (200.0, 75.0)
    assert why_not(4, 200.0, 75.0, 2000.0) is None
    reason = why_not(16, 2.0**30, 2.0**30, 20 * 2.0**30)
    assert reason is not None and "17.0 GiB of 20.0" in reason


def test_a_scaled_trace_shares_what_it_shared() -> None:
    trace = [TraceRequest(0.0, 1100, 160, (1, 2, 3)), TraceRequest(4.0, 600, 5, (1, 2))]
    small = routing.scaled(trace, 16)
    assert [(one.input_len, one.output_len, one.block_len) for one in small] == [(68, 10, 32), (37, 1, 32)]
    assert [one.blocks for one in small] == [(1, 2, 3), (1, 2)]
    made = routing.trace_workload(small, rate=0.5, run=3)
    assert made.arrivals == (0.0, 2.0)  # one gap, at a request in two seconds
    first, second = (request.messages[0].parts for request in made.requests)
    assert [request.input_len for request in made.requests] == [68, 37]
    assert first[0] == second[0] and len(first) == 3
    assert routing.trace_workload(small, rate=0.5, run=4).requests[0] != made.requests[0]


@pytest.mark.parametrize("size", routing.SIZES)
def test_one_replica_cannot_keep_all_prefixes_but_its_share(size: int) -> None:
    share = routing.PREFIXES_PER_REPLICA * routing.PREFIX
    assert share < routing.POOL < size * share
    made = routing.shared_workload(size, 400, 2.0, 0)
    assert made.arrivals is not None and len(made.arrivals) == 400
    assert 150 < made.arrivals[-1] < 250
    assert len({request.messages[0] for request in made.requests}) <= routing.PREFIXES_PER_REPLICA * size


def _overhead_sample(side: str, turn: int, streams: int, tokens: int) -> dict[str, Any]:
    slower = 2.0 * (1 + turn) if side == overhead.SERVE else 1.0
    figures = {
        "requests": 100,
        "requests_s": 90.0 / slower,
        "failed": 0,
        "output_tokens": 100 * tokens,
        "output_tok_s": 9000.0 / slower,
        "tokens_per_event": 1.0,
        **{f"{kind}_ms": {"p50": slower, "p99": 2 * slower} for kind in ("ttft", "itl", "tpot")},
    }
    used = {"server": 0.01 * tokens, "engine": 0.005 * tokens}
    if side == overhead.SERVE:
        used["proxy"] = 0.1 + 0.002 * tokens
    place = {"side": side, "round": turn, "streams": streams, "tokens": tokens, "load": 1.5}
    return {**place, **overhead.sample_of(figures, used), "tokens_per_write": 2.0, "events_per_write": 2.0}


def _overhead_raw() -> dict[str, Any]:
    samples = [
        _overhead_sample(side, turn, streams, tokens)
        for turn in range(2)
        for streams in (1, 8)
        for tokens in (1, 128)
        for side in overhead.SIDES
    ]
    return {"samples": samples, "idle": {overhead.SERVE: {"proxy": 0.01, "ray": 0.02}, overhead.BARE: {"server": 0.0}}}


def test_costs_are_of_a_request_and_of_each_token() -> None:
    found = costs(_overhead_raw()["samples"], 128, 8, overhead.SERVE)
    assert found["proxy"] == pytest.approx((1e6 * 0.102 / 100, 1e6 * 0.002 / 100))
    assert found["server"] == pytest.approx((100.0, 100.0))
    assert "proxy" not in costs(_overhead_raw()["samples"], 128, 8, overhead.BARE)


def test_the_report_of_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "measured", lambda args: {"ray": "2.60", **_overhead_raw()})
    assert program.main(["overhead", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text()
    assert "| 8 | TTFT p50 ms | 3.00 | 1.00 | 1.00 | 2.83 (0.0346 to 231) |" in text
    assert "| Ray Serve | 0.0300 | proxy 0.0100, ray 0.0200 |" in text
    assert (tmp_path / "overhead.svg").exists() or "not plotted" in text
    before = read_raw(tmp_path)
    (tmp_path / "README.md").unlink()
    assert program.main(["overhead", "--out", str(tmp_path), "--again"]) == 0
    assert (tmp_path / "README.md").read_text() == text and read_raw(tmp_path) == before


def test_the_report_of_routing(tmp_path: Path) -> None:
    samples = [
        {
            **{"replicas": size, "workload": "shared-prefix", "routing": policy, "round": turn, "load": 0.5},
            **{"hit_rate": 0.8 if policy == "prefix" else 0.3, "ttft_p50_ms": 50.0 if policy == "prefix" else 200.0},
            "ttft_p99_ms": 400.0 + turn,
        }
        for size in (2, 4)
        for turn in range(2)
        for policy in routing.POLICIES
    ]
    raw = {"samples": samples, "left_out": {8: "too much"}, "memory": {2: {"server": 2**30}}}
    report = Report(tmp_path, "Routing")
    program.routing_report(report, json.loads(json.dumps(raw)))
    report.write(raw)
    text = (tmp_path / "README.md").read_text()
    assert "| shared-prefix | 2 | 2 | 80.0 | 30.0 | 50.0 (50.0 to 50.0) | 50.0 | 200 | 0.250 (0.250 to 0.250) |" in text
    assert "8 replicas were left out: too much." in text


def test_the_simulated_profile_is_one(tmp_path: Path) -> None:
    from minisgl.engine.sim.profile import load_profile

    file = tmp_path / "slow.yaml"
    file.write_text(json.dumps(routing.PROFILE))
    profile = load_profile(str(file))
    assert profile.table is not None
    assert math.isclose(profile.table.seconds(1, 1 + routing.PREFIX, routing.PREFIX), 0.01 + 0.4e-3 * routing.PREFIX)
