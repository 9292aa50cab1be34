"""Scenes of the scheduler: what is asked for is asked for, by whom it should, and the page shows each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.helpers.e2e import ServerProcess, serving
from tools import scheduler_scenes
from tools.scheduler_scenes import ECHO, SCENES, Ask, Scene, play, words

PAGE = Path(__file__).parents[2] / "docs" / "scheduler-explained.md"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving(*ECHO, "--num-pages", "64", "--max-seq-len", "512") as running:
        yield running


def test_each_scene_is_on_the_page_and_each_has_a_name() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"(img/{scene.name}.png)" in text for scene in SCENES)
    assert len({scene.name for scene in SCENES}) == len(SCENES)


def test_words_are_as_long_as_asked_for_and_have_nothing_in_common() -> None:
    assert [len(words(seed, 100)) for seed in range(5)] == [100] * 5
    assert len({words(seed, 16) for seed in range(5)}) == 5


def test_a_later_round_finds_what_an_earlier_one_left(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_scenes, "STEP_MS", 0)
    ask = Ask(words(3, 100), 4)
    play(server.url, Scene("two rounds", (), ((ask,), (ask, replace(ask, max_tokens=5))), apart=True))
    metrics = httpx.get(f"{server.url}/metrics").text
    (hits,) = (line for line in metrics.splitlines() if line.startswith("minisgl:cached_tokens_total"))
    assert float(hits.split()[-1]) == 2 * 96


def test_a_request_that_is_refused_is_an_error(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_scenes, "STEP_MS", 0)
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        play(server.url, Scene("too long", (), ((Ask(words(1, 900), 4),),)))
