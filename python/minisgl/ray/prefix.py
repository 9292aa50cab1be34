"""Of a request's body, the model that it asks for and the text by whose beginning a replica is chosen.

The router of the engine pool takes token ids; here there is no tokenizer, and the bytes of a prompt serve as well: what
two prompts have in common at the beginning, their tokens have, too. What a conversation's next turn repeats stands
first: tools, the system's text, then the messages as they were sent.

Invariants: a body that says nothing useful, or is none, gives an empty prefix and no model, never an error: the server
that gets it has the words for what is wrong.
"""

from __future__ import annotations

import msgspec
import numpy as np

from minisgl.step import Int32Array

MAX_BYTES = 1 << 16
"""Of a prompt that are looked at; the pages of longer ones are the same from here on for who shares these."""
PAGE_BYTES = 64
BYTES_PER_TOKEN = 4
"""Of English text, to compare with what a server's cache holds."""


class _Body(msgspec.Struct):
    model: object = None
    stream: object = None
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()


class Seen(msgspec.Struct, frozen=True):
    """`prefix` [bytes of the prompt, at most `MAX_BYTES`] as int32."""

    model: str | None
    prefix: Int32Array


_NOTHING = Seen(None, np.zeros(0, np.int32))
_decode = msgspec.json.Decoder(_Body).decode


def look_at(body: bytes) -> Seen:
    try:
        found = _decode(body)
    except (msgspec.MsgspecError, ValueError):
        return _NOTHING
    fields = (found.tools, found.system, found.instructions, found.messages, found.input, found.prompt, found.text)
    text = b"".join(bytes(one) for one in (*fields, found.input_ids))[:MAX_BYTES]
    model = found.model if isinstance(found.model, str) else None
    return Seen(model, np.frombuffer(text, np.uint8).astype(np.int32))
