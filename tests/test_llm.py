"""The offline API: what it makes of the output processor's text, and what a call leaves behind that is cut short."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from minisgl.llm import LLM, RequestOutput
from minisgl.sampling_params import SamplingParams

PROMPTS = ["first", "second", "third"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("none", engine="echo", num_pages=64, page_size=4, log_level="error") as found:
        yield found


def test_no_minimum_exceeds_the_limit(llm: LLM) -> None:
    """As in the server: the context limits both."""
    [found] = llm.generate([[1, 2, 3]], SamplingParams(min_tokens=10_000, stop=("x",)), progress=False)
    assert found.outputs[0].finish_reason in ("stop", "length") and found.outputs[0].error is None
    assert found.outputs[0].finish_reason == "stop" or found.prompt_token_ids == [1, 2, 3]


def test_texts_come_in_parts_that_make_the_whole(llm: LLM) -> None:
    parts: dict[int, str] = {}

    def on_text(output: RequestOutput, text: str) -> None:
        parts[id(output)] = parts.get(id(output), "") + text
        assert output.text.startswith(parts[id(output)])

    found = llm.generate(PROMPTS, SamplingParams(max_tokens=20), progress=False, on_text=on_text)
    assert [output.prompt for output in found] == PROMPTS
    assert [parts.get(id(output), "") for output in found] == [output.text for output in found]
    assert all(len(output.token_ids) <= 20 and output.outputs[0].finish_reason for output in found)


def test_choices_have_seeds_of_their_own(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, n=3, seed=7, temperature=1.0)
    [found], [again] = (llm.generate("many", params, progress=False) for _ in range(2))
    assert [one.index for one in found.outputs] == [0, 1, 2]
    assert [one.token_ids for one in found.outputs] == [one.token_ids for one in again.outputs]


def test_a_stop_string_ends_an_answer_before_it(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
    [whole] = llm.generate("stop", params, progress=False)
    stop = whole.text[2:4]
    [found] = llm.generate("stop", msgspec.structs.replace(params, stop=(stop,)), progress=False)
    assert found.text == whole.text[: whole.text.index(stop)]
    assert found.outputs[0].finish_reason == "stop" and len(found.token_ids) < 12


def test_a_call_that_is_cut_short_leaves_an_empty_engine(llm: LLM) -> None:
    class CutShort(Exception):
        pass

    def on_text(output: RequestOutput, text: str) -> None:
        raise CutShort

    with pytest.raises(CutShort):
        llm.generate(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True), progress=False, on_text=on_text)
    heard: list[RequestOutput] = []
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    found = llm.generate(PROMPTS, params, progress=False, on_text=lambda output, _: heard.append(output))
    assert len(found) == 3 and {*map(id, heard)} == {*map(id, found)}, "nobody hears of the requests before"


def test_automatic_ranks_are_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM("none", engine="echo", num_pages=64, tp="auto") as llm:
        assert llm.generate("hello", SamplingParams(max_tokens=1), progress=False)[0].token_ids
    assert capsys.readouterr().err.count("--tp auto: 1: --engine echo computes in one process") == 1
