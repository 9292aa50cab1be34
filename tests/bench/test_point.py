"""One point of `minisgl bench serve` as flat figures: what it measures, and what is no point."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.bench import point
from minisgl.bench.point import measure_point, point_from
from minisgl.bench.server_process import Launch, ServerProcess
from minisgl.config import ConfigError

SMALL = ["--concurrency", "2", "--num-requests", "4", "--input-len", "8", "8", "--output-len", "6", "6"]


def test_a_real_server() -> None:
    with ServerProcess(Launch(("--engine", "sim"))) as server:
        found = measure_point(server, point_from([*SMALL, "--slo-ttft-ms", "600000"]))
    assert found["output_tok_s"] > 0 and found["goodput_requests_s"] > 0
    assert 0 < found["ttft_p50_ms"] <= found["ttft_p99_ms"] <= found["e2e_p99_ms"]
    assert found["http_rss_mib"] > 1 and found["scheduler_us_per_step"] > 0
    assert 0 < found["rows_per_step"] <= 2
    assert 24 / 2 <= found["steps"] <= 24 + 4 * 2  # 24 tokens, at most two at once; no steps of the warm-up


def test_a_failed_request_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = point.figures

    def one_failed(*args: Any) -> dict[str, Any]:
        return {**honest(*args), "failed": 1, "failures": {"status 500": 1}}

    monkeypatch.setattr(point, "figures", one_failed)
    with (
        ServerProcess(Launch(("--engine", "echo"))) as server,
        pytest.raises(ConfigError, match=r"1 of 4 .*status 500"),
    ):
        measure_point(server, point_from(SMALL))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--concurrency", "1", "2"], "one point"),
        (["--concurrency", "1", "--rate", "2"], "one point"),
        (["--repeat", "2"], "one point"),
        (["--base-url", "http://127.0.0.1:1"], "base_url"),
        (["--out", "x"], "out"),
        (["--num-requests", "-1"], "num-requests"),
        (["--rate", "-1"], "--rate"),
    ],
)
def test_invalid_loads_are_rejected(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        point_from(flags)


def test_a_load_is_named_by_its_flags() -> None:
    assert point_from(SMALL).describe().startswith("minisgl bench serve --concurrency 2 --num-requests 4")
    assert point_from([]).settings.concurrency == (64,)
