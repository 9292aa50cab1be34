"""Ways to carry the same facts between the HTTP process and the engine process.

Each codec takes what the sender has (numpy arrays of a step, the ids of a prompt) and gives back what the receiver
works with: a list of (request id, token, reason), or the prompt as an int32 array and the sampling fields. So none is
spared the conversion that its form needs.

Invariants: every codec carries the same facts; `benchmark.transport` checks it before the clock starts.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from minisgl.message import AddRequest, StepTokens, decode_from_engine, decode_to_engine, encode
from minisgl.sampling_params import SamplingParams
from minisgl.step import Int32Array, Int64Array

Row = tuple[int, int, int]


class Step(NamedTuple):
    """What a commit gives the sender, [rows] each."""

    step: int
    req_ids: Int64Array
    tokens: Int32Array
    reasons: Int32Array


class Prompt(NamedTuple):
    req_id: int
    tokens: Int32Array
    sampling: SamplingParams


Received = tuple[int, Int32Array, SamplingParams | dict[str, Any]]


class Codec(NamedTuple):
    encode_step: Callable[[Step], bytes]
    decode_step: Callable[[bytes], list[Row]]
    encode_prompt: Callable[[Prompt], bytes]
    decode_prompt: Callable[[bytes], Received]


# ----------------------------------------------------------------------------------------- typed: message/codec.py


def _typed_step(step: Step) -> bytes:
    return encode([StepTokens(step.step, step.req_ids.tobytes(), step.tokens.tobytes(), step.reasons.tobytes())])


def _step_typed(frame: bytes) -> list[Row]:
    (message,) = decode_from_engine(frame)
    assert isinstance(message, StepTokens)
    ids = np.frombuffer(message.req_ids, np.int64).tolist()
    tokens = np.frombuffer(message.tokens, np.int32).tolist()
    reasons = np.frombuffer(message.reasons, np.int32).tolist()
    return list(zip(ids, tokens, reasons, strict=True))


def _typed_prompt(prompt: Prompt) -> bytes:
    return encode([AddRequest(prompt.req_id, prompt.tokens.tobytes(), prompt.sampling)])


def _prompt_typed(frame: bytes) -> Received:
    (message,) = decode_to_engine(frame)
    assert isinstance(message, AddRequest)
    return message.req_id, np.frombuffer(message.tokens, np.int32), message.sampling


# ------------------------------------------------------------------------- generic: msgpack of dicts, one per request

_packer = msgspec.msgpack.Encoder()
_unpacker = msgspec.msgpack.Decoder()


def _as_dicts(step: Step) -> list[dict[str, Any]]:
    rows = zip(step.req_ids.tolist(), step.tokens.tolist(), step.reasons.tolist(), strict=True)
    return [{"type": "token", "req_id": i, "token": token, "reason": reason} for i, token, reason in rows]


def _as_dict(prompt: Prompt) -> dict[str, Any]:
    sampling = msgspec.structs.asdict(prompt.sampling)
    return {"type": "add", "req_id": prompt.req_id, "tokens": prompt.tokens.tolist(), "sampling": sampling}


def _rows_of(dicts: list[dict[str, Any]]) -> list[Row]:
    return [(one["req_id"], one["token"], one["reason"]) for one in dicts]


def _prompt_of(one: dict[str, Any]) -> Received:
    return one["req_id"], np.array(one["tokens"], np.int32), one["sampling"]


# ------------------------------------------------------------------------------------- pickle: objects, one per request


@dataclass(slots=True)
class TokenReply:
    req_id: int
    token: int
    reason: int


@dataclass(slots=True)
class NewPrompt:
    req_id: int
    tokens: Int32Array
    sampling: SamplingParams


def _pickled_step(step: Step) -> bytes:
    rows = zip(step.req_ids.tolist(), step.tokens.tolist(), step.reasons.tolist(), strict=True)
    return pickle.dumps([TokenReply(*row) for row in rows], pickle.HIGHEST_PROTOCOL)


def _step_pickled(frame: bytes) -> list[Row]:
    return [(reply.req_id, reply.token, reply.reason) for reply in pickle.loads(frame)]


def _prompt_pickled(frame: bytes) -> Received:
    found: NewPrompt = pickle.loads(frame)
    return found.req_id, found.tokens, found.sampling


# ------------------------------------------- the same two with the arrays left whole: what the types themselves bring


def _packed(step: Step) -> dict[str, Any]:
    return {
        "type": "step",
        "step": step.step,
        "req_ids": step.req_ids.tobytes(),
        "tokens": step.tokens.tobytes(),
        "reasons": step.reasons.tobytes(),
    }


def _rows_packed(one: dict[str, Any]) -> list[Row]:
    kinds = {"req_ids": np.int64, "tokens": np.int32, "reasons": np.int32}
    return list(zip(*(np.frombuffer(one[name], kind).tolist() for name, kind in kinds.items()), strict=True))


def _prompt_packed(one: dict[str, Any]) -> Received:
    return one["req_id"], np.frombuffer(one["tokens"], np.int32), one["sampling"]


CODECS: dict[str, Codec] = {
    "typed": Codec(_typed_step, _step_typed, _typed_prompt, _prompt_typed),
    "msgpack of dicts": Codec(
        lambda step: _packer.encode(_as_dicts(step)),
        lambda frame: _rows_of(_unpacker.decode(frame)),
        lambda prompt: _packer.encode(_as_dict(prompt)),
        lambda frame: _prompt_of(_unpacker.decode(frame)),
    ),
    "pickle": Codec(
        _pickled_step,
        _step_pickled,
        lambda prompt: pickle.dumps(NewPrompt(*prompt), pickle.HIGHEST_PROTOCOL),
        _prompt_pickled,
    ),
    "dict of packed arrays": Codec(
        lambda step: _packer.encode(_packed(step)),
        lambda frame: _rows_packed(_unpacker.decode(frame)),
        lambda prompt: _packer.encode(_as_dict(prompt) | {"tokens": prompt.tokens.tobytes()}),
        lambda frame: _prompt_packed(_unpacker.decode(frame)),
    ),
    "pickle of arrays": Codec(
        lambda step: pickle.dumps(tuple(step), pickle.HIGHEST_PROTOCOL),
        lambda frame: list(zip(*(array.tolist() for array in pickle.loads(frame)[1:]), strict=True)),
        lambda prompt: pickle.dumps(tuple(prompt), pickle.HIGHEST_PROTOCOL),
        pickle.loads,
    ),
}


def facts(received: Received) -> tuple[int, list[int], SamplingParams]:
    """What was received, in a form that can be compared."""
    req_id, tokens, sampling = received
    return req_id, tokens.tolist(), msgspec.convert(sampling, SamplingParams, from_attributes=True)
