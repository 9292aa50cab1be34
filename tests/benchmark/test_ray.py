"""`benchmark.ray` without Ray: a process is one part, and the report has what was measured, paired by round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark import ray


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (["ray::ServeReplica:minisgl:minisgl", "", ""], "ingress"),
        (["ray::ServeReplica:minisgl:minisgl.handle_request_streaming"], "ingress"),
        (["ray::ServeReplica:minisgl:echo.handle_request_streaming"], "replica"),
        (["ray::ProxyActor"], "proxy"),
        (["ray::ServeController.listen_for_change"], "controller"),
        (["python", "-m", "minisgl", "serve", "--host", "127.0.0.1", "--managed"], "server"),
        (["python", "-m", "minisgl.runner.process", "7"], "engine"),
        (["gcs_server", "--log_dir=logs"], "ray"),
        ([], "ray"),
    ],
)
def test_a_process_is_one_part(command: list[str], part: str) -> None:
    assert ray.part_of(command) == part


def sample(side: str, turn: int, streams: int, tokens: int) -> dict[str, Any]:
    slower = 2.0 * (1 + turn) if side == ray.SERVE else 1.0 * (1 + turn)
    found = {
        "requests": 100,
        "requests_s": 90.0 / slower,
        "output_tokens": 100 * tokens,
        "output_tok_s": 9000.0 / slower,
        **{f"{kind}_ms": {"p50": slower, "p99": 2 * slower} for kind in ("ttft", "itl")},
    }
    used = {"server": 0.01 * tokens} | ({"proxy": 0.1 + 0.002 * tokens} if side == ray.SERVE else {})
    return {"side": side, "round": turn, "streams": streams, "tokens": tokens, **ray.sample_of(found, used)}


def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [
        sample(side, turn, streams, tokens)
        for turn in range(2)
        for streams in (1, 8)
        for tokens in (1, ray.OUTPUT)
        for side in ray.SIDES
    ]
    monkeypatch.setattr(ray, "measure", lambda rounds, streams: samples)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.60")
    assert ray.main(["--out", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text()
    assert "| 8 | ttft_p50_ms | 3.00 | 1.50 | 1.50 | +100.0 % [+100.0, +100.0] |" in text
    assert "| 8 | Ray Serve | proxy | 1,020 | 20.0 |" in text
    assert len(json.loads((tmp_path / "raw.json").read_text())["samples"]) == len(samples)
