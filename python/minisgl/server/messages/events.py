"""The answer of POST /v1/messages: a message of blocks, or the events that tell how it grows.

Invariants: deltas of a block joined are the block that would have come whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.frontend.output_processor import Delta
from minisgl.parsers import ids
from minisgl.server.errors import ApiError
from minisgl.server.formatter import TurnFormatter, json_bytes
from minisgl.server.generation import Generation
from minisgl.server.messages.body import MessagesRequest
from minisgl.server.sections import Change, Closed, Grown, Opened, Section, Sections
from minisgl.server.turn import Turn


class MessagesFormatter(TurnFormatter):
    def __init__(self, model_name: str, asked: MessagesRequest, turn: Turn) -> None:
        super().__init__(asked, turn)
        self._head = {"id": f"msg_{ids.new_id()}", "type": "message", "role": "assistant", "model": model_name}
        self._choice = turn.choice()
        self._sections = Sections()
        self._has_begun = False

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        self._sections.take(self._choice.take(choices[0]))
        self._sections.finish()
        content = [_block(section) for section in self._sections.all]
        return {**self._head, "content": content, **self._stop(generation), "usage": _usage(generation)}

    def _stop(self, generation: Generation) -> dict[str, Any]:
        matched = generation.matched_stop(0)
        if matched is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        called = "tool_use" if self._choice.calls else "end_turn"
        reason = "max_tokens" if self._choice.finish_reason == "length" else called
        return {"stop_reason": reason, "stop_sequence": None}

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        frames = []
        if not self._has_begun:
            self._has_begun = True
            begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            message = {**self._head, **begun, "usage": {**_usage(generation), "output_tokens": 0}}
            frames += [_event("message_start", message=message), _event("ping")]
        for delta in deltas:
            changes = self._sections.take(self._choice.take(delta))
            if delta.finish_reason is not None:
                changes += self._sections.finish()
            frames += [_frame(change) for change in changes]
        return b"".join(frames)

    def end(self, generation: Generation) -> bytes:
        delta = _event("message_delta", delta=self._stop(generation), usage=_usage(generation))
        return delta + _event("message_stop")

    def error(self, error: ApiError) -> bytes:
        return _event(**error.anthropic_body())


def _usage(generation: Generation) -> dict[str, Any]:
    given: dict[str, Any] = generation.usage()
    cached = given["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": given["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": given["completion_tokens"],
    }


def _event(type: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type.encode(), json_bytes({"type": type, **fields}))


def _block(section: Section) -> dict[str, Any]:
    if section.kind == "call":
        return {"type": "tool_use", "id": section.call_id, "name": section.name, "input": _input(section.text)}
    if section.kind == "reasoning":
        return {"type": "thinking", "thinking": section.text, "signature": ""}
    return {"type": "text", "text": section.text}


def _input(arguments: str) -> dict[str, Any]:
    """Cut by `max_tokens` they are no JSON, and nothing that could be called."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _frame(change: Change) -> bytes:
    section = change.section
    if isinstance(change, Opened):
        begun = _block(Section(section.index, section.kind, section.call_id, section.name))
        return _event("content_block_start", index=section.index, content_block=begun)
    if isinstance(change, Grown):
        return _event("content_block_delta", index=section.index, delta=_delta(section, change.text))
    assert isinstance(change, Closed)
    return _event("content_block_stop", index=section.index)


def _delta(section: Section, text: str) -> dict[str, str]:
    if section.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    if section.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}
