"""What errors say that a field may be: every kind that it takes, and the value as JSON."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.sampling_params import ParamError
from minisgl.server.core.errors import ApiError
from minisgl.server.core.request import checked
from minisgl.server.routes import POSTS

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, GENERATE, EMBED = "/v1/messages", "/generate", "/v1/embeddings"
USER = [{"role": "user", "content": "a"}]
PROMPTS = "must be text, a list of texts, a list of whole numbers or a list of lists of whole numbers"


def messages(**one: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a", **one}]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {"messages": "hi"}, 'messages: must be a list of objects (got "hi")'),
        (CHAT, {"messages": [5]}, "messages.0: must be an object (got 5)"),
        (CHAT, {"messages": messages(content=5)}, "messages.0.content: must be text or a list of objects (got 5)"),
        (CHAT, {"messages": messages(content=["a"])}, 'messages.0.content.0: must be an object (got "a")'),
        (
            CHAT,
            {"messages": messages(content=[{"type": 5}])},
            'messages.0.content.0.type: must be "text", "input_text", "output_text", "refusal", "image_url", '
            '"input_image" or "image" (got 5)',
        ),
        (CHAT, {"messages": USER, "stop": 5}, "stop: must be text or a list of texts (got 5)"),
        (CHAT, {"messages": USER, "stop": ["a", None]}, "stop.1: must be text (got null)"),
        (CHAT, {"messages": USER, "stream": "yes"}, 'stream: must be true or false (got "yes")'),
        (CHAT, {"messages": USER, "n": 1.5}, "n: must be a whole number (got 1.5)"),
        (CHAT, {"messages": USER, "tool_choice": 5}, "tool_choice: must be text or an object (got 5)"),
        (CHAT, {"messages": USER, "logit_bias": {"1": "a"}}, 'logit_bias.1: must be a number (got "a")'),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools.0.function: required"),
        (CHAT, {"messages": USER, "guided_json": True}, "guided_json: must be text or an object (got true)"),
        (TEXT, {"prompt": 5}, f"prompt: {PROMPTS} (got 5)"),
        (TEXT, {"prompt": None}, f"prompt: {PROMPTS} (got null)"),
        (TEXT, {"prompt": [1, "a"]}, 'prompt.1: must be a whole number (got "a")'),
        (TEXT, {"prompt": "a", "stop": [""]}, 'stop: stop strings must not be empty (got [""])'),
        (
            RESPONSES,
            {"input": [{"type": "x", "role": "user", "content": "a"}]},
            'input.0.type: must be "message", "function_call", "custom_tool_call", ',
        ),
        (RESPONSES, {"input": [{"role": "user", "content": 5}]}, "input.0.content: must be text or a list of objects"),
        (
            RESPONSES,
            {"input": "a", "tool_choice": 5},
            'tool_choice: must be "none", "auto", "required" or an object (got 5)',
        ),
        (
            MESSAGES,
            {"max_tokens": 4, "messages": messages(content=[{"type": 5}])},
            'messages.0.content.0.type: must be "text", "image", "thinking", "redacted_thinking", "tool_use" or '
            '"tool_result"',
        ),
        (GENERATE, {"input_ids": ["a"]}, 'input_ids.0: must be a whole number or a list of whole numbers (got "a")'),
        (EMBED, {"input": 5}, f"input: {PROMPTS} (got 5)"),
        (EMBED, {"input": "a", "encoding_format": 5}, 'encoding_format: must be "float" or "base64" (got 5)'),
    ],
)
def test_an_error_names_all_that_a_field_may_be(path: str, body: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError) as found:
        asked = checked(body, POSTS[path][0])
        try:
            asked.to_sampling(1, {})
        except ParamError as error:
            raise ApiError(400, str(error)) from error
    assert str(found.value).startswith(said)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (("",), '[""]'),
        ((), "[]"),
        (None, "null"),
        (True, "true"),
        ({"a": (None, 1.5)}, '{"a": [null, 1.5]}'),
        ('Grüße "', '"Grüße \\""'),
        ("x" * 1000, '"' + "x" * 76 + "..."),
        (list(range(1000)), "[0, 1, 2, 3, 4, 5, ...]"),
        (float("nan"), "NaN"),
        (10**500, "1000"),
    ],
)
def test_a_value_is_shown_as_json(value: object, shown: str) -> None:
    text = str(ParamError("field", value, "is bad"))
    assert text.startswith(f"field: is bad (got {shown}") and len(text) < 120
