"""One call of the model with a conversation, without a server: what is counted as thought."""

from __future__ import annotations

import pytest

from minisgl.frontend.output_processor import Delta
from minisgl.parsers.answer import Thinking
from minisgl.parsers.choice import new_parser
from minisgl.sampling_params import SamplingParams
from minisgl.server.turn import Turn
from minisgl.tokenizer import Tokenizer

END = 7  # the token that ends what is thought


@pytest.mark.parametrize("is_shown", [False, True], ids=["streamed", "whole"])
@pytest.mark.parametrize(("said", "count"), [("Yes.", 0), ("<think>hm</think>Yes.", 3)])
def test_only_what_was_thought_is_counted(said: str, count: int, is_shown: bool) -> None:
    """Also once it was asked for, as an answer that comes whole does."""
    thinking = Thinking("<think>", "</think>")
    turn = Turn([], SamplingParams(), True, lambda: new_parser(None, thinking, frozenset()), thinks=True, think_end=END)
    choice = turn.choice()
    choice.take(Delta(0, said, "stop"))
    if is_shown:
        assert (choice.content, choice.reasoning) == ("Yes.", "hm" if count else "")
    assert turn.num_thought(choice, [1, 2, END, 3], Tokenizer.echo()) == count
