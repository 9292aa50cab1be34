"""The benchmark of guessed tokens: both variants do the same work, and the table says what was measured."""

from __future__ import annotations

import dataclasses

import pytest

from benchmark import speculative
from benchmark.speculative import GUESSING, PLAIN, Kind, measure, rows
from minisgl.llm import LLM

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
