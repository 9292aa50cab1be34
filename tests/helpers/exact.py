"""Validation of responses against a client's typed models, more strictly than the client: no unknown field, and none
missing that OpenAI's published schema requires. Also the replies of a scripted model: a city, a call that rates it.

Invariants: fields that this server adds to the API are listed here by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter

OURS = frozenset(
    (
        "reasoning_content",
        "reasoning",
        "prompt_token_ids",
        "token_ids",
        "prompt_logprobs",
        "stop_reason",
        "matched_stop",
    )
)
OURS |= {"root", "max_model_len", "store", "name"}
"""vLLM's; and `store` of a response and `name` at the end of a call's arguments, which OpenAI's reference shows and
this version of the client has not."""

# required by the published schema, optional in the client's models
REQUIRED: dict[str, tuple[str, ...]] = {
    "ChatCompletion": ("choices", "created", "id", "model", "object"),
    "ChatCompletionChunk": ("choices", "created", "id", "model", "object"),
    "ChatCompletionMessage": ("role", "content", "refusal"),
    "Choice": ("index", "finish_reason"),
    "ChoiceLogprobs": ("content", "refusal"),
    "ChatCompletionTokenLogprob": ("token", "logprob", "bytes", "top_logprobs"),
    "TopLogprob": ("token", "logprob", "bytes"),
    "CompletionChoice": ("finish_reason", "index", "logprobs", "text"),
    "CompletionUsage": ("prompt_tokens", "completion_tokens", "total_tokens"),
    "Response": (
        *("id", "object", "created_at", "error", "incomplete_details", "instructions", "model", "tools", "output"),
        *("parallel_tool_calls", "metadata", "tool_choice", "temperature", "top_p"),
    ),
    "ResponseUsage": ("input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"),
    "ResponseOutputText": ("type", "text", "annotations", "logprobs"),
    "Model": ("id", "created", "object", "owned_by"),
}
M = TypeVar("M")
CITY = '{"name": "Paris", "rank": 1}'
CALL = '<tool_call>{"name": "rate", "arguments": {"rank": 7}}</tool_call>'
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"rank": {"type": "integer"}},
    "required": ["rank"],
    "additionalProperties": False,
}


class City(BaseModel):
    name: str
    rank: int


class rate(BaseModel):
    rank: int


def held(kind: type[M] | TypeAdapter[M], text: str | bytes) -> M:
    """Parse `text` as `kind`; asserts that no field is unknown or missing."""
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    parsed = adapter.validate_json(text, strict=True)
    faults = list(_faults(parsed, ""))
    assert not faults, f"{faults} in {text!r}"
    return parsed


def _faults(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        name, given = type(value).__name__, value.model_fields_set
        yield from (f"{where}.{one}: unknown" for one in (value.model_extra or {}) if one not in OURS)
        yield from (f"{where}.{one}: missing" for one in REQUIRED.get(name, ()) if one not in given)
        for one in given:
            yield from _faults(getattr(value, one, None), f"{where}.{one}")
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from _faults(one, f"{where}.{i}")
