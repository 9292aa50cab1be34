"""What Python says of a request that the gateway asks about: the whole of what happens once a request. The gateway does
what happens once a token (`rust/minisgl-gateway/src/message/prepared.rs` reads it; docs/request.md#messages).

Invariants: fields are added at the end, with a new `SCHEMA_VERSION`; the bytes of each message are recorded
(`tests/message/golden_frames.py`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from minisgl.message.codec import encode_any
from minisgl.sampling_params import SamplingParams


class AnswerParts(msgspec.Struct, frozen=True, array_like=True):
    """How an answer's text is taken apart.

    `tool_format`: the place of the format of calls in the extension's table, for two have the same name; None where no
    tool may be called. `thinking`: the name of the markers around reasoning, None where it is not told from the
    content; `is_open`: whether the answer begins within reasoning, None: it may open it. `schemas`: JSON, the schemas
    of tools' parameters by name, or empty. `named_call`: the caller chose the tool. `shows_thoughts`: reasoning is part
    of the answer. `think_end`: the id of the token that ends reasoning, if one does. `shown`: ids of special tokens
    that are text."""

    tool_format: int | None
    thinking: str | None
    is_open: bool | None
    schemas: str
    named_call: bool
    shows_thoughts: bool
    think_end: int | None
    shown: list[int]


class PreparedGeneration(msgspec.Struct, tag="generation", frozen=True, array_like=True):
    """Text is to be generated, and the gateway writes the answer.

    `shape`: which of the answers it writes; `stream`, `include_usage` (a last event has the usage), `shows_logprobs`:
    how. `id`, `created` (Unix seconds) and `model` stand in the answer. `prompts`: int32 bytes of each, at least one
    token and fewer than the context has; each has `sampling.n` answers. `sampling` is checked, with its seed and its
    adapter; `max_tokens`: the limit of each prompt's answers. `parts`: None, the answer is its text. `priority`:
    smaller numbers go first. `key`: number of the caller's API key, 0: none of the key file; `key_name`: where there
    are several. `shortened_to`: the limits, where a busy server shortened the default. `timeout_s`: from the request's
    arrival to the end of its answer, None: without a limit. `headers`: names and values of the answer's headers, beside
    those that say its type, length and use of the cache."""

    shape: Literal["chat", "completion", "generate"]
    stream: bool
    include_usage: bool
    shows_logprobs: bool
    id: str
    created: int
    model: str
    prompts: list[bytes]
    sampling: SamplingParams
    max_tokens: list[int]
    parts: AnswerParts | None
    priority: int
    key: int
    key_name: str | None
    shortened_to: str | None
    timeout_s: float | None
    request_id: str
    headers: list[tuple[str, str]]


class WholeAnswer(msgspec.Struct, tag="whole", frozen=True, array_like=True):
    """The whole answer: an error. `headers` are those beside `content_type` and the length."""

    status: int
    content_type: str
    headers: list[tuple[str, str]]
    body: bytes


class PassOn(msgspec.Struct, tag="pass_on", frozen=True, array_like=True):
    """The Python server answers: the gateway passes the request on, unchanged."""


class Read(msgspec.Struct, tag="read", frozen=True, array_like=True):
    """The caller may send its large body, of which only the head was asked."""


Prepared = PreparedGeneration | WholeAnswer | PassOn | Read


def encode(message: Prepared) -> bytes:
    """A frame of one message, without its length."""
    return encode_any([message])
