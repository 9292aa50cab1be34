"""HTTP responses, and the comparison of the responses of two servers to one request.

Ids, times, and the grouping of tokens into events may differ: the texts of a choice are joined, the rest is in order.
"""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.http_requests import Request
from tests.helpers.seconds import WAIT_S

_ID = re.compile(r"\b(msg_|resp_|rs_|fc_|fco_|ctc_|chatcmpl-|cmpl-|gen-|req-|call_)[0-9a-f]{24,32}\b")
TIMES = ("date",)
CLOCKS = ("created", "created_at", "completed_at")
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content")  # of log probabilities
OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")  # with the first event of a choice
RANDOM = (
    "text",
    "content",
    "token_ids",
    "logprobs",
    "completion_tokens",
    "total_tokens",
    "finish_reason",
    "receipt",
)


@dataclass
class Answer:
    """HTTP response. `body` is without its framing. `closed`: the server closed the connection after it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    closed: bool
    num_interim: int = 0

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")


@dataclass
class Client:
    """Client that uses one connection at a time to a server, each until it is closed."""

    address: tuple[str, int]
    _socket: socket.socket | None = None
    _left: bytes = field(default=b"")

    def send(self, request: Request) -> None:
        """Send a request, over a new connection if the server has closed the last one."""
        if self._socket is not None and self._is_closed():
            self.close()
        if self._socket is None:
            self._socket = socket.create_connection(self.address, WAIT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(request.raw())

    def receive(self, request: Request) -> Answer | None:
        """Receive the response to a request; `None` if the server closed the connection without one."""
        assert self._socket is not None
        num_interim = 0
        while True:
            head = self._until(b"\r\n\r\n")
            if not head:
                self.close()
                return None
            first, *lines = head.decode("latin-1").split("\r\n")
            status = int(first.split(" ")[1])
            if status >= 200:
                break
            num_interim += 1
        headers = [(name.lower(), value.strip()) for name, _, value in (one.partition(":") for one in lines if one)]
        answer = Answer(status, headers, b"", False, num_interim)
        if request.method != "HEAD" and status not in (204, 304):
            answer.body = self._body(answer)
        answer.closed = answer.header("connection") == "close" or request.version == "HTTP/1.0"
        if answer.closed or request.cuts:
            answer.closed = answer.closed or self._is_closed()
            self.close()
        return answer

    def ask(self, request: Request) -> Answer | None:
        self.send(request)
        return self.receive(request)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._left = None, b""

    def _body(self, answer: Answer) -> bytes:
        if "chunked" in answer.header("transfer-encoding"):
            body = b""
            while size := int(self._until(b"\r\n"), 16):
                body += self._exactly(size)
                assert self._exactly(2) == b"\r\n"
            assert self._until(b"\r\n") == b"\r\n"
            return body
        if length := answer.header("content-length"):
            return self._exactly(int(length))
        body, self._left = self._left, b""
        while part := self._receive():
            body += part
        return body

    def _is_closed(self) -> bool:
        assert self._socket is not None
        if self._left:
            return False
        self._socket.setblocking(False)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._socket.settimeout(WAIT_S)

    def _receive(self) -> bytes:
        assert self._socket is not None
        try:
            return self._socket.recv(65536)
        except ConnectionResetError:
            return b""

    def _until(self, mark: bytes) -> bytes:
        """Return the bytes up to and including `mark`; empty if the connection has ended."""
        while (at := self._left.find(mark)) < 0:
            part = self._receive()
            if not part:
                assert not self._left, f"it ends within {self._left!r}"
                return b""
            self._left += part
        data, self._left = self._left[: at + len(mark)], self._left[at + len(mark) :]
        return data

    def _exactly(self, size: int) -> bytes:
        while len(self._left) < size:
            part = self._receive()
            assert part, f"it ends after {len(self._left)} of {size} bytes: {self._left[:2000]!r}"
            self._left += part
        data, self._left = self._left[:size], self._left[size:]
        return data


# --------------------------------------------------------------------------------------------------- what is the same


def differ(one: Answer | None, other: Answer | None, request: Request) -> bool:
    """Return true if the responses of two servers differ in anything that should be equal."""
    first, second = Comparable(one, request), Comparable(other, request)
    plain = [(first.plain[i], second.plain[i]) for i in first.plain.keys() & second.plain.keys()]
    return first.parts != second.parts or any(ours != theirs for ours, theirs in plain)


class Comparable:
    """Comparable form of a response. `parts` are equal for equal responses. `plain` are a stream's events with nothing
    but text, by choice, without their texts: a choice has none if all of its tokens arrived together."""

    def __init__(self, answer: Answer | None, request: Request) -> None:
        self.parts: dict[str, Any] = {}
        self.plain: dict[int, Any] = {}
        self._is_seeded = request.is_seeded
        if answer is None:
            return
        given = {value for name, value in request.headers if name.lower() == "x-request-id"}
        headers = [(name, _known(name, value, given)) for name, value in answer.headers if name not in TIMES]
        if not request.is_seeded:  # another text has another length
            headers = [(name, "" if name == "content-length" else value) for name, value in headers]
        self.parts |= {"status": answer.status, "headers": sorted(headers)}
        self.parts |= {"closed": answer.closed, "interim": answer.num_interim}
        kind = answer.header("content-type")
        if kind.startswith("text/event-stream") and answer.body.startswith(b"event: "):
            self.parts["named"] = _named(answer.body)
        elif kind.startswith("text/event-stream"):
            self._take_stream([_event(block) for block in _blocks(answer.body, b"\n\n")])
        elif kind.startswith("application/x-ndjson"):
            self._take_stream([_plain(json.loads(line)) for line in _blocks(answer.body, b"\n")])
        elif kind == "application/json" and answer.body:
            found = _plain(json.loads(answer.body))
            self.parts["json"] = _ordered(found if request.is_seeded else _without_texts(found))
        else:
            self.parts["body"] = answer.body

    def _take_stream(self, events: list[Any]) -> None:
        """Collect the events of a stream by choice: joined texts and lists, and the events without them; then the
        events of no choice. `usage` in a choice's events is the running total of all choices, so the last one counts.
        """
        joined: dict[int, dict[str, Any]] = {}
        shapes: dict[int, list[Any]] = {}
        others: list[Any] = []
        usage: Any = None
        for event in events:
            index = _choice(event)
            if index is None:
                others.append(_ordered(event))
                continue
            assert not others, "an event of a choice behind those of all"
            of_choice = shapes.setdefault(index, [])
            shape, is_plain = _taken_apart(event, joined.setdefault(index, {}))
            usage = joined[index].pop("usage", usage)  # of all choices
            if is_plain:
                self.plain[index] = shape
            else:
                of_choice.append(shape)
        self.parts["joined"] = joined if self._is_seeded else sorted(joined)
        self.parts["usage"] = usage if self._is_seeded else None
        self.parts["events"] = shapes if self._is_seeded else None
        self.parts["others"] = others if self._is_seeded else len(others)


def _known(name: str, value: str, given: set[str]) -> str:
    if name in ("x-request-id", "request-id") and value not in given:
        return _ID.sub(r"\1", value)
    return ", ".join(sorted(value.split(", "))) if name == "allow" else value


def _blocks(body: bytes, mark: bytes) -> list[bytes]:
    blocks = body.split(mark)
    assert blocks.pop() == b"", f"an event without its end: {body[-200:]!r}"
    return blocks


def _named(body: bytes) -> list[Any]:
    """Return the events of a stream with named events; consecutive deltas of one part are joined."""
    events: list[Any] = []
    for at, block in enumerate(_blocks(body, b"\n\n")):
        name, data = block.split(b"\n")
        event = _plain(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + event["type"].encode()
        assert event.pop("sequence_number", at) == at
        last = events[-1] if events else {}
        if event["type"].endswith("delta") and "delta" in last and _head(event) == _head(last):
            for key, more in _pieces(event).items():
                _place(last)[key] += more
            if "logprobs" in event:
                last["logprobs"] += event["logprobs"]
        else:
            events.append(event)
    return [_ordered(event) for event in events]


def _place(event: Any) -> Any:
    """Return the object of an event that contains its deltas."""
    return event["delta"] if isinstance(event["delta"], dict) else event


def _pieces(event: Any) -> dict[str, Any]:
    return {key: one for key, one in _place(event).items() if key in ("text", "thinking", "partial_json", "delta")}


def _head(event: Any) -> Any:
    pieces = _pieces(event)
    return [event["type"], event.get("index", event.get("output_index")), sorted(pieces)] if pieces else event


def _event(block: bytes) -> Any:
    assert block.startswith(b"data: ") and b"\n" not in block, block
    return "[DONE]" if block == b"data: [DONE]" else _plain(json.loads(block[6:]))


def _plain(value: Any) -> Any:
    """Return the value with ids and times replaced by placeholders."""
    if isinstance(value, dict):
        return {key: "TIME" if key in CLOCKS and type(one) is int else _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return _ID.sub(r"\1", value) if isinstance(value, str) else value


def _ordered(value: Any) -> Any:
    """Return the value with objects as lists of pairs, so that the order of keys is compared, too."""
    if isinstance(value, dict):
        return [(key, _ordered(one)) for key, one in value.items()]
    return [_ordered(one) for one in value] if isinstance(value, list) else value


def _without_texts(value: Any) -> Any:
    """Return the value without anything that depends on an unset seed, such as keys only present after a stop."""
    if isinstance(value, dict):
        pairs = ((key, one) for key, one in value.items() if key != "matched_stop")
        return {key: None if key in RANDOM else _without_texts(one) for key, one in pairs}
    return [_without_texts(one) for one in value] if isinstance(value, list) else value


def _choice(event: Any) -> int | None:
    if isinstance(event, dict) and ("text_delta" in event or event.get("event") == "done"):
        return 0
    if isinstance(event, dict) and (choices := event.get("choices")):
        assert len(choices) == 1
        return int(choices[0]["index"])
    return None


def _grow(runs: list[list[Any]], kind: str, text: str) -> None:
    """Append a text to the runs, joined with the last run if that has the same kind."""
    if runs and runs[-1][0] == kind:
        runs[-1][1] += text
    elif text:
        runs.append([kind, text])


def _taken_apart(event: Any, parts: dict[str, Any]) -> tuple[Any, bool]:
    """Return the event without the parts that depend on how many tokens arrived together, which are added to `parts`;
    and true if it contains nothing but text."""
    shape = json.loads(json.dumps(event))
    choice = shape["choices"][0] if "choices" in shape else shape
    place = choice.get("delta", choice)
    ends = choice.get("finish_reason") is not None
    is_plain = not ends and "role" not in place
    runs = parts.setdefault("runs", [])
    for call in place.get("tool_calls") or ():
        if "id" in call:
            runs.append(["call", call["index"]])
            is_plain = False
        else:
            _grow(runs, f"arguments {call['index']}", call["function"]["arguments"])
            del place["tool_calls"]
    for name in ("content", "text", "text_delta", "reasoning_content", "reasoning"):
        if isinstance(place.get(name), str):
            _grow(runs, name, place[name]) if name != "reasoning" else None
            del place[name]  # the last event has some if not all came before
    for holder in (choice, shape):
        for name in OF_PROMPT:
            if name in holder:
                parts[name] = holder.pop(name)
        if isinstance(holder.get("token_ids"), list):
            parts["token_ids"] = parts.get("token_ids", []) + holder.pop("token_ids")
    if isinstance(found := choice.get("logprobs"), dict):
        for name in LISTS:
            if isinstance(found.get(name), list):
                parts[name] = parts.get(name, []) + found.pop(name)
        if is_plain and found == {"refusal": None}:
            choice["logprobs"] = None  # of parts that came together, the first has all
    if isinstance(shape.get("usage"), dict):
        parts["usage"] = shape.pop("usage")
    return _ordered(shape), is_plain
