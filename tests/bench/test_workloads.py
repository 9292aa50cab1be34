"""Workloads: the same by seed, as long as they say, alike where they should be."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl import envs
from minisgl.bench.render import Line, Renderer, words
from minisgl.bench.traces import BLOCK
from minisgl.bench.workloads import (
    CHAT_BUCKETS,
    WORKLOADS,
    WorkloadSettings,
    fitted,
    make_workload,
    poisson_arrivals,
)
from minisgl.config import ConfigError
from tests.helpers.bench import QWEN, bodies, lines, prompt_of

MADE_UP = ("random", "shared-prefix", "multi-turn", "chat", *(f"chat-{bucket}" for bucket in CHAT_BUCKETS))

FROM_DATA = tuple(name for name in WORKLOADS if name not in MADE_UP)


@pytest.fixture(params=WORKLOADS)
def name(request: pytest.FixtureRequest) -> str:
    if request.param in FROM_DATA and envs.data_dir() is None:
        pytest.skip("MINISGL_DATA is not set")
    return str(request.param)


def test_the_same_seed_gives_the_same_workload(name: str) -> None:
    settings = WorkloadSettings(num_requests=20, seed=3)
    assert make_workload(name, settings) == make_workload(name, settings)
    assert bodies(name, settings) == bodies(name, settings)
    assert sum(make_workload(name, settings).chains) == len(make_workload(name, settings).requests)


def test_another_run_has_the_same_lengths_and_no_prompt_of_the_first(name: str) -> None:
    settings = WorkloadSettings(num_requests=20)
    first, second = (make_workload(name, replace(settings, run=run)) for run in (0, 1))
    assert [one.input_len for one in first.requests] == [one.input_len for one in second.requests]
    assert [one.output_len for one in first.requests] == [one.output_len for one in second.requests]
    if name not in ("mt-bench", "gsm8k"):  # whose text is given
        prompts = [{prompt_of(body) for body in bodies(name, replace(settings, run=run))} for run in (0, 1)]
        assert not prompts[0] & prompts[1]


@pytest.mark.parametrize("name", MADE_UP)
def test_another_seed_gives_another_workload(name: str) -> None:
    a, b = (bodies(name, WorkloadSettings(num_requests=20, seed=seed)) for seed in (0, 1))
    assert a != b


@pytest.mark.parametrize("name", MADE_UP)
def test_prompts_are_as_long_as_they_say(name: str) -> None:
    settings = WorkloadSettings(num_requests=12)
    for body, one in zip(bodies(name, settings), make_workload(name, settings).requests, strict=True):
        assert sum(len(message["content"].split()) for message in body["messages"]) == one.input_len
        assert body["max_tokens"] == one.output_len


def test_given_lengths_are_used() -> None:
    for made in make_workload(
        "random", WorkloadSettings(num_requests=50, input_len=(7, 9), output_len=(3, 3))
    ).requests:
        assert 7 <= (made.input_len or 0) <= 9
        assert made.output_len == 3


def test_chats_have_their_mean_lengths() -> None:
    made = make_workload("chat", WorkloadSettings(num_requests=20_000))
    assert np.mean([one.input_len for one in made.requests]) == pytest.approx(225, rel=0.05)
    assert np.mean([one.output_len for one in made.requests]) == pytest.approx(200, rel=0.05)
    means = [
        np.mean([one.input_len for one in make_workload(f"chat-{name}", WorkloadSettings(num_requests=2000)).requests])
        for name in CHAT_BUCKETS
    ]
    assert means == sorted(means)


def test_prefixes_are_shared_and_questions_are_not() -> None:
    found = bodies("shared-prefix", WorkloadSettings(num_requests=40, num_prefixes=3, prefix_len=100))
    assert len({body["messages"][0]["content"] for body in found}) == 3
    assert len({body["messages"][1]["content"] for body in found}) == 40


def test_a_turn_carries_the_turns_before() -> None:
    settings = WorkloadSettings(num_requests=10, turns=4)
    made, found = make_workload("multi-turn", settings), bodies("multi-turn", settings)
    assert made.chains == (4, 4, 2)
    for before, after in pairwise(found[:4]):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert len(after["messages"]) == len(before["messages"]) + 2
    assert len(found[4]["messages"]) == 1


def test_a_longer_text_begins_like_a_shorter_one() -> None:
    assert words(("k", 1), 500).startswith(words(("k", 1), 70) + " ")
    assert words(("k", 1), 70) != words(("k", 2), 70)


def test_a_trace_has_its_arrivals_and_its_shared_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 2 * BLOCK, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 3000, "input_length": BLOCK + 100, "output_length": 9, "hash_ids": [7, 9]},
    ]
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "mooncake_conversation.jsonl").write_text(lines(*rows))
    monkeypatch.setenv(envs.DATA, str(tmp_path))
    settings = WorkloadSettings(time_scale=4.0)
    made = make_workload("mooncake-conversation", settings)
    assert made.arrivals == (0.0, 0.5)
    assert [(one.input_len, one.output_len) for one in made.requests] == [(2 * BLOCK, 5), (BLOCK + 100, 9)]
    first, second = (body["messages"][0]["content"].split() for body in bodies("mooncake-conversation", settings))
    assert first[:BLOCK] == second[:BLOCK]
    assert first[BLOCK : BLOCK + 100] != second[BLOCK:]
    limited = make_workload("mooncake-conversation", replace(settings, input_len=(1, 100), output_len=(1, 6)))
    assert [(one.input_len, one.output_len) for one in limited.requests] == [(100, 5), (100, 6)]


def test_a_file_is_a_workload_by_what_is_in_it(tmp_path: Path) -> None:
    """Qwen's blocks have 16 tokens: two prompts share the first 32 words, whatever a word's tokens are."""
    path = tmp_path / "qwen.txt"
    own = {"output_length": 6, "turn": 1}
    rows = [{"timestamp": 10 + 1.5 * i, "input_length": 40 + i, "hash_ids": [1, 2, 3 + i], **own} for i in range(3)]
    path.write_text(lines(*({**QWEN, **row} for row in rows)))
    made = make_workload(str(path), WorkloadSettings(num_requests=2, time_scale=0.5))
    assert made.arrivals == (0.0, 3.0) and [one.input_len for one in made.requests] == [40, 41]
    first, second, _ = (body["messages"][0]["content"].split() for body in bodies(str(path), WorkloadSettings()))
    assert len(first) == 40 and first[:32] == second[:32] and first[32:40] != second[32:40]
    line = Line(overhead=20.0, per_word=1.6)  # small parts are not rounded one by one, and the end gives way
    texts = [json.loads(Renderer("m", "chat", line).body(one))["messages"][0]["content"] for one in made.requests]
    assert [20 + 1.6 * len(text.split()) for text in texts] == pytest.approx([40, 41], abs=0.8)
    assert texts[0].split()[:12] == texts[1].split()[:12]


def test_requests_beyond_the_context_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * i, "input_length": length, "output_length": 50, "hash_ids": [i]}
        for i, length in enumerate((100, 300, 180, 10))
    ]
    path.write_text(lines(*rows))
    made = make_workload(str(path), WorkloadSettings())
    assert fitted(made, None) is made
    found = fitted(made, 200)
    assert [(one.input_len, one.output_len) for one in found.requests] == [(100, 50), (180, 20), (10, 50)]
    assert found.arrivals == (0.0, 2.0, 3.0) and found.chains == (1, 1, 1)
    assert found.left_out == {"prompts over the context of 200": 1, "answers cut to the context of 200": 1}
    with pytest.raises(ConfigError, match="context of 9 tokens"):
        fitted(made, 9)


def test_a_turn_that_does_not_fit_ends_its_chat() -> None:
    made = make_workload("multi-turn", WorkloadSettings(num_requests=8, input_len=(50, 50), output_len=(40, 40)))
    found = fitted(made, 200)  # 50, 140, 230, 320
    assert found.chains == (2, 2) and found.left_out == {"prompts over the context of 200": 4}


def test_missing_data_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(envs.DATA, raising=False)
    for name in FROM_DATA:
        with pytest.raises(ConfigError, match=envs.DATA):
            make_workload(name, WorkloadSettings())


BAD: tuple[dict[str, Any], ...] = (
    {"num_requests": 0},
    {"turns": 0},
    {"num_prefixes": 0},
    {"time_scale": 0.0},
    {"input_len": (0, 1)},
    {"output_len": (5, 4)},
    {"prefix_len": -1},
)


@pytest.mark.parametrize("change", BAD)
def test_settings_that_make_no_sense(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--"):
        make_workload("random", WorkloadSettings(**change))


def test_poisson_arrivals() -> None:
    times = poisson_arrivals(20_000, 50.0, 1)
    assert times == poisson_arrivals(20_000, 50.0, 1)
    assert times != poisson_arrivals(20_000, 50.0, 2)
    assert times[0] == 0.0
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as exponential times have it
