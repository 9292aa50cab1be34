"""Builds assistant messages of the chat API from reasoning, texts and calls in the order in which they came.

Invariants: chat templates render a message as reasoning, text and calls, in this order; a piece that would come before
an earlier one starts a new message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FIELDS = ("reasoning_content", "content", "tool_calls")


class History:
    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] = {}  # current assistant message, if it may be continued

    def add(self, message: dict[str, Any]) -> None:
        """Add a complete message; assistant output that follows starts a new message."""
        self._answer = {}
        self._messages.append(message)

    def done(self) -> list[dict[str, Any]]:
        """Return the assistant's and other messages, with consecutive texts joined."""
        for message in self._messages:
            if isinstance(thoughts := message.get("reasoning_content"), list):
                message["reasoning_content"] = "".join(thoughts)
            if isinstance(content := message.get("content"), list):
                message["content"] = plain(content)
        return self._messages

    def reason(self, text: str, *, may_append: bool = False) -> None:
        """Add reasoning. `may_append`: it may be appended to the reasoning of the current message."""
        self._message("reasoning_content", may_append).setdefault("reasoning_content", []).append(text)

    def say(self, parts: Sequence[dict[str, Any]], *, may_append: bool = False) -> None:
        """Add text parts. `may_append`: they may be appended to texts of the current message. Blank texts after a call
        are dropped: as a message of their own they would separate the call from its result."""
        if "tool_calls" in self._answer and not any(
            (part.get("text") or part.get("refusal") or "").strip() for part in parts
        ):
            return
        self._message("content", may_append).setdefault("content", []).extend(parts)

    def call(self, call: dict[str, Any]) -> None:
        self._message("tool_calls", True).setdefault("tool_calls", []).append(call)

    def _message(self, field: str, may_append: bool) -> dict[str, Any]:
        """Return the assistant message to add `field` to; a new one if the current one has a later field already."""
        behind = FIELDS[FIELDS.index(field) + may_append :]
        if not self._answer or any(name in self._answer for name in behind):
            self._answer = {"role": "assistant"}
            self._messages.append(self._answer)
        return self._answer


def plain(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the parts as message content: a string if there is a single text part, else the list."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else list(parts)
