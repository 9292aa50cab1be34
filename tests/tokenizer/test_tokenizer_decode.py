"""Incremental detokenization against whole-text decoding, on two real tokenizers and the echo tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.tokenizer.echo import char_to_byte
from tests.helpers.text import (
    REAL,
    TEXTS,
    decode_byte_fallback,
    first_stop,
    library,
    special_ids,
    streamed,
    tokenizer_named,
)

if TYPE_CHECKING:
    from minisgl._rust import TextStream

ALL = ("echo", *REAL)
PADDED = 2**18  # beyond every vocabulary here: models pad their embeddings
cuts = st.lists(st.integers(0, 60), max_size=8)


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Ids that make trouble: bytes and partial characters, special tokens, any token, ids beyond the vocabulary."""
    if name == "echo":
        return st.lists(st.integers(-1, 300), max_size=60)
    vocab = library(name).get_vocab(with_added_tokens=True)
    special = special_ids(name)
    short = sorted(i for token, i in vocab.items() if len(token) == 1 or token.startswith("<0x"))
    sources = [st.sampled_from(short), st.sampled_from(short), st.sampled_from(special), st.sampled_from([-1, PADDED])]
    return st.lists(st.one_of(*sources, st.integers(0, len(vocab) - 1)), max_size=60)


def expected(name: str, ids: Sequence[int], skip: bool) -> str:
    tokenizer = tokenizer_named(name)
    if name != "mistral-v3":
        return tokenizer.decode(ids, skip_special_tokens=skip)
    left = [i for i in ids if i >= 0 and not (skip and i in special_ids(name))]
    return decode_byte_fallback([library(name).id_to_token(i) for i in left])


@pytest.mark.parametrize("name", ALL)
def test_any_ids_in_any_chunks_give_the_text_of_the_whole(name: str) -> None:
    @settings(max_examples=300, deadline=None)
    @given(ids_of(name), cuts, st.booleans())
    def check(ids: list[int], cuts: list[int], skip: bool) -> None:
        assert streamed(tokenizer_named(name), ids, cuts, skip) == expected(name, ids, skip)

    check()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips_id_by_id(name: str, text: str) -> None:
    tokenizer = tokenizer_named(name)
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    assert streamed(tokenizer, ids, skip=False) == tokenizer.decode(ids, skip_special_tokens=False)
    if "not special" not in text and name != "qwen3":  # Qwen's NFC normalizes
        assert streamed(tokenizer, ids) == text


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("prompt", ["The capital of France is", "Les élèves 漢字", "x = ", "\n\n"])
@pytest.mark.parametrize("answer", [" Paris.", "Paris", "  two spaces", "字 👩‍🚀", "'s"])
def test_the_answer_goes_on_where_the_prompt_ends(name: str, prompt: str, answer: str) -> None:
    """The prompt's text and the deltas are the whole text: no space is lost or added at the seam."""
    tokenizer = tokenizer_named(name)
    whole = tokenizer.encode(prompt + answer, add_special_tokens=False).tolist()
    for seam in range(len(whole) + 1):
        before = tokenizer.decode(whole[:seam], skip_special_tokens=False)
        if not before.endswith("\ufffd"):
            assert before + streamed(tokenizer, whole[seam:], skip=False) == prompt + answer


@pytest.mark.parametrize("name", ALL)
def test_a_delta_never_ends_inside_a_character(name: str) -> None:
    tokenizer = tokenizer_named(name)
    text = "漢字👩‍👩‍👧‍👦བོད"
    decoder = tokenizer.new_decoder()
    deltas = [decoder.push([i]) for i in tokenizer.encode(text, add_special_tokens=False).tolist()]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert decoder.flush() == ""


@pytest.mark.parametrize("name", ALL)
def test_an_unfinished_character_comes_out_at_the_end_as_the_whole_text_shows_it(name: str) -> None:
    tokenizer = tokenizer_named(name)
    for char in ("é", "བ", "𒀀"):
        ids = tokenizer.encode(char, add_special_tokens=False).tolist()
        for cut in range(1, len(ids)):
            decoder = tokenizer.new_decoder()
            assert decoder.push(ids[:cut]) == ""
            assert decoder.flush() == tokenizer.decode(ids[:cut]) != ""


@pytest.mark.parametrize("name", ALL)
def test_special_tokens_are_text_only_if_asked(name: str) -> None:
    tokenizer = tokenizer_named(name)
    eos = tokenizer.special_tokens["eos_token"]
    [eos_id] = tokenizer.encode(eos, add_special_tokens=False).tolist()
    a = tokenizer.encode("a", add_special_tokens=False).tolist()
    assert streamed(tokenizer, [*a, eos_id, *a]) == "aa"
    assert streamed(tokenizer, [*a, eos_id, *a], skip=False) == f"a{eos}a"


def test_thinking_tags_are_text() -> None:
    """Qwen's think and tool tags are added tokens, but not special: they reach the client."""
    tokenizer = tokenizer_named("qwen3")
    text = "<think>\nhm\n</think>\n\n<tool_call>"
    assert streamed(tokenizer, tokenizer.encode(text).tolist()) == text


