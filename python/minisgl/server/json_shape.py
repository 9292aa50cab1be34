"""How many values a large JSON body has, before it is parsed.

Parsing holds the interpreter from its beginning to its end, and makes an object of up to a hundred bytes of each value:
a body of millions of them would stop every stream for a second and take hundreds of megabytes. Text costs neither. So
values outside of texts are counted first, a stretch at a time, between which other threads run.

Keeps true: of valid JSON, what is inside a string counts for nothing.
Doesn't know: whether it is valid (the parser says), what the fields mean.
"""

from __future__ import annotations

import re

import pydantic_core

from minisgl.server.errors import ApiError

MAX_VALUES = 1 << 19  # or as many token ids as the context has
MAX_CONTAINERS = 1 << 17  # lists, objects and their fields
MORE_VALUES = 1 << 12  # beside a prompt of token ids
STRETCH = 1 << 16  # two at least: an escape is not split
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
# up to the string that does not end: looked for in itself once more, each quote in it would be one more beginning
_WHOLE_STRINGS = re.compile(rb'(?:[^"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
_REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


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
