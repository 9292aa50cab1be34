"""Offsets of completions are places in the text that is returned, whatever the tokens are and however they come."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings

from minisgl.frontend.output_processor import Logprob
from minisgl.server.core.formatter import CompletionLogprobs, echoed_prompt, json_line, token_text
from minisgl.tokenizer import Tokenizer
from tests.helpers.text import TEXTS, spells_byte, streamed, tokenizer_named
from tests.tokenizer.test_tokenizer_decode import ALL, cuts, expected, ids_of


def scored(ids: list[int]) -> list[Logprob]:
    return [Logprob(one, -1.0, ()) for one in ids]


def offsets_of(tokenizer: Tokenizer, prompt: list[int], answer: list[int], cuts: list[int]) -> tuple[str, list[int]]:
    """The whole text and the offsets, in chunks that end at `cuts`; the prompt comes with the first."""
    echoed = echoed_prompt(tokenizer, None, prompt)
    logprobs = CompletionLogprobs(tokenizer)
    edges = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    offsets, tokens = list[int](), list[str]()
    for i, (start, end) in enumerate(pairwise(edges)):
        first = (echoed, scored(prompt)) if i == 0 else (None, ())
        chunk = logprobs.chunk(scored(answer[start:end]), *first)
        offsets += chunk["text_offset"]
        tokens += chunk["tokens"]
    assert tokens == [token_text(tokenizer, one) for one in (*prompt, *answer)]
    return echoed.text + streamed(tokenizer, answer), offsets


@pytest.mark.parametrize("name", ALL)
def test_offsets_index_the_text(name: str) -> None:
    tokenizer = tokenizer_named(name)

    @settings(max_examples=200, deadline=None)
    @given(ids_of(name), ids_of(name), cuts)
    def check(prompt: list[int], answer: list[int], cuts: list[int]) -> None:
        text, offsets = offsets_of(tokenizer, prompt, answer, cuts)
        assert text == expected(name, prompt, False) + expected(name, answer, True)
        assert len(offsets) == len(prompt) + len(answer) and offsets == sorted(offsets)
        assert not offsets or (offsets[0] == 0 and offsets[-1] <= len(text))
        for i, (token_id, offset) in enumerate(zip((*prompt, *answer), offsets, strict=True)):
            token = token_text(tokenizer, token_id)
            is_shown = i < len(prompt) or streamed(tokenizer, [token_id])
            if is_shown and not token.startswith("bytes:") and not spells_byte(name, token_id):
                assert text.startswith(token, offset), (token, text[offset:])

    check()


@pytest.mark.parametrize("name", ["echo", "qwen3"])
def test_a_part_of_a_character_has_the_place_of_its_character(name: str) -> None:
    """Against the definition: how many characters the bytes are up to and with the first of the token."""
    tokenizer = tokenizer_named(name)

    @settings(max_examples=300, deadline=None)
    @given(ids_of(name))
    def check(ids: list[int]) -> None:
        offsets = echoed_prompt(tokenizer, None, ids).offsets
        data = b""
        for token_id, offset in zip(ids, offsets, strict=True):
            if own := tokenizer.token_bytes(token_id):
                assert offset == len((data + own[:1]).decode(errors="replace")) - 1
            data += own

    check()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [False, True])
def test_a_text_is_shown_as_it_was_given(name: str, text: str, special: bool) -> None:
    tokenizer = tokenizer_named(name)
    ids = tokenizer.encode(text, add_special_tokens=special).tolist()
    found = echoed_prompt(tokenizer, text, ids)
    if name != "qwen3" and "▁" not in text:  # NFC and sentencepiece's spaces: shown as the model reads them
        assert found.text == text
    assert echoed_prompt(tokenizer, text, ids, with_offsets=False).text == found.text
    assert list(found.offsets) == sorted(found.offsets) and len(found.offsets) == len(ids)
    assert all(0 <= offset <= len(found.text) for offset in found.offsets)
    for token_id, offset in list(zip(ids, found.offsets, strict=True))[2:]:
        token = token_text(tokenizer, token_id)
        if not token.startswith("bytes:") and not spells_byte(name, token_id):
            assert found.text.startswith(token, offset)


def test_a_line_of_json_is_one_line_to_every_client() -> None:
    """Python's `splitlines` ends lines at more characters than JSON does."""
    line = json_line({"text": "a\u2028b\u2029c"}).decode()
    assert len(line.splitlines()) == 1 and json.loads(line) == {"text": "a\u2028b\u2029c"}
