"""`minisgl bench serve` as a user runs it: against a server of its own, and against one that is given or gone."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl import cli
from minisgl.bench.server_process import Launch, ServerProcess
from minisgl.bench.stats import SUMMARY
from tests.helpers.e2e import until
from tests.helpers.loadgen import HEAD, Exchange, stub

ECHO = ("--engine", "echo", "--num-pages", "2048", "--max-running-requests", "8", "--max-seq-len", "4096")
SMALL = ("--concurrency", "2", "--num-requests", "8", "--warmup-requests", "2")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(Launch(flags=ECHO)) as running:
        yield running
    assert running.left_behind == []


def bench(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["bench", "serve", *flags])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_bench_starts_its_own_server_and_writes_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lengths = ("--input-len", "60", "100", "--output-len", "5", "9", "--slo-ttft-ms", "60000")
    code, found = bench(capsys, *SMALL, *lengths, "--repeat", "2", "--out", str(tmp_path), "--", *ECHO)
    assert code == 0
    (point,) = found["points"]
    assert (point["load"], point["repeats"], point["succeeded"], point["failed"]) == ("2 clients", 2, 8, 0)
    assert point["tokens_from"] == "usage"
    assert 5 <= point["lengths"]["output"]["mean"] <= point["lengths"]["output"]["max"] <= 9
    assert 50 <= point["lengths"]["input"]["mean"] <= 110  # words of several bytes come close, not exactly
    assert point["goodput"]["share"] == 1.0
    assert set(point["server"]["cpu_us_per_token"]) == {"http", "engine", "all"}
    assert point["server"]["rss_mib"]["all"] > 50
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert raw["result"] == found
    assert len(raw["runs"]) == 2
    text = (tmp_path / "README.md").read_text()
    assert "minisgl bench serve --concurrency 2" in text
    assert str(tmp_path.parent) not in text
    assert "| schedule |" in text and "| metadata |" in text and "| requests queued |" in text
    assert "| 2 clients | TTFT ms |" in text and "| p50 | p90 | p95 | p99 | max |" in text
    assert point["ttft_ms"]["p90"] <= point["ttft_ms"]["p95"] <= point["ttft_ms"]["p99"]


def test_token_counts_are_the_servers_own(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--base-url", server.url, "--output-len", "7", "7", "--input-len", "40", "40", "--endpoint", "completions")
    code, found = bench(capsys, *SMALL, *flags)
    assert code == 0
    (point,) = found["points"]
    assert point["output_tokens"] == 8 * 7
    assert found["server"] == "given"
    assert point["server"] is None


def test_one_run_measures_a_closed_and_an_open_loop(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = bench(capsys, "--base-url", f"{server.url}/v1", *SMALL, "--rate", "200", "--output-len", "3", "3")
    assert code == 0
    assert [(point["load"], point["mode"]) for point in found["points"]] == [
        ("2 clients", "closed"),
        ("200/s", "poisson"),
    ]
    assert [point["output_tokens"] for point in found["points"]] == [24, 24]


def test_multi_turn_chats_complete(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--workload", "multi-turn", "--turns", "3", "--input-len", "8", "8", "--output-len", "4", "4")
    code, found = bench(capsys, "--base-url", server.url, *SMALL, *flags)
    assert code == 0
    assert found["points"][0]["output_tokens"] == 8 * 4


MOONCAKE = [
    {"timestamp": 40 * i, "input_length": size, "output_length": 5, "hash_ids": [0, *range(9 * i + 1, 9 * i + blocks)]}
    for i, (size, blocks) in enumerate([(600, 2), (5000, 10), (700, 2), (513, 2)])
]
QWEN = [
    {
        "chat_id": i,
        "parent_chat_id": -1,
        "timestamp": 0.04 * i,
        "input_length": size,
        "output_length": 5,
        "type": "text",
        "turn": 1,
        "hash_ids": [*range(4), *range(1000 * i + 4, 1000 * i - (-size // 16))],
    }
    for i, size in enumerate((80, 5000, 100, 90))
]
AZURE = ["TIMESTAMP,ContextTokens,GeneratedTokens"] + [
    f"2023-11-16 18:15:46.{4 * i:02}00000,{size},5" for i, size in enumerate((60, 5000, 70, 80))
]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("moon.jsonl", "\n".join(map(json.dumps, MOONCAKE))),
        ("qwen.jsonl", "\n".join(map(json.dumps, QWEN))),
        ("azure.csv", "\n".join(AZURE)),
    ],
    ids=["mooncake", "qwen", "azure"],
)
def test_a_trace_file_is_replayed_at_its_times(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str
) -> None:
    """The last of four arrives after 0.12 s, 0.24 s at half the speed; the second is longer than the context."""
    (tmp_path / name).write_text(text)
    flags = ("--trace", str(tmp_path / name), "--time-scale", "0.5", "--warmup-requests", "0")
    out = tmp_path / "report"
    written = ("--out", str(out)) if name == "azure.csv" else ()
    code = cli.main(["bench", "serve", "--base-url", server.url, *flags, *written])
    said = capsys.readouterr()
    (point,) = json.loads(said.out.splitlines()[-1])["points"]
    assert code == 0 and (point["load"], point["succeeded"], point["output_tokens"]) == ("trace", 3, 15)
    assert point["left_out"] == {"prompts over the context of 4096": 1}
    assert "trace: 1 prompts over the context of 4096" in said.err
    assert 1 <= point["max_queued"] <= point["max_in_flight"] <= 3 and point["duration_s"] >= 0.24
    if not written:
        assert point["cached_tokens"] >= 2 * 48  # what their first blocks share
        return
    assert json.loads((out / "raw.json").read_text())["runs"][0]["samples"]["due_s"] == [0.0, 0.16, 0.24]
    report = (out / "README.md").read_text()
    assert "prompts over the context" in report and str(tmp_path) not in report


def test_trace_requests_run_in_a_closed_loop_with_concurrency(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "azure.csv").write_text("\n".join(AZURE))
    flags = ("--trace", str(tmp_path / "azure.csv"), "--num-requests", "3", "--concurrency", "2")
    code, found = bench(capsys, "--base-url", server.url, *flags, "--warmup-requests", "0")
    assert code == 0 and (found["points"][0]["mode"], found["points"][0]["succeeded"]) == ("closed", 2)


def test_sharegpt_conversations_are_sent(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}] * 2
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": []}]))
    flags = ("--workload", str(file), "--concurrency", "1", "--num-requests", "4", "--warmup-requests", "0")
    code, found = bench(capsys, "--base-url", server.url, *flags)
    (point,) = found["points"]
    assert code == 0 and (point["succeeded"], point["output_tokens"]) == (4, 4 * 2)
    assert found["workload"] == "sharegpt.json"
    assert point["left_out"] == {"conversations without a question and an answer": 1}


@pytest.fixture
def python_server() -> Iterator[ServerProcess]:
    """The gateway's requests are counted in maxima only when somebody looks."""
    with ServerProcess(Launch(flags=(*ECHO, "--frontend", "python"))) as running:
        yield running


