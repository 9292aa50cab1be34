"""Rendering: two probes tell how texts are counted, and bodies follow."""

from __future__ import annotations

import json

import pytest

from minisgl.bench.render import Line, Renderer, probe
from minisgl.bench.workloads import (
    LoadRequest,
    MadeUp,
    Message,
)
from minisgl.config import ConfigError

TOKENS = Line()  # a word is a token, and nothing is added


def test_two_probes_give_the_line() -> None:
    line = probe(lambda num_words: 11 + 2 * num_words)
    assert line == Line(overhead=11.0, per_word=2.0)
    request = LoadRequest((Message("user", (MadeUp(("x",), 211),)),), 5)
    body = json.loads(Renderer("m", "chat", line, {"ignore_eos": True}).body(request))
    assert 11 + 2 * len(body["messages"][0]["content"].split()) == 211
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}


def test_a_server_that_counts_nothing() -> None:
    with pytest.raises(ConfigError, match="prompt lengths cannot be controlled"):
        probe(lambda _: 5)


def test_a_prompt_for_completions() -> None:
    request = LoadRequest((Message("system", ("Be brief.",)), Message("user", ("Hi ", MadeUp(("x",), 3)))), 5)
    body = json.loads(Renderer("m", "completions", TOKENS).body(request))
    assert body["prompt"].startswith("Be brief.\n\nHi ")
    assert "messages" not in body
