"""What a real server says of where its time goes: /stats, measured messages, a Chrome trace, other names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from tests.helpers.e2e import serving, until
from tests.helpers.seconds import WAIT_S

NUM_TOKENS = 50


def test_stats_metrics_and_trace_cover_both_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the trace goes
    flags = ("--engine", "sim", "--profile-steps", "20", "--metrics-aliases", "vllm", "--served-model-name", "m/x")
    with serving(*flags, "--frontend", "python", env={"MINISGL_TRANSPORT_LATENCY_STATS": "1"}) as server:
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as http:
            body = {"prompt": "one two three", "max_tokens": NUM_TOKENS}
            assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == NUM_TOKENS
            until(lambda: http.get("/stats").json()["engine"]["num_rows_total"] == NUM_TOKENS, "rows are not counted")
            stats = http.get("/stats").json()
            families = http.get("/metrics").text
        _check_stats(stats)
        assert re.search(r'^vllm:generation_tokens_total\{engine="0",model_name="m/x"\} 50\.0$', families, re.MULTILINE)
        assert re.search(r'^minisgl:transport_seconds_total\{part="queue",process="http"\} \d', families, re.MULTILINE)
    _check_trace(tmp_path, server.lines)


def _check_stats(stats: dict[str, dict[str, object]]) -> None:
    assert stats["simulated"] == "null"
    http, engine = stats["http"], stats["engine"]
    assert http["requests_finished"] == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert http["generated_tokens"] == NUM_TOKENS
    meters: dict[str, dict[str, dict[str, float]]] = {name: stats[name]["meters"] for name in ("http", "engine")}  # type: ignore[misc]
    for name in ("tokenize", "detokenize", "dispatch", "encode", "decode", "queue"):
        assert meters["http"][name]["count"] >= 1 and meters["http"][name]["total_s"] > 0, name
    for name in (
        "idle",
        "receive",
        "schedule",
        "launch",
        "wait",
        "commit",
        "send",
        "pause",
        "encode",
        "decode",
        "queue",
    ):
        assert meters["engine"][name]["count"] >= 1 and meters["engine"][name]["longest_s"] > 0, name
    assert meters["engine"]["schedule"]["count"] >= NUM_TOKENS
    assert engine["num_rows_total"] == NUM_TOKENS
    assert all(one["cpu_s"] > 0.05 and one["resident_bytes"] > 2**24 for one in (http, engine))  # type: ignore[operator]


def _check_trace(folder: Path, lines: list[str]) -> None:
    """Of both processes, on one clock: what the engine sent, the HTTP process hands out in the same stretch of time."""
    spans = {}
    for name in ("engine", "http"):
        (file,) = folder.glob(f"minisgl-profile-{name}-*.json")
        assert any(file.name in line for line in lines)
        events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
        spans[name] = {key: [event["ts"] for event in events if event["name"] == key] for key in ("send", "dispatch")}
        names = {event["name"] for event in events}
        if name == "engine":
            assert sum(event["name"] == "forward" for event in events) == 20
            assert {"schedule", "launch", "wait", "commit", "send"} <= names
        else:
            assert {"tokenize", "encode", "decode", "dispatch"} <= names
    # The very first to be handed out may be a snapshot of the idle engine: what it sent before its first step.
    first, last = spans["engine"]["send"][0], spans["engine"]["send"][-1]
    assert any(first < start < last + 60e6 for start in spans["http"]["dispatch"])


def test_debug_narrates_and_every_line_is_json() -> None:
    flags = ("--engine", "echo", "--log-level", "debug", "--log-format", "json", "--disable-pynccl")
    flags = (*flags, "--frontend", "python")  # the engine's own numbers of requests begin at 0 with its first front end
    with serving(*flags, env={"MINISGL_CPU_BACKENT": "python"}) as server:
        body = {"model": "smollm2", "prompt": "secret", "max_tokens": 3, "ignore_eos": True}
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
        until(lambda: any("ends: length" in line for line in server.lines), "the end is not told")
        lines = [json.loads(line) for line in server.lines]
    warnings = [line["event"] for line in lines if line["level"] == "warning"]
    assert any("--disable-pynccl: has no effect" in line for line in warnings)
    assert any(
        "MINISGL_CPU_BACKENT: unknown variable, ignored: did you mean MINISGL_CPU_BACKEND?" in line for line in warnings
    )
    told = [line["event"] for line in lines if line["level"] == "debug" and line["logger"] == "minisgl.engine"]
    assert told[:2] == ["request 0 arrives: 6 prompt tokens", "step 0: request 0 starts, 0 tokens cached"]
    assert "step 1: decode, 1 row, a token each" in told
    assert not any("secret" in line for line in server.lines)