def test_report_has_percentiles_and_maxima_of_the_server(
    python_server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    server = python_server
    flags = ("--concurrency", "5", "--num-requests", "10", "--warmup-requests", "0", "--output-len", "400", "400")
    _, found = bench(capsys, "--base-url", server.url, *flags)
    said = found["of_itself"]
    assert said["requests_in_flight_most"] >= 2 and list(said["schedule_us"]) == list(SUMMARY)
    assert 0 < said["metadata_us"]["p95"] <= said["schedule_us"]["max"]
    stats: dict[str, Any] = {}

    def is_settled() -> bool:
        """No request is left, and no engine's figures are on their way."""
        before = stats.copy()
        stats.update(httpx.get(f"{server.url}/stats").json())
        return stats["http"]["requests_in_flight"]["now"] == 0 and before.get("engine") == stats["engine"]

    until(is_settled, "it does not rest")
    most = stats["http"]["requests_in_flight"]
    assert 2 <= most["recent"] <= most["most"]
    assert stats["http"]["requests_queued"]["most"] >= 1
    schedule, metadata = (stats["engine"]["meters"][name] for name in ("schedule", "metadata"))
    assert 0 < schedule["p50_s"] <= schedule["p90_s"] <= schedule["p95_s"] <= schedule["p99_s"] <= schedule["longest_s"]
    assert 0 < metadata["p50_s"] < schedule["p50_s"] and metadata["count"] == schedule["count"]
    assert metadata["total_s"] < schedule["total_s"] and "spread" not in schedule
    text = httpx.get(f"{server.url}/metrics").text
    assert f'minisgl:schedule_seconds_bucket{{le="+Inf"}} {schedule["count"]:.1f}' in text
    assert "minisgl:metadata_seconds_sum" in text and "minisgl:requests_queued_most" in text


def test_duration_replaces_the_number_of_requests(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--duration", "0.3", "--output-len", "2", "2", "--input-len", "10", "10")
    code, found = bench(capsys, "--base-url", server.url, *SMALL, *flags)
    assert code == 0
    assert found["points"][0]["succeeded"] == found["points"][0]["requests"] > 0


def test_an_unreachable_server_is_exit_code_2_with_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as silent:  # it has the port, and does not listen
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        assert cli.main(["bench", "serve", "--base-url", f"http://127.0.0.1:{port}"]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_a_dying_server_gives_failures_without_latencies(capsys: pytest.CaptureFixture[str]) -> None:
    def script(exchange: Exchange) -> bool:
        """Answers the two probes, breaks every stream, and has nothing else."""
        if not exchange.request:
            exchange.send(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            return True
        body = json.loads(exchange.request)
        if body.get("stream"):
            exchange.send(HEAD, b'5c\r\ndata: {"choices":[{"delta":{"content":"x"}}]}\n\n')
            exchange.reset()
            return False
        tokens = len(body["messages"][0]["content"].split())
        answer = json.dumps({"choices": [], "usage": {"prompt_tokens": tokens}}).encode()
        exchange.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer), answer
        )
        return True

    with stub(script) as server:
        url = server.url.removesuffix("/v1/chat/completions")
        code, found = bench(capsys, "--base-url", url, "--model", "m", *SMALL)
    assert code == 1
    (point,) = found["points"]
    assert (point["succeeded"], point["failed"], point["failures"]) == (0, 8, {"broken": 8})
    assert point["ttft_ms"]["p50"] is None
    assert point["output_tok_s"] == 0
