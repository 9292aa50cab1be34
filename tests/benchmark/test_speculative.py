"""The benchmark of guessed tokens: both variants do the same work, and the table says what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from benchmark import speculative
from benchmark.speculative import GUESSING, PLAIN, Kind, measure, rows, staged
from minisgl.llm import LLM
from minisgl.runner.drafting import Asked
from minisgl.step import Draft

PROMPTS = [[97 + i, 98, 99, 100] for i in range(3)]


def test_a_round_of_each_kind() -> None:
    """The echo engine's texts do not repeat; one that is asked again comes out of the cache."""
    settings = {"engine": "echo", "num_pages": 200, "page_size": 4, "log_level": "error"}
    llms = {PLAIN: LLM("none", **settings), GUESSING: LLM("none", speculative="ngram:4", **settings)}
    found, turns = [], []
    for kind in (Kind("once", PROMPTS), Kind("again", PROMPTS, again=True)):
        found += list(measure(llms, kind, 2, 2, 40, lambda: turns.append(1)))
    for llm in llms.values():
        llm.close()
    assert [one["prompts"] for one in found] == [2, 1, 2, 1] and len(turns) == 16
    assert all(len(times) == 2 for one in found for of in one["seconds"].values() for times in of.values())
    once, again = rows(found)
    assert once[0] == "once" and again[0] == "again"
    accepted = [one["accepted"] for one in found]
    assert sum(accepted[2:]) > 60 > sum(accepted[:2])


def test_answers_that_differ_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = speculative.answer
    calls: list[int] = []

    def answer(*args: object) -> speculative.Run:
        calls.append(1)
        run = real(*args)  # type: ignore[arg-type]
        return dataclasses.replace(run, tokens=[[1]]) if len(calls) == 2 else run

    monkeypatch.setattr(speculative, "answer", answer)
    with (
        LLM("none", engine="echo", num_pages=64, log_level="error") as llm,
        pytest.raises(AssertionError, match="differ"),
    ):
        list(measure({PLAIN: llm, GUESSING: llm}, Kind("once", PROMPTS), 1, 1, 8, lambda: None))


class Asleep:
    """A small model that has nothing to say but how much it was asked for."""

    def guess(self, asked: Sequence[Asked]) -> list[Draft]:
        return [Draft(one.req_id, len(one.tokens), (0,) * one.count) for one in asked]

    def close(self) -> None:
        pass


def test_a_staged_agreement_is_the_share_that_was_asked_for() -> None:
    settings = {"engine": "echo", "num_pages": 200, "page_size": 4, "log_level": "error"}
    llms = {PLAIN: LLM("none", **settings), GUESSING: LLM("none", speculative="ngram:4", **settings)}
    llms[GUESSING]._loop.guesses = Asleep()
    always, never = (staged(llms, share, PROMPTS, 2, 1, 60) for share in (1.0, 0.0))
    for llm in llms.values():
        llm.close()
    assert [one["prompts"] for one in always] == [2, 1]
    assert sum(one["accepted"] for one in always) == sum(one["drafted"] for one in always) > 100
    assert sum(one["accepted"] for one in never) == 0 < sum(one["drafted"] for one in never) < 60
