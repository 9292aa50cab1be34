"""From Anthropic's messages to those of the chat API, without a server."""

from __future__ import annotations

from minisgl.server.messages.body import AnthropicMessage, ThinkingBlock
from minisgl.server.messages.translate import _messages


class NeverAppended(str):
    """A text that must not be added to another one: that copies all that came before it."""

    __slots__ = ()

    def __radd__(self, before: str) -> str:
        raise AssertionError(f"{self!r} was appended to {len(before)} characters")


def test_thoughts_are_joined_once() -> None:
    blocks = [ThinkingBlock.model_construct(type="thinking", thinking=NeverAppended(text)) for text in "abc"]
    [found] = _messages(AnthropicMessage.model_construct(role="assistant", content=blocks))
    assert found["reasoning_content"] == "abc"
