"""What the reference of OpenAI's API shows of completions, as test_openai_chats.py."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types import Completion

from tests.helpers.exact import held
from tests.helpers.server import MODEL

IDS = list(b"say:Hello")
PROMPTS: list[tuple[Any, int]] = [("say:Hello", 1), (["say:Hello", "say:Hello"], 2), (IDS, 1), ([IDS, IDS], 2)]


def complete(client: openai.OpenAI, prompt: Any = "say:Hello", **more: Any) -> list[Any]:
    raw = client.completions.with_raw_response.create(**{"model": MODEL, "prompt": prompt, **more})
    return list(held(Completion, raw.text).choices)


@pytest.mark.parametrize(("prompt", "count"), PROMPTS, ids=["text", "texts", "ids", "lists of ids"])
def test_prompts_of_every_form_are_completed(client: openai.OpenAI, prompt: Any, count: int) -> None:
    found = complete(client, prompt)
    assert [(one.index, one.text, one.finish_reason) for one in found] == [(i, "Hello", "stop") for i in range(count)]
    texts = [""] * count
    for chunk in client.completions.create(model=MODEL, prompt=prompt, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["Hello"] * count


OF_COMPLETIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"echo": True}, ["say:HelloHello"]),
    ({"n": 2}, ["Hello", "Hello"]),
    ({"best_of": 1}, ["Hello"]),
    ({"logprobs": 2}, ["Hello"]),
    ({"max_tokens": 2}, ["He"]),
    ({"stop": "l"}, ["He"]),
    ({"suffix": ""}, ["Hello"]),
    ({"seed": 1, "temperature": 0, "top_p": 0.5, "user": "me"}, ["Hello"]),
    ({"presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {"7": -1}}, ["Hello"]),
]


@pytest.mark.parametrize(("more", "texts"), OF_COMPLETIONS, ids=",".join)
def test_completion_arguments_are_accepted(client: openai.OpenAI, more: dict[str, Any], texts: list[str]) -> None:
    assert [one.text for one in complete(client, **more)] == texts


def test_completions_are_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    [found] = complete(client, "say:" + "x" * 50)
    assert (found.text, found.finish_reason) == ("x" * 16, "length")


def test_completions_report_usage(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    *_, last = client.completions.create(model=MODEL, prompt="say:Hello", stream=True, stream_options=options)
    assert last.usage is not None and (last.usage.prompt_tokens, last.usage.completion_tokens) == (9, 6)


@pytest.mark.refused
@pytest.mark.parametrize("more", [{"suffix": "!"}, {"best_of": 3, "n": 1, "stream": True}], ids=["suffix", "best_of"])
def test_unsupported_completion_arguments_are_refused(client: openai.OpenAI, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt="say:x", **more)
    assert error.value.param == next(iter(more))
