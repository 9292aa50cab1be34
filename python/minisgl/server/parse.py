"""From bytes to a checked request body.

Parsing holds the interpreter from its beginning to its end, and makes an object of up to a hundred bytes of each value:
a body of millions of them would stop every stream for a second and take hundreds of megabytes. Text costs neither. So
`check_shape` counts the values outside of texts before a large body is parsed, a stretch at a time, between which other
threads run.

Keeps true: every failure is an answer that names the field; a known field that this version cannot honour is refused
unless its value asks for nothing; of valid JSON, what is inside a string counts for no value.
Doesn't know: what the fields mean (bodies.py).
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import pydantic_core
from pydantic import ValidationError

from minisgl.server.bodies import Body, GenerateRequest, GenerateSampling, Sampling
from minisgl.server.errors import ApiError, bad_value
from minisgl.server.refused import SAY_INSTEAD

B = TypeVar("B", bound=Body)
MAX_VALUES = 1 << 19  # or as many token ids as the context has
MAX_CONTAINERS = 1 << 17  # lists, objects and their fields
MORE_VALUES = 1 << 12  # beside a prompt of token ids
STRETCH = 1 << 16  # two at least: an escape is not split
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
# up to the string that does not end: looked for in itself once more, each quote in it would be one more beginning
_WHOLE_STRINGS = re.compile(rb'(?:[^"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
_REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def parse(body: bytes | bytearray, model: type[B]) -> B:
    """Raises `ApiError` 400."""
    try:
        data = pydantic_core.from_json(body)  # NaN is let in here, for the field that holds it to be named
    except ValueError as error:
        raise ApiError(400, f"body: not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, f"body: must be a JSON object, not {type(data).__name__}", code="invalid_json")
    _refuse_not_yet(data, model)
    if isinstance(inner := data.get("sampling_params"), dict):
        _refuse_not_yet(inner, GenerateSampling, "sampling_params.")
    try:
        found = model.model_validate(data)
    except ValidationError as error:
        raise _explain(error) from error
    _check_response_format(found)
    return found


def _check_response_format(body: Body) -> None:
    inner = body.sampling_params if isinstance(body, GenerateRequest) else None
    for found in (body, inner):
        if isinstance(found, Sampling) and found.response_format and found.response_format.type != "text":
            reason = "only 'text' is supported by this version: structured output is not"
            raise bad_value("response_format", found.response_format.type, reason, "unsupported_value")


def _refuse_not_yet(data: dict[str, Any], model: type[Body], prefix: str = "") -> None:
    for field, nothing in model.NOT_YET.items():
        value = data.get(field)
        if value is not None and not any(value == one and type(value) is type(one) for one in nothing):
            reason = "not supported by this version"
            if (instead := SAY_INSTEAD.get(field, "")) in model.model_fields:
                reason += f": use {instead}"
            raise bad_value(prefix + field, value, reason, "unsupported_value")


def _explain(error: ValidationError) -> ApiError:
    """Pydantic's first finding, under the name that clients know."""
    found = error.errors(include_url=False)[0]
    # the tags of unions are in the path too; they are no identifiers
    field = ".".join(str(part) for part in found["loc"] if isinstance(part, int) or part.isidentifier()) or "body"
    if found["type"] == "missing":
        return ApiError(400, f"{field}: required", param=field, code="missing_required_parameter")
    if found["type"] == "too_long":
        return bad_value(field, len(found["input"]), f"at most {found['ctx']['max_length']} entries")
    return bad_value(field, found["input"], found["msg"][0].lower() + found["msg"][1:])


# ---------------------------------------------------------------------------------------------------- large bodies


def check_shape(body: bytes | bytearray, max_seq_len: int) -> None:
    """Raises `ApiError` 400 for a body that would take too long to parse."""
    most = max(MAX_VALUES, max_seq_len + MORE_VALUES)
    num_values = num_containers = at = 0
    in_string = False
    while at < len(body):
        end = min(at + STRETCH, len(body))
        if in_string:
            found = _REST_OF_STRING.match(body, at, end)
            in_string = found is None
            if found is not None:
                at = found.end()
            elif end == len(body):
                return  # not valid
            else:
                at = end - _splits_escape(body[at:end])
            continue
        whole = _WHOLE_STRINGS.match(body, at, end)
        assert whole is not None  # it may match nothing
        outside = _STRING.sub(b"", whole[0])
        in_string = whole.end() < end
        at = whole.end() + in_string
        num_containers += len(outside) - len(outside.translate(None, b":[{"))
        num_values += len(outside) - len(outside.translate(None, b",:[{"))
        if num_values > most:
            raise _too_many(body[:at], f"more than {most} values")
        if num_containers > MAX_CONTAINERS:
            raise _too_many(body[:at], f"more than {MAX_CONTAINERS} lists, objects and fields")


def _splits_escape(stretch: bytes | bytearray) -> bool:
    """Whether its last character is a backslash that belongs to the next one."""
    return (len(stretch) - len(stretch.rstrip(b"\\"))) % 2 == 1


def _too_many(begin: bytes | bytearray, what: str) -> ApiError:
    """Names the field in which `begin` ends."""
    try:
        data = pydantic_core.from_json(begin, allow_partial=True)
    except ValueError:
        data = None
    field = str([*data][-1])[:80] if isinstance(data, dict) and data else "body"
    text = f"{field}: {what} up to here in the body: send fewer in one request"
    return ApiError(400, text, param=field, code="too_many_values")
