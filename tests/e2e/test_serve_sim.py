"""A real server on the simulated engine says that it is one, and refuses what it cannot give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from minisgl.cli import bench
from tests.helpers.e2e import ServerProcess, serving, slow_device


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(*slow_device(tmp_path_factory.mktemp("profile"), 2)) as running:
        yield running


def test_every_report_of_a_simulated_server_names_the_profile(server: ServerProcess, http: httpx.Client) -> None:
    assert http.get("/health").json()["simulated"] == "slow-device"
    assert http.get("/v1/models").json()["data"][0]["simulated"] == "slow-device"
    assert sum("simulated" in line and "slow-device" in line for line in server.lines) >= 2
    assert 'device="simulated slow-device"' in http.get("/metrics").text


def test_a_chat_has_the_length_that_was_asked_for(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40, "seed": 5}
    first, second = (http.post("/v1/chat/completions", json=body).json() for _ in range(2))
    text = first["choices"][0]["message"]["content"]
    assert first["usage"]["completion_tokens"] == 40 and first["choices"][0]["finish_reason"] == "length"
    assert 20 < len(text.split()) <= 40 and text == second["choices"][0]["message"]["content"]


def test_benchmarks_name_the_profile(server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ("--input-len", "5", "5", "--output-len", "3", "3", "--concurrency", "1", "--num-requests", "2")
    out = tmp_path / "report"
    assert bench.main(["serve", "--base-url", server.url, *lengths, "--warmup-requests", "0", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["simulated"] == "slow-device"
    assert "slow-device" in (out / "README.md").read_text()


def test_log_probabilities_of_a_simulated_engine_are_refused(http: httpx.Client) -> None:
    for more in ({"logprobs": 1}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 0}):
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, **more})
        assert answer.status_code == 400 and "simulated" in answer.json()["error"]["message"], answer.text
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "simulated" in answer.json()["error"]["message"]
