"""The offline API gives text while it comes."""

from __future__ import annotations

import pytest

from minisgl import LLM, SamplingParams
from minisgl.llm import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=0)


def test_text_is_told_while_it_comes() -> None:
    pieces: list[tuple[str | None, str]] = []
    with LLM("none", engine="echo") as llm:

        def take(output: RequestOutput, piece: str) -> None:
            assert output.text.startswith("".join(one for of, one in pieces if of == output.prompt) + piece)
            pieces.append((output.prompt, piece))

        outputs = llm.generate(["one", "two"], GREEDY, progress=False, on_text=take)
        assert len(pieces) > 2
        for output in outputs:
            assert "".join(piece for of, piece in pieces if of == output.prompt) == output.text
        pieces.clear()
        llm.generate("three", GREEDY, progress=False)
        assert pieces == []


def test_who_takes_the_text_may_fail() -> None:
    with LLM("none", engine="echo") as llm:

        def fail(output: RequestOutput, piece: str) -> None:
            raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            llm.generate(["one", "two"], GREEDY, progress=False, on_text=fail)
        assert len(llm.generate("one", GREEDY, progress=False)[0].token_ids) == 4
