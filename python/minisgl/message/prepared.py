"""Replies of the Python server to the gateway's questions about a request: all per-request work. The gateway does the
per-token work (`rust/minisgl-gateway/src/message/prepared.rs` reads these; docs/request.md#messages).

Invariants: fields are added at the end, with a new `SCHEMA_VERSION`; the bytes of each message are recorded
(`tests/message/golden_frames.py`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from minisgl.message.codec import encode_any
from minisgl.sampling_params import SamplingParams


class AnswerParts(msgspec.Struct, frozen=True, array_like=True):
    """Parser settings for a response's text.

    `tool_format`: index of the tool-call format in the extension's table, since names are ambiguous; `None` if no tool
    may be called. `thinking`: name of the reasoning markers; `None` if reasoning is not separated. `is_open`: whether
    the output begins within reasoning; `None`: it may open it. `schemas`: JSON with the tools' parameter schemas by
    name, or empty. `named_call`: the client chose the tool. `shows_thoughts`: the response includes reasoning.
    `think_end`: id of the token that ends reasoning, if one does. `shown`: ids of special tokens that appear in the
    text.
    """

    tool_format: int | None
    thinking: str | None
    is_open: bool | None
    schemas: str
    named_call: bool
    shows_thoughts: bool
    think_end: int | None
    shown: list[int]


class PreparedGeneration(msgspec.Struct, tag="generation", frozen=True, array_like=True):
    """Request for text generation whose response the gateway writes.

    `shape`, `stream`, `include_usage` (a last event with the usage) and `shows_logprobs` choose the format. `id`,
    `created` (Unix seconds) and `model` go into the response. `prompts`: int32 bytes of each, at least one token and
    fewer than the context; each gets `sampling.n` completions. `sampling` is checked, with its seed and adapter.
    `max_tokens`: each prompt's limit. `parts`: `None` if the text is not parsed. `priority`: smaller values go first.
    `key`: index of the client's API key (0: not in the key file); `key_name`: its name if there are several.
    `shortened_to`: the limits, if a busy server shortened the default. `timeout_s`: from the request's arrival to the
    end of its response; `None`: no limit. `headers`: names and values, without those for type, length and cache use.
    """

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
    """A complete error response. `headers` are those besides `content_type` and the length."""

    status: int
    content_type: str
    headers: list[tuple[str, str]]
    body: bytes


class PassOn(msgspec.Struct, tag="pass_on", frozen=True, array_like=True):
    """Order to proxy the request, unchanged, to the Python server."""


class Read(msgspec.Struct, tag="read", frozen=True, array_like=True):
    """Permission for the client to send its large body; only the request's headers were passed to Python so far."""


Prepared = PreparedGeneration | WholeAnswer | PassOn | Read


def encode(message: Prepared) -> bytes:
    """Return a frame with one message, without length prefix."""
    return encode_any([message])
