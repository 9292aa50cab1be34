"""Stop strings in a growing text, against a search in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.tokenizer import StopMatcher, TextStream
from minisgl.tokenizer.text_stream import _Search
from tests.helpers.text import first_stop, tokenizer_named

ab = st.text("ab", max_size=24)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def chunked(matcher: StopMatcher, chunks: list[str]) -> str:
    return "".join(matcher.push(chunk) for chunk in chunks) + matcher.flush()


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.text("ab", max_size=5), max_size=14), stop_strings)
def test_any_chunks_stop_where_the_whole_text_does(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert (chunked(matcher, chunks), matcher.matched) == first_stop("".join(chunks), stops)


@settings(max_examples=500, deadline=None)
@given(ab, stop_strings)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    delivered = "".join(matcher.push(char) for char in text)
    if matcher.matched is None:
        held = text[len(delivered) :]
        assert text.startswith(delivered)
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        assert held == max((end for end in beginnings if text.endswith(end)), key=len, default="")


def test_text_before_the_match_is_delivered_and_the_match_is_not() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one E") == "one "
    assert matcher.push("N") == ""
    assert matcher.push("x EN") == "ENx "
    assert matcher.push("Dafter") == ""
    assert matcher.matched == "END"
    assert matcher.push("more") == matcher.flush() == ""


def test_the_match_that_ends_first_wins_and_then_the_longest() -> None:
    assert first_stop("xabcd", ["abcd", "bc"]) == ("xa", "bc")
    for stops in (["abcd", "bc"], ["bc", "abcd"]):
        matcher = StopMatcher(stops)
        assert chunked(matcher, ["xabcd"]) == "xa"
    for stops in (["abc", "bc", "c"], ["c", "bc", "abc"]):
        matcher = StopMatcher(stops)
        assert chunked(matcher, ["xa", "bcd"]) == "x"
        assert matcher.matched == "abc"


def test_empty_stop_strings_never_match() -> None:
    matcher = StopMatcher(["", ""])
    assert matcher.push("abc") == "abc"
    assert matcher.matched is None


class CountedText(str):
    """A stop string that counts how often one of its characters is looked at."""

    looks = 0

    def __getitem__(self, at: object) -> str:  # type: ignore[override]
        CountedText.looks += 1
        return str.__getitem__(self, at)  # type: ignore[index]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("a" * 5000 + "b", "a" * 20_000),
        ("a" * 50 + "b", ("a" * 50 + "c") * 400),
        ("ab" * 2500 + "c", "ab" * 10_000),
        ("aab" * 1500 + "c", "aabaa" * 4000),
    ],
)
def test_the_search_is_linear_whatever_stop_and_text(stop: str, text: str) -> None:
    """Counted, not timed: a few looks at the stop string for each character of the text."""
    CountedText.looks = 0
    search = _Search(CountedText(stop))
    for char in text:
        assert search.push(char) is None
    assert CountedText.looks <= 8 * len(text)


def test_a_stop_string_costs_nothing_before_the_text_resembles_it() -> None:
    CountedText.looks = 0
    search = _Search(CountedText("x" * 1_000_000))
    assert search.push("a" * 1000) is None
    assert CountedText.looks <= 2


@pytest.mark.parametrize("name", ["echo", "qwen3", "mistral-v3"])
def test_stop_strings_cross_token_borders(name: str) -> None:
    tokenizer = tokenizer_named(name)

    @settings(max_examples=150, deadline=None)
    @given(st.text("ab字\n é", max_size=30), st.lists(st.text("ab字\n é", min_size=1, max_size=4), max_size=4))
    def check(text: str, stops: list[str]) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        stream = TextStream(tokenizer, stops)
        got = ""
        for i in ids:
            got += stream.push([i])
            if stream.stopped:
                break
        got += stream.finish()
        assert (got, stream.matched_stop) == first_stop(tokenizer.decode(ids), stops)

    check()


def test_held_back_text_comes_at_the_end() -> None:
    tokenizer = tokenizer_named("echo")
    stream = TextStream(tokenizer, ["\n\nUser:"])
    assert stream.push(tokenizer.encode("yes\n\nUse").tolist()) == "yes"
    assert not stream.stopped
    assert stream.finish() == "\n\nUse"


def test_the_end_of_the_text_can_complete_a_stop_string() -> None:
    """An unfinished character is U+FFFD only at the end."""
    stream = TextStream(tokenizer_named("echo"), ["\ufffd"])
    assert stream.push([0x61, 0xE5]) == "a"
    assert stream.finish() == ""
    assert stream.stopped


def test_special_tokens_can_be_shown_and_stopped_at() -> None:
    tokenizer = tokenizer_named("echo")
    assert TextStream(tokenizer, ["<|eos|>"]).push([97, 256, 98]) == "ab"
    shown = TextStream(tokenizer, ["<|eos|>"], skip_special_tokens=False)
    assert shown.push([97, 256, 98]) == "a"
    assert shown.stopped
