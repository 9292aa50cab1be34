"""The answer of POST /v1/responses: an object with a list of items, or the events that tell how it grows.

Invariants: each event has the next `sequence_number`; deltas of an item joined are its text when it is done; the
object that ends a stream is the one that would have come whole, and the one that is kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from minisgl.frontend.output_processor import Delta
from minisgl.server.errors import ApiError
from minisgl.server.formatter import TurnFormatter, chat_entries, json_bytes
from minisgl.server.generation import Generation
from minisgl.server.responses.body import ResponsesRequest
from minisgl.server.responses.translate import new_id
from minisgl.server.sections import Change, Closed, Grown, Opened, Section, Sections
from minisgl.server.turn import Turn
from minisgl.tokenizer import Tokenizer

PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
LENGTH = "max_output_tokens"


class ResponsesFormatter(TurnFormatter):
    """`head`: what the object says from its beginning on. `finished`: the object, once the answer has ended."""

    def __init__(self, tokenizer: Tokenizer, head: dict[str, Any], asked: ResponsesRequest, turn: Turn) -> None:
        super().__init__(asked, turn)
        self.id = str(head["id"])
        self.finished: dict[str, Any] | None = None
        self._tokenizer = tokenizer
        self._head = head
        self._turn = turn
        self._choice = turn.choice()
        self._sections = Sections()
        self._items: list[dict[str, Any]] = []  # of each section
        self._logprobs: list[list[dict[str, Any]]] = []  # of each section
        self._new_logprobs: list[dict[str, Any]] = []  # of text that is not decided yet
        self._num_events = 0
        self._has_begun = False

    # ------------------------------------------------------------------------------------------------------ object

    def whole(self, generation: Generation, choices: Sequence[Delta]) -> dict[str, Any]:
        self._take(choices[0])
        return self._finish(generation)

    def _finish(self, generation: Generation) -> dict[str, Any]:
        reason = self._choice.finish_reason
        thought = self._turn.num_thought(self._choice, generation.token_ids(0), self._tokenizer)
        more: dict[str, Any] = {"usage": _usage(generation.usage(), thought)}
        if reason == "length":
            more |= {"status": "incomplete", "incomplete_details": {"reason": LENGTH}}
        elif reason == "abort":
            more |= {"status": "failed", "error": {"code": "server_error", "message": "the answer was aborted"}}
        else:
            more |= {"status": "completed", "completed_at": int(time.time())}
        self.finished = self._object(**more)
        return self.finished

    def _object(self, **more: Any) -> dict[str, Any]:
        return {**self._head, "output": self._items, **more}

    def _item(self, section: Section, status: str) -> dict[str, Any]:
        """As far as it has come; what is in progress is shown empty."""
        begun = status == "in_progress"
        item_id = new_id(PREFIXES[section.kind]) if begun else self._items[section.index]["id"]
        head = {"id": item_id, "status": status}
        if section.kind == "call":
            call = {
                "call_id": section.call_id,
                "name": section.name,
                "arguments": "" if begun else section.text or "{}",
            }
            return {**head, "type": "function_call", **call}
        content = [] if begun else [self._part(section, section.text)]
        if section.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _part(self, section: Section, text: str) -> dict[str, Any]:
        if section.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs[section.index] if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    # ------------------------------------------------------------------------------------------------------- stream

    def chunk(self, generation: Generation, deltas: Sequence[Delta]) -> bytes:
        frames = []
        if not self._has_begun:
            self._has_begun = True
            for name in ("created", "in_progress"):
                frames.append(self._event(f"response.{name}", response=self._object(status="in_progress", output=[])))
        frames += [frame for delta in deltas for frame in self._take(delta)]
        return b"".join(frames)

    def end(self, generation: Generation) -> bytes:
        found = self._finish(generation)
        return self._event(f"response.{found['status']}", response=found)

    def error(self, error: ApiError) -> bytes:
        detail = {"code": "server_error", "message": error.body["error"]["message"]}
        return self._event("response.failed", response=self._object(status="failed", error=detail))

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = json_bytes({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    # -------------------------------------------------------------------------------------------------------- growth

    def _take(self, delta: Delta) -> list[bytes]:
        """The frames of what is new."""
        if delta.logprobs:
            self._new_logprobs += chat_entries(self._tokenizer, delta.logprobs)
        changes = self._sections.take(self._choice.take(delta))
        if delta.finish_reason is not None:
            changes += self._sections.finish()
        return [frame for change in changes for frame in self._frames(change, delta.finish_reason == "length")]

    def _frames(self, change: Change, is_cut: bool) -> list[bytes]:
        """`is_cut`: the answer is, and so its last item."""
        section = change.section
        if isinstance(change, Opened):
            self._items.append(item := self._item(section, "in_progress"))
            self._logprobs.append([])
            frames = [self._event("response.output_item.added", output_index=section.index, item=item)]
            if section.kind != "call":
                frames.append(
                    self._event("response.content_part.added", **self._at(section), part=self._part(section, ""))
                )
            return frames
        if isinstance(change, Grown):
            return [self._delta(section, change.text)]
        assert isinstance(change, Closed)
        is_last = section is self._sections.all[-1]
        self._items[section.index] = item = self._item(section, "incomplete" if is_cut and is_last else "completed")
        frames = self._done(section, item)
        return [*frames, self._event("response.output_item.done", output_index=section.index, item=item)]

    def _at(self, section: Section) -> dict[str, Any]:
        place = {"item_id": self._items[section.index]["id"], "output_index": section.index}
        return place if section.kind == "call" else {**place, "content_index": 0}

    def _delta(self, section: Section, text: str) -> bytes:
        if section.kind == "call":
            return self._event("response.function_call_arguments.delta", **self._at(section), delta=text)
        if section.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._at(section), delta=text)
        logprobs, self._new_logprobs = self._new_logprobs, []
        self._logprobs[section.index] += logprobs
        return self._event("response.output_text.delta", **self._at(section), delta=text, logprobs=logprobs)

    def _done(self, section: Section, item: dict[str, Any]) -> list[bytes]:
        at = self._at(section)
        if section.kind == "call":
            call = {"name": section.name, "arguments": item["arguments"]}
            return [self._event("response.function_call_arguments.done", **at, **call)]
        if section.kind == "reasoning":
            text_done = self._event("response.reasoning_text.done", **at, text=section.text)
        else:
            text = {"text": section.text, "logprobs": self._logprobs[section.index]}
            text_done = self._event("response.output_text.done", **at, **text)
        return [text_done, self._event("response.content_part.done", **at, part=item["content"][0])]


def _usage(given: dict[str, Any], num_thought: int) -> dict[str, Any]:
    return {
        "input_tokens": given["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": given["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": given["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_thought},
        "total_tokens": given["total_tokens"],
    }
