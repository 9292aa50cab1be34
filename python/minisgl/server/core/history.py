"""Builds the messages of the chat API of what an assistant said, from pieces in the order in which they came.

Invariants: templates show a message as reasoning, text and calls, in this order; a piece that would stand before an
earlier one begins a new message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FIELDS = ("reasoning_content", "content", "tool_calls")


class History:
    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] = {}  # of the assistant, while it may have more to say

    def add(self, message: dict[str, Any]) -> None:
        """Add a whole message, after which the assistant begins anew."""
        self._answer = {}
        self._messages.append(message)

    def done(self) -> list[dict[str, Any]]:
        """Return the messages."""
        for message in self._messages:
            if isinstance(thoughts := message.get("reasoning_content"), list):
                message["reasoning_content"] = "".join(thoughts)
            if isinstance(content := message.get("content"), list):
                message["content"] = plain(content)
        return self._messages

    def reason(self, text: str, *, goes_on: bool = False) -> None:
        """Add reasoning. `goes_on`: it may continue the reasoning before it."""
        self._message("reasoning_content", goes_on).setdefault("reasoning_content", []).append(text)

    def say(self, parts: Sequence[dict[str, Any]], *, goes_on: bool = False) -> None:
        """Add texts. `goes_on`: they may continue the texts before them. Blank ones behind a call are left out: a turn
        of their own would stand between the call and its result."""
        if "tool_calls" in self._answer and not any(
            (part.get("text") or part.get("refusal") or "").strip() for part in parts
        ):
            return
        self._message("content", goes_on).setdefault("content", []).extend(parts)

    def call(self, call: dict[str, Any]) -> None:
        self._message("tool_calls", True).setdefault("tool_calls", []).append(call)

    def _message(self, field: str, goes_on: bool) -> dict[str, Any]:
        """Return the assistant's message, a new one if its last has a field that is shown behind `field`."""
        behind = FIELDS[FIELDS.index(field) + goes_on :]
        if not self._answer or any(name in self._answer for name in behind):
            self._answer = {"role": "assistant"}
            self._messages.append(self._answer)
        return self._answer


def plain(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a content of these parts, a text if that is all."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else list(parts)
