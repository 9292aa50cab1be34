"""The gateway's streams give Python's text, however ids are grouped, with stop strings and without."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from minisgl.tokenizer import TextStream, Tokenizer
from tests.helpers.gateway_text import gateway_named, gateway_of
from tests.helpers.text import REAL, TEXTS, tokenizer_named


@cache
def window() -> Tokenizer:
    """A decoder that needs its neighbours."""
    words = ["[UNK]", "un", "##aff", "##able", "hello", "world", ",", "##s", "�", "[CLS]"]
    made = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[CLS]"])
    return Tokenizer(made, {}, {})


def both(name: str) -> tuple[Tokenizer, Any]:
    return (window(), window_gateway()) if name == "window" else (tokenizer_named(name), gateway_named(name))


@cache
def window_gateway() -> Any:
    return gateway_of(window())


NAMES = (*REAL, "echo", "window")


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids, and those of texts: characters whole, cut, and broken."""
    python = both(name)[0]
    any_id = st.integers(-2, python.num_ids + 2)
    if name in ("mistral-v3", "qwen3", "echo"):
        byte_ids = [i for i in range(min(python.num_ids, 1200)) if len(python.token_bytes(i)) == 1]
        any_id = st.one_of(any_id, st.sampled_from(byte_ids))
    if name == "window":
        return st.lists(any_id, max_size=24)
    encoded = st.one_of(st.sampled_from(TEXTS), st.text(max_size=12)).map(lambda text: python.encode(text).tolist())
    return st.lists(st.one_of(encoded, st.lists(any_id, max_size=6)), max_size=6).map(
        lambda runs: list(itertools.chain(*runs))
    )


def groups(ids: list[int], cuts: list[int]) -> list[list[int]]:
    found, at = [], 0
    for cut in cuts:
        found.append(ids[at : at + cut])
        at += cut
    return [*found, ids[at:]]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=250, deadline=None)
@given(data=st.data(), cuts=st.lists(st.integers(0, 4), max_size=30), skip=st.booleans())
def test_the_same_deltas(name: str, data: st.DataObject, cuts: list[int], skip: bool) -> None:
    python, gateway = both(name)
    theirs, ours = python.new_decoder(skip), gateway.decoder(skip)
    for group in groups(data.draw(ids_of(name)), cuts):
        if len(group) == 1 and data.draw(st.booleans()):
            assert ours.place(group[0]) == theirs.place(group[0])
        else:
            assert ours.push(group) == theirs.push(group)
    assert ours.flush() == theirs.flush()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=250, deadline=None)
@given(data=st.data(), cuts=st.lists(st.integers(0, 4), max_size=30))
def test_the_same_stops(name: str, data: st.DataObject, cuts: list[int]) -> None:
    python, gateway = both(name)
    ids = data.draw(ids_of(name))
    text = python.new_decoder().push([i for i in ids if i >= 0])
    pieces = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(0, 6)).map(lambda at: text[at[0] : sum(at)])
    stops = data.draw(
        st.lists(st.one_of(pieces, st.sampled_from(["", "aa", "aab", "é", "�", "\n\n", " the"])), max_size=4)
    )
    shown = data.draw(st.frozensets(st.sampled_from(sorted(python.special_ids)))) if python.special_ids else frozenset()
    theirs = TextStream(python.new_decoder(shown=shown), stops, shown=shown)
    ours = gateway.stream(stops, sorted(shown))
    for group in groups(ids, cuts):
        may_stop = data.draw(st.booleans())
        assert ours.push(group, may_stop) == theirs.push(group, may_stop=may_stop)
        assert ours.stopped == theirs.stopped
    assert ours.finish() == theirs.finish()
    assert ours.stopped == theirs.stopped


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab", max_size=60),
    stops=st.lists(st.text("ab", max_size=7), max_size=4),
    cuts=st.lists(st.integers(0, 9), max_size=12),
)
def test_stop_strings_that_overlap(text: str, stops: list[str], cuts: list[int]) -> None:
    python, gateway = both("echo")
    theirs, ours = TextStream(python.new_decoder(), stops), gateway.stream(stops)
    for group in groups(list(text.encode()), cuts):
        assert ours.push(group) == theirs.push(group)
    assert (ours.finish(), ours.stopped) == (theirs.finish(), theirs.stopped)
