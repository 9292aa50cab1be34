"""A request's place in its grammar, against a plain reading of what the grammar says."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from minisgl.engine.echo import EOS_ID, VOCAB_SIZE
from minisgl.grammar.slots import Matcher
from minisgl.step import Int32Array
from tests.helpers.grammars import PERSON, matcher, of_regex, of_schema


def allowed(made: Matcher, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """All bits of the mask are looked at, those behind the vocabulary, too."""
    mask = np.full(-(-vocab_size // 32), -1, np.int32)
    made.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_the_mask_follows_the_consumed_tokens() -> None:
    made = matcher(of_regex("ab?c"))
    seen = []
    for token in b"abc":
        seen.append(allowed(made))
        made.consume(token)
    assert [*seen, allowed(made)] == [[97], [98, 99], [99], [EOS_ID]]
    made.consume(EOS_ID)
    assert not made.error


def test_behind_the_end_anything_is_taken_and_only_an_end_allowed() -> None:
    """With overlap a step more runs than there are tokens."""
    made = matcher(of_regex("a*"))
    made.consume(EOS_ID)
    for token in (EOS_ID, 97, 12):
        assert allowed(made) == [EOS_ID]
        made.consume(token)
    assert not made.error


def test_a_token_that_may_not_come_is_an_error_for_good() -> None:
    made = matcher(of_schema(PERSON))
    for token in b'{"name":':
        made.consume(token)
    made.consume(ord("7"))
    assert allowed(made) == [EOS_ID]
    assert "satisfy the grammar" in made.error and "\n" not in made.error
    error = made.error
    made.restart([])
    made.consume(ord("{"))
    assert made.error == error and allowed(made) == [EOS_ID]


@pytest.mark.parametrize("seed", range(8))
def test_restarted_it_stands_where_one_does_that_came_there_step_by_step(seed: int) -> None:
    rng = random.Random(seed)
    made, tokens, masks = matcher(of_schema(PERSON)), list[int](), list[list[int]]()
    while len(tokens) < 60 and EOS_ID not in tokens:
        masks.append(allowed(made))
        tokens.append(rng.choice(masks[-1]))
        made.consume(tokens[-1])
    for at in (0, len(tokens) // 2, len(tokens) - 1, len(tokens)):
        made.restart(tokens[:at])
        assert allowed(made) == (masks[at] if at < len(tokens) else allowed(made))
        other = matcher(of_schema(PERSON))
        other.restart(tokens[:at])
        assert allowed(other) == allowed(made) and not made.error


@pytest.mark.parametrize("vocab_size", [EOS_ID + 1, VOCAB_SIZE, 300, 1000, 1024])
def test_ids_that_the_tokenizer_or_the_model_has_not_are_never_allowed(vocab_size: int) -> None:
    """A vocabulary is often padded; some tokenizers have more ids than their model."""
    made = matcher(of_regex("(.|\n)*"), vocab_size)
    found = allowed(made, vocab_size)
    assert max(found) == EOS_ID and len(found) > 128
    made.consume(ord("x"))
    assert allowed(made, vocab_size) == found


def test_every_end_of_the_model_ends_a_grammar() -> None:
    made = matcher(of_regex("a"), VOCAB_SIZE, (256, 257))
    made.consume(97)
    assert allowed(made) == [256, 257]
    made.consume(257)
    assert allowed(made) == [256, 257] and not made.error


def test_a_matcher_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """The library's log would show what users write."""
    secret: dict[str, Any] = {"type": "object", "properties": {"secret": {"pattern": "(a|b)*c{3,400}"}}}
    made = matcher(of_schema(secret))
    for token in b'{"secret":x':
        made.consume(token)
    made.consume(EOS_ID)
    mask: Int32Array = np.zeros(9, np.int32)
    made.fill(mask)
    assert made.error and "secret" not in made.error and json.dumps(secret) not in made.error
    assert capfd.readouterr() == ("", "")