def test_ids_beyond_the_vocabulary_are_no_text() -> None:
    tokenizer = tokenizer_named("qwen3")
    assert library("qwen3").get_vocab_size() == 151669
    a = tokenizer.encode("a").tolist()
    assert streamed(tokenizer, [*a, 151669, 151935, PADDED, -1, *a]) == "aa"
    assert streamed(tokenizer, [-1], skip=False) == ""


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("flood", [b"\x80", b"\xff", b"\xe6", b"\xf0\x9f\x91", "字".encode(), b"\xf0\x9f\x91\xa9\xe2"])
def test_a_flood_of_bytes_is_delivered_as_it_comes(name: str, flood: bytes) -> None:
    """What is held back never grows beyond one character."""
    decoder = tokenizer_named(name).new_decoder()
    silent = 0
    for token_id in [byte_id(name, byte) for byte in flood] * 4000:
        silent = 0 if decoder.push([token_id]) else silent + 1
        assert silent <= 3


def byte_id(name: str, byte: int) -> int:
    """The id that spells it alone."""
    spelled = {spelled: char for char, spelled in char_to_byte().items()}[byte]
    return library(name).get_vocab()[spelled if name == "qwen3" else f"<0x{byte:02X}>"]


@pytest.mark.parametrize("name", ALL)
def test_a_long_random_stream_is_the_whole_text(name: str) -> None:
    tokenizer = tokenizer_named(name)
    rng = random.Random(7)
    num_ids = 300 if name == "echo" else library(name).get_vocab_size()
    first = 1000 if name == "mistral-v3" else 0  # below it byte tokens, whose invalid runs are judged in hindsight
    ids = [rng.randrange(first, num_ids + 50) for _ in range(20_000)]
    assert streamed(tokenizer, ids, skip=False) == tokenizer.decode(ids, skip_special_tokens=False)


ab = st.text("ab", max_size=24)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def cut(chunks: Sequence[str], stops: Sequence[str]) -> tuple[list[str], TextStream]:
    """What each chunk brings through a stream, one id a byte, and that stream."""
    stream = tokenizer_named("echo").new_stream(stops)
    return [stream.push(list(chunk.encode())) for chunk in chunks], stream


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.text("ab", max_size=5), max_size=14), stop_strings)
def test_any_chunks_stop_where_the_whole_text_does(chunks: list[str], stops: list[str]) -> None:
    found, stream = cut(chunks, stops)
    text = "".join(found) + stream.take((), True, False)[0]
    assert (text, stream.matched_stop) == first_stop("".join(chunks), stops)


@settings(max_examples=500, deadline=None)
@given(ab, stop_strings)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    found, stream = cut(text, stops)
    if not stream.stopped:
        delivered = "".join(found)
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        held = max((end for end in beginnings if text.endswith(end)), key=len, default="")
        assert delivered + held == text


def test_text_before_the_match_is_delivered_and_the_match_is_not() -> None:
    found, stream = cut(["one E", "N", "x EN", "Dafter", "more"], ["END"])
    assert found == ["one ", "", "ENx ", "", ""]
    assert stream.matched_stop == "END" and stream.take((), True, False)[0] == ""


def test_the_match_that_ends_first_wins_and_then_the_longest() -> None:
    assert first_stop("xabcd", ["abcd", "bc"]) == ("xa", "bc")
    for stops in (["abcd", "bc"], ["bc", "abcd"]):
        assert cut(["xabcd"], stops)[0] == ["xa"]
    for stops in (["abc", "bc", "c"], ["c", "bc", "abc"]):
        found, stream = cut(["xa", "bcd"], stops)
        assert "".join(found) == "x" and stream.matched_stop == "abc"


def test_empty_stop_strings_never_match() -> None:
    found, stream = cut(["abc"], ["", ""])
    assert found == ["abc"] and not stream.stopped


def test_what_is_not_searched_is_text_and_begins_no_stop_string() -> None:
    stream = tokenizer_named("echo").new_stream(["ab"], min_tokens=4)
    assert stream.push([97, 98, 97]) == "aba"
    assert stream.push([98]) == "b" and not stream.stopped
    assert stream.push([97, 98]) == "" and stream.stopped


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("a" * 20_000 + "b", "a" * 300_000),
        ("ab" * 10_000 + "c", "ab" * 150_000),
        ("aab" * 6_600 + "c", "aabaa" * 60_000),
    ],
)
def test_the_search_is_linear_whatever_stop_and_text(stop: str, text: str) -> None:
    """Else this takes minutes."""
    [found], stream = cut([text], [stop])
    assert found + stream.take((), True, False)[0] == text


@pytest.mark.parametrize("name", ["echo", "qwen3", "mistral-v3"])
def test_stop_strings_cross_token_borders(name: str) -> None:
    tokenizer = tokenizer_named(name)

    @settings(max_examples=150, deadline=None)
    @given(st.text("ab字\n é", max_size=30), st.lists(st.text("ab字\n é", min_size=1, max_size=4), max_size=4))
    def check(text: str, stops: list[str]) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        stream = tokenizer.new_stream(stops)
        got = ""
        for i in ids:
            got += stream.push([i])
            if stream.stopped:
                break
        got += stream.take((), True, False)[0]
        assert (got, stream.matched_stop) == first_stop(tokenizer.decode(ids), stops)

    check()


def test_the_end_of_the_text_can_complete_a_stop_string() -> None:
    """An unfinished character is U+FFFD only at the end."""
    stream = tokenizer_named("echo").new_stream(["\ufffd"])
    assert stream.push([0x61, 0xE5]) == "a"
    assert stream.take((), True, False)[0] == ""
    assert stream.stopped


def test_special_tokens_can_be_shown_and_are_no_stop_string() -> None:
    tokenizer = tokenizer_named("echo")
    assert tokenizer.new_stream(["<|eos|>"]).push([97, 256, 98]) == "ab"
    shown = tokenizer.new_stream(["<|eos|>"], {256})
    assert shown.push([97, 256, 98]) == "a<|eos|>b"
    assert not shown.stopped
