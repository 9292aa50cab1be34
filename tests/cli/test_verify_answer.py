"""Where an answer leaves what its model computes, and by how much: the figures are transformers'."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams, receipt
from minisgl.cli.verify_answer import Answer, differences
from minisgl.llm import Completion, Encoded
from minisgl.receipt import LogprobDigest, Model, Receipt
from minisgl.tokenizer.echo import echo_json
from tests.helpers.models import reference_logits, save, tiny_model

pytestmark = pytest.mark.any_cpu

IDS = list(range(40, 70))
PROMPT = Encoded(np.array(IDS, np.int32), IDS)
SAMPLING = SamplingParams(
    temperature=0,
    max_tokens=12,
    ignore_eos=True,
    frequency_penalty=0.5,
    allowed_token_ids=tuple(range(33, 127)),
    seed=1,
    logprobs=0,
)
WITHIN = 4e-3  # the engine rounds keys and values to float16
NUMBER = re.compile(r"log probability (-?[0-9.e-]+)\)")


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny_model("qwen3-tied", vocab_size=258)


@pytest.fixture(scope="module")
def llm(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = save(reference, tmp_path_factory.mktemp("checkpoint"))
    (folder / "tokenizer.json").write_text(echo_json(), encoding="utf-8")
    small = {"page_size": 8, "num_pages": 60, "max_seq_len": 60, "num_threads": 1, "dtype": "float32"}
    with LLM(str(folder), engine="cpu", log_level="error", **small) as found:  # type: ignore[arg-type]
        yield found


@pytest.fixture(scope="module")
def answer(llm: LLM) -> Completion:
    (output,) = llm.generate([PROMPT], SAMPLING, progress=False)
    return output.outputs[0]


def receipt_of(llm: LLM, answer: Completion, ids: list[int] | None = None, **changes: Any) -> Receipt:
    digest = LogprobDigest()
    digest.add(answer.logprobs)
    numerics = receipt.numerics(llm.config, llm.engine_info.name, llm.engine_info.details)
    found = receipt.make(
        Model("a", None, "b", "c"),
        numerics,
        SAMPLING,
        IDS,
        answer.token_ids if ids is None else ids,
        str(answer.finish_reason),
        digest.shown(),
    )
    return msgspec.structs.replace(found, **changes)


def logprobs_of(reference: Any, prefix: list[int], tokens: list[int]) -> list[float]:
    logits = reference_logits(reference, [*IDS, *prefix])[-1]
    return torch.log_softmax(logits, -1)[tokens].tolist()  # type: ignore[no-any-return]


def test_equal_answers_have_no_difference(llm: LLM, answer: Completion) -> None:
    for said in (Answer(), Answer(ids=answer.token_ids), Answer(text=answer.text), Answer(logprobs=answer.logprobs)):
        assert differences(llm, receipt_of(llm, answer), PROMPT, said=said) == []


@pytest.mark.parametrize("at", [0, 5, 11])
def test_wrong_token_is_shown_with_its_log_probability(llm: LLM, answer: Completion, reference: Any, at: int) -> None:
    """Penalties and masks choose, and change no log probability."""
    ids = [*answer.token_ids]
    ids[at] = ids[at] ^ 1
    for found in (receipt_of(llm, answer), receipt_of(llm, answer, ids)):
        *before, line = differences(llm, found, PROMPT, said=Answer(ids=ids))
        assert line.startswith(f"the answer from token {at} on: {ids[at]} ")
        assert f"computed {answer.token_ids[at]} " in line
        assert len(before) == 1  # the answer is not the receipt's, or the receipt not the model's
        theirs, ours = map(float, NUMBER.findall(line))
        expected = logprobs_of(reference, ids[:at], [ids[at], answer.token_ids[at]])
        assert [theirs, ours] == pytest.approx(expected, abs=WITHIN)
        assert float(line.split(": ")[-1].split()[0]) == pytest.approx(abs(theirs - ours), rel=1e-4, abs=1e-5)


def test_answer_of_other_length_or_tokens_differs(llm: LLM, answer: Completion) -> None:
    ids, found = answer.token_ids, receipt_of(llm, answer)
    short = differences(llm, found, PROMPT, said=Answer(ids=ids[:4]))[-1]
    assert short.startswith(f"the answer from token 4 on: its end, computed {ids[4]} ") and "apart" not in short
    longer = differences(llm, found, PROMPT, said=Answer(ids=[*ids, 5]))[-1]
    assert re.match(r"the answer from token 12 on: 5 .* \(log probability .*\), computed its end$", longer)
    foreign = differences(llm, found, PROMPT, said=Answer(ids=[100_000]))[-1]
    assert len(NUMBER.findall(foreign)) == 1, "no log probability of what is no token"


def test_a_text_is_compared_by_characters_and_tokens(llm: LLM, answer: Completion, reference: Any) -> None:
    ids, text = answer.token_ids, answer.text
    assert len(text) == len(ids), "of this tokenizer a token is a character"
    (line,) = differences(llm, receipt_of(llm, answer), PROMPT, said=Answer(text=text[:6] + "#" + text[7:]))
    assert "from character 6 on: '#" in line and f"; token 6: {ord('#')} '#'" in line
    expected = logprobs_of(reference, ids[:6], [ord("#"), ids[6]])
    assert list(map(float, NUMBER.findall(line))) == pytest.approx(expected, abs=WITHIN)


def test_other_log_probabilities_are_reported_if_known(llm: LLM, answer: Completion) -> None:
    other = np.array(answer.logprobs, np.float32)
    other[3] = np.nextafter(other[3], np.float32(0))
    other[8] -= np.float32(0.25)
    digest = LogprobDigest()
    digest.add(other.tolist())
    found = receipt_of(llm, answer, logprobs=digest.shown())
    (known,) = differences(llm, found, PROMPT, said=Answer(logprobs=other.tolist()))
    assert f"from token 3 on: {other[3]!s}, computed {np.float32(answer.logprobs[3])!s}" in known
    assert known.endswith("at most 0.25 apart, at token 8")
    (unknown,) = differences(llm, found, PROMPT)
    assert "the same tokens, with other probabilities" in unknown and "a receipt has their digest alone" in unknown
    (foreign,) = differences(llm, found, PROMPT, said=Answer(logprobs=answer.logprobs))
    assert "are not those of its receipt" in foreign


def test_an_answer_without_ids_has_no_place(llm: LLM, answer: Completion) -> None:
    (line,) = differences(llm, receipt_of(llm, answer, [1, 2]), PROMPT)
    assert line.startswith("another answer: 12 tokens, in the receipt 2") and "--answer" in line


def test_known_parts_of_a_choice_are_read() -> None:
    chat = {"token_ids": [1, 2], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1}]}}
    assert Answer.of_choice(chat) == Answer([1, 2], None, [-0.5, -1.0])
    assert Answer.of_choice({"logprobs": chat["logprobs"]["content"]}) == Answer(None, None, [-0.5, -1.0])  # type: ignore
    assert Answer.of_choice({"logprobs": {"token_logprobs": [-0.5]}}) == Answer(None, None, [-0.5])
    for nothing in ({}, {"logprobs": None, "token_ids": "a"}, {"logprobs": {"token_logprobs": [None, -1]}}):
        assert Answer.of_choice(nothing) == Answer()
    assert Answer([1]).answered(b"a text") == Answer(text="a text") and Answer(text="a").answered(b"[3]") == Answer([3])
    assert Answer().answered(json.dumps({"a": 1}).encode()).text == '{"a": 1}'
