"""Placement of requests in a Ray cluster: the engine pool's router over members that come and go, and the parts of a
request's body that it reads: the model and the beginning of the prompt, images included.

The router takes token ids. There is no tokenizer here, and bytes serve as well: prompts with a common prefix of bytes
have a common prefix of tokens. The parts that the next turn of a conversation repeats come first: tools, the system's
text, then the messages as sent.
Invariants: an index belongs to one member until that leaves; a member that left holds no request. An unreadable body
gives an empty prefix and no model, never an error: the server that gets it reports the error.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from minisgl.routing.api import RouterConfig
from minisgl.routing.backend import make_router
from minisgl.server.core.glance import WRONG, begin_of, decoded, text_of
from minisgl.step import Int32Array

MAX_BYTES = 1 << 16
"""Bytes of a prompt that are compared; longer common prefixes make no difference."""
PAGE_BYTES = 64
BYTES_PER_TOKEN = 4
"""Average of English text, to convert the size of a server's KV pool."""


class _Body(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    images: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()


class RoutingFields(msgspec.Struct, frozen=True):
    """Parts of a request for placement. `prefix`: first bytes of the prompt, [at most `MAX_BYTES`] int32."""

    model: str | None
    prefix: Int32Array


_NOTHING = RoutingFields(None, np.zeros(0, np.int32))


def routing_fields(body: bytes) -> RoutingFields:
    try:
        sent = decoded(body, _Body)
    except WRONG:
        return _NOTHING
    shared = (sent.tools, sent.system, sent.instructions, sent.messages, sent.input)
    fields = (*shared, sent.images, sent.prompt, sent.text, sent.input_ids)
    text = b"".join(begin_of(one, MAX_BYTES) for one in fields)[:MAX_BYTES]
    return RoutingFields(text_of(sent.model), np.frombuffer(text, np.uint8).astype(np.int32))


MAX_MEMBERS = 1024
M = TypeVar("M", bound=Hashable)


class Placement(Generic[M]):
    def __init__(self) -> None:
        self._router = make_router(RouterConfig("cache_aware", MAX_MEMBERS, page_size=PAGE_BYTES))
        self._numbers: dict[M, int] = {}
        self._members: dict[int, M] = {}

    def update(self, members: Mapping[M, Mapping[str, Any]]) -> None:
        """Set the current replicas, each with its last load (`server.health.load`; at first only `kv_tokens`)."""
        for gone in [one for one in self._numbers if one not in members]:
            self.leave(gone)
        for member, said in members.items():
            if member not in self._numbers:
                self._join(member, said)
            if member in self._numbers and "num_running" in said:
                self._router.report(self._numbers[member], int(said["num_waiting"]), int(said["num_running"]))

    def _join(self, member: M, said: Mapping[str, Any]) -> None:
        number = next((i for i in range(MAX_MEMBERS) if i not in self._members), None)
        if number is None:
            return  # it gets requests from Serve's own choice only
        self._numbers[member], self._members[number] = number, member
        kv_tokens = said.get("kv_tokens")
        pages = None if kv_tokens is None else max(1, int(kv_tokens) * BYTES_PER_TOKEN // PAGE_BYTES)
        self._router.engine_up(number, pages)

    def leave(self, member: M) -> None:
        if (number := self._numbers.pop(member, None)) is not None:
            del self._members[number]
            self._router.engine_down(number)

    def place(self, request: int, prefix: Int32Array) -> M | None:
        """Choose a member for the request and count it there. Return None if there are no members."""
        if not self._members:
            return None
        self._router.add(request, prefix)
        placed = self._router.place()
        return self._members.get(placed[0].engine) if placed else None

    def remove(self, request: int) -> None:
        self._router.remove(request)

    def load(self, member: M) -> int:
        number = self._numbers.get(member)
        return 0 if number is None else self._router.loads()[number]
