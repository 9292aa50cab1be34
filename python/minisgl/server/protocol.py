"""From bytes to a checked request body.

Keeps true: every failure is an answer that names the field; a known field that this version cannot honour is refused
unless its value asks for nothing.
Doesn't know: what the fields mean (bodies.py).
"""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic_core
from pydantic import ValidationError

from minisgl.server.bodies import Body, GenerateRequest, GenerateSampling, Sampling
from minisgl.server.errors import ApiError, bad_value
from minisgl.server.refused import SAY_INSTEAD

B = TypeVar("B", bound=Body)


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
