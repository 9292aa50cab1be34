"""HTTP request: reading and checking its body, and the fields of its access line. Large bodies wait for turns, so that
the bytes in memory are bounded, whatever is sent.

JSON parsing holds the GIL from beginning to end, and makes an object of up to a hundred bytes of each value: a body of
millions of values would stop every stream for a second and take hundreds of megabytes. Strings cost neither. So
`check_shape` counts the values outside of strings before a large body is parsed, a stretch at a time, between which
other threads run.

Invariants: a body of at most `SMALL_BYTES` waits for no other; a slow sender delays others for `--slow-client-timeout`
at most; a body over the limit is refused without being buffered; every error names the field; a known field that this
version does not support is refused unless its value asks for nothing; no prompt and no output is logged unless
configured.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pydantic_core
from pydantic import ValidationError
from starlette.types import Message, Receive

from minisgl.config import Limits
from minisgl.sampling_params import BOUNDS, ParamError
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import ApiError, Names, bad_value, missing, renamed, wrong
from minisgl.server.core.fields import Body
from minisgl.server.core.resume import Resumable
from minisgl.server.core.surrogates import without_halves
from minisgl.server.core.unserved import unserved
from minisgl.server.core.waiting import Turns

B = TypeVar("B", bound=Body)

REQUEST = "minisgl.request"
"""Key of the ASGI scope: the `HttpRequest`, set by middleware.py."""
SMALL_BYTES = 1 << 16
STALLED_S = 5.0  # maximum silence of a body that others wait for
MAX_LOGGED_CHARS = 4096
MAX_DEPTH = 256  # deeper than the JSON parser accepts
STRETCH = 1 << 16  # at least 2, so that an escape is not split
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
# stops before an unterminated string, without backtracking into it
_WHOLE_STRINGS = re.compile(rb'(?:[^"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
_BRACKET_OR_STRING = re.compile(rb"[][{}]|" + _STRING.pattern, re.DOTALL)
_COLON = re.compile(rb"\s{0,64}:")
_REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_log = logging.getLogger("minisgl.access")


class ClientGone(Exception):
    """The client closed the connection; no response can be sent."""


@dataclass(slots=True)
class HttpRequest:
    """State of one HTTP request. `arrival_time` is `time.monotonic`; token counts are of all prompts and choices."""

    method: str
    path: str
    request_id: str
    content_length: int | None = None
    model: str = ""  # the served model or adapter
    body: bytearray = field(default_factory=bytearray)  # bytes received, until they are parsed
    arrival_time: float = field(default_factory=time.monotonic)
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    key: int = 0  # index of the caller's API key
    key_name: str | None = None  # if there is a key file
    shortened_to: str | None = None  # lengths, if --adaptive-max-tokens reduced them
    ttft_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None
    ignored: Sequence[str] = ()  # names of body fields without effect
    written: Names = ()  # aliases that the body uses
    resumable: Resumable | None = None  # if its stream has marks
    is_passed_on: bool = False  # forwarded to another server, which logs it
    is_large: bool = False  # the body is large: process it off the event loop
    submitted: asyncio.Event | None = None  # of a batch line: set once the engine has it
    prompt: str | None = None  # only with --log-prompts
    output: str | None = None
    _turns: Turns | None = None  # while the body holds a turn
    _held: int = 0

    @classmethod
    def of(cls, method: str, path: str, headers: Mapping[bytes, bytes]) -> HttpRequest:
        """Create a request; its id is the client's X-Request-Id if it is safe for logs and headers, else a new one."""
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        length = headers.get(b"content-length", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        return cls(method, path, request_id, int(length) if length.isdigit() else None)

    def add_output(self, text: str) -> None:
        """Append output for the log. Stops at `MAX_LOGGED_CHARS`, since `+=` copies the whole text."""
        if self.output is not None and len(self.output) < MAX_LOGGED_CHARS:
            self.output += text

    # -------------------------------------------------------------------------------------------------------- body

    async def read(self, receive: Receive | None, model: type[B], context: ServerContext) -> B:
        """Read and validate the body; call it once. `receive` is None if `body` is complete already. Raises
        `ClientGone` and `ApiError`: 413 over the limit, 408 if it arrives too slowly, 400 if it is invalid."""
        if receive is not None:
            await self.receive(receive, context.turns, context.limits)
        elif len(self.body) > SMALL_BYTES:
            await self._wait_for_turn(context.turns, len(self.body))
        if self.resumable is not None:
            self.resumable.decode_said(self.body)
        if context.config.log_prompts:
            self.prompt, self.output = self.body[:MAX_LOGGED_CHARS].decode(errors="replace"), ""
        data, self.body = self.body, bytearray()
        if self._turns is None:
            return self._parsed(data, model, context)
        self.is_large = True
        max_seq_len = context.info.max_seq_len

        def work() -> B:
            check_shape(data, max_seq_len)
            return self._parsed(data, model, context)

        return await context.prompts.run(work)

    def _parsed(self, body: bytearray, model: type[B], context: ServerContext) -> B:
        data = object_of(body)
        self.ignored = unserved(data, model, sees=context.info.sees)
        self.written = [(name, alias) for alias, name in model.ALIASES.items() if alias in data]
        with renamed(self.written):
            return checked(data, model)

    async def receive(self, receive: Receive, turns: Turns, limits: Limits) -> None:
        """Read the whole body into `body`. Raises `ClientGone` and `ApiError` 413 or 408."""
        max_bytes, timeout_s, announced = limits.max_body_bytes, limits.slow_client_timeout, self.content_length
        if self.resumable is not None:
            max_bytes += self.resumable.num_said_bytes
        if announced is not None and announced > max_bytes:
            raise too_large(announced, max_bytes)
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            message = await self._next(receive, turns, timeout_s)
            if message["type"] == "http.disconnect":
                raise ClientGone
            self.body += message.get("body", b"")
            size = len(self.body)
            if size > max_bytes:
                raise too_large(size, max_bytes)
            is_whole = not message.get("more_body", False)
            if size > SMALL_BYTES and self._turns is None:  # announced bytes take no memory yet
                await self._wait_for_turn(turns, size if is_whole else announced or max_bytes)
                began = clock()
            if is_whole:
                return
            if self._turns is not None and turns.num_waiting and clock() - began > timeout_s:
                raise too_slow(f"only {size} bytes arrived in {timeout_s:g} s, while other bodies wait")

    async def _next(self, receive: Receive, turns: Turns, timeout_s: float) -> Message:
        """Return the next ASGI message of the body. Raises `ApiError` 408 if nothing arrives for `timeout_s`, or for
        less (`STALLED_S`) while other bodies wait."""
        silent_s, step_s = 0.0, min(STALLED_S, timeout_s)
        while True:
            try:
                async with asyncio.timeout(step_s):
                    return await receive()
            except TimeoutError as error:
                silent_s += step_s
                keeps_others = self._turns is not None and turns.num_waiting
                if keeps_others or silent_s >= timeout_s:
                    others = ", while other bodies wait" if keeps_others else ""
                    reason = f"no data arrived for {silent_s:g} s after {len(self.body)} bytes{others}"
                    raise too_slow(reason) from error
                step_s = min(STALLED_S, timeout_s - silent_s)

    async def _wait_for_turn(self, turns: Turns, size: int) -> None:
        self._held = await turns.take(size, self.key)
        self._turns = turns

    def body_done(self) -> None:
        """Drop the body and end its turn; what the request keeps from here on is small. Idempotent."""
        self.body = bytearray()
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.give(self._held)

    # --------------------------------------------------------------------------------------------------------- log

    def line(self) -> dict[str, Any]:
        """Return the fields of the access line, without those that do not apply to this request."""
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status or "gone",  # the client disconnected before a response began
            "e2e_s": round(time.monotonic() - self.arrival_time, 4),
        }
        if self.key_name is not None:
            fields["key"] = self.key_name
        if self.prompt_tokens:
            fields |= {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "generated_tokens": self.generated_tokens,
            }
        if self.shortened_to is not None:
            fields["shortened_to"] = self.shortened_to
        if self.ttft_s is not None:
            fields["ttft_s"] = round(self.ttft_s, 4)
        if self.finish_reasons:
            fields["finish_reason"] = ",".join(sorted(set(self.finish_reasons)))
        for name in ("error", "prompt", "output"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value[:MAX_LOGGED_CHARS]
        return fields

    def log(self) -> None:
        _log.info("request", extra={"fields": self.line()})


def too_large(size: int, max_bytes: int) -> ApiError:
    return ApiError(413, f"body: at least {size} bytes: the limit is {max_bytes} bytes", code="body_too_large")


def too_slow(reason: str) -> ApiError:
    error = ApiError(408, f"body: {reason}", code="body_timeout")
    error.headers["connection"] = "close"
    return error


# ------------------------------------------------------------------------------------------------------- checking


def parse(body: bytes | bytearray, model: type[B]) -> B:
    """Parse and validate a body as `model`. Raises `ApiError` 400."""
    data = object_of(body)
    unserved(data, model)
    return checked(data, model)


def object_of(body: bytes | bytearray) -> dict[str, Any]:
    """Parse a body as a JSON object. Lone surrogates become U+FFFD: clients that split texts send them, and would send
    them again in each turn. Raises `ApiError` 400."""
    try:
        data = _from_json(body)
    except ValueError as error:
        try:
            data = _from_json(without_halves(body))
        except ValueError:
            raise ApiError(400, f"body: not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, str(ParamError("body", data, "must be a JSON object")), code="invalid_json")
    return data


def _from_json(body: bytes | bytearray) -> Any:
    return pydantic_core.from_json(body)  # accepts NaN, so that validation names its field


def checked(data: dict[str, Any], model: type[B]) -> B:
    """Resolve aliases in `data` and validate it as `model`. Raises `ApiError` 400."""
    inner = data.get("sampling_params")
    for one in (data, *(one for one in (inner if isinstance(inner, list) else [inner]) if isinstance(one, dict))):
        for alias, name in model.ALIASES.items():
            if (value := one.pop(alias, None)) is not None and one.setdefault(name, value) != value:
                raise bad_value(alias, value, f"differs from {name}, its other name: give one of them")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _explain(error, model, data) from error


def _explain(error: ValidationError, model: type[Body], data: dict[str, Any]) -> ApiError:
    """Convert pydantic's first error into an `ApiError` that names the client's field and all allowed types."""
    first_error = error.errors(include_url=False)[0]
    path = path_of(data, first_error["loc"], is_missing=first_error["type"] == "missing")
    field = ".".join(map(str, path)) or "body"
    if first_error["type"] in OF_ERRORS:
        return bad_value(field, first_error["input"], f"must be {allowed(model, path, data, first_error['type'])}")
    if first_error["type"] == "missing":
        return missing(field)
    if first_error["type"] == "too_long":
        return bad_value(field, len(first_error["input"]), f"at most {first_error['ctx']['max_length']} entries")
    reason = first_error["msg"][0].lower() + first_error["msg"][1:]
    return bad_value(field, first_error["input"], reason.replace("input should be ", "must be "))


def check_shape(body: bytes | bytearray, max_seq_len: int) -> None:
    """Check that a body has not too many values to parse. Raises `ApiError` 400. A body that is nested too deeply
    passes: the parser refuses it at the depth where it gets too deep."""
    most = max(BOUNDS.max_values, max_seq_len + BOUNDS.more_values)
    num_values = num_containers = depth = 0
    for begin, end in _stretches(body):
        if end - begin > STRETCH:
            continue  # a long string
        outside = _STRING.sub(b"", body[begin:end])
        depth += len(outside.translate(None, b"]}")) - len(outside.translate(None, b"[{"))
        if depth > MAX_DEPTH:
            return
        num_containers += len(outside) - len(outside.translate(None, b":[{"))
        num_values += len(outside) - len(outside.translate(None, b",:[{"))
        if num_values > most:
            raise _too_many(body, end, f"must have at most {most} values")
        if num_containers > BOUNDS.max_containers:
            raise _too_many(body, end, f"must have at most {BOUNDS.max_containers} lists, objects and fields")


def _stretches(body: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield consecutive (start, end) offsets of a JSON body. No string is split; a long one is a stretch by itself."""
    at = 0
    while at < len(body):
        whole = _WHOLE_STRINGS.match(body, at, min(at + STRETCH, len(body)))
        assert whole is not None  # may match the empty string
        begin, at = at, whole.end()
        if at == begin:
            at += 1
            while (rest := _REST_OF_STRING.match(body, at, min(at + STRETCH, len(body)))) is None:
                if at + STRETCH >= len(body):
                    return  # unterminated string: invalid JSON
                at += STRETCH - _splits_escape(body[at : at + STRETCH])
            at = rest.end()
        yield begin, at


def _splits_escape(stretch: bytes | bytearray) -> bool:
    """Return true if the stretch ends within an escape: its last byte is a backslash that escapes the next byte."""
    return (len(stretch) - len(stretch.rstrip(b"\\"))) % 2 == 1


def _too_many(body: bytes | bytearray, end: int, what: str) -> ApiError:
    """Return the error for too many values. It names the top-level field at offset `end`, found without parsing."""
    field, depth = "body", 0
    for begin, to in _stretches(body):
        if begin >= end:
            break
        if to - begin > STRETCH:
            places = [(begin, to)]
        else:
            places = [found.span() for found in _BRACKET_OR_STRING.finditer(body, begin, to)]
        for at, after in places:
            if body[at] in b"{[":
                depth += 1
            elif body[at] in b"}]":
                depth -= 1
            elif depth == 1 and _COLON.match(body, after):
                field = _name(body[at:after])
    return wrong(field, f"{what} in the body so far: send fewer in one request", "too_many_values")


def _name(written: bytes | bytearray) -> str:
    try:
        return str(pydantic_core.from_json(written))[:80]
    except ValueError:
        return "body"


Schema = dict[str, Any]
Part = str | int
_ONE_AND_MANY = {
    "string": ("text", "texts"),
    "integer": ("a whole number", "whole numbers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "true or false"),
    "object": ("an object", "objects"),
    "array": ("a list", "lists"),
}
OF_ERRORS = {
    "string_type": "string",
    "int_type": "integer",
    "int_from_float": "integer",
    "float_type": "number",
    "bool_type": "boolean",
    "list_type": "array",
    "dict_type": "object",
    "model_type": "object",
    "literal_error": "string",
}
"""Pydantic's errors for a value of the wrong type, with the JSON type that was expected."""


def path_of(given: Any, loc: Sequence[Part], *, is_missing: bool) -> list[Part]:
    """Return the path of a validation error in `given`: `loc` without the union tags that pydantic inserts.
    `is_missing`: the last part of `loc` is not in `given`."""
    path: list[Part] = []
    for i, part in enumerate(loc):
        is_there = part in given if isinstance(given, dict) else isinstance(given, list) and isinstance(part, int)
        if is_there:
            given = given[part]
        if is_there or (is_missing and i == len(loc) - 1):
            path.append(part)
    return path


def allowed(model: type[Body], path: Sequence[Part], given: Any, error: str) -> str:
    """Describe what `model` allows at `path`, where `given` has the wrong value. `error`: a key of `OF_ERRORS`."""
    root = _schema_of(model)
    schemas: list[Schema] = [root]
    for part in path:
        schemas = [one for schema in _matching(schemas, root, given, part) for one in _subschemas(schema, part)]
        given = given[part]
    left = list(_alternatives(schemas, root))
    left = [one for one in left if "pattern" not in one] or left  # do not propose types that are left out
    if not left or any(one.get("type") in _types_of(given) and not _names([one]) for one in left):
        left = [{"type": OF_ERRORS[error]}]  # the type is allowed, but not in this place
    *others, last = dict.fromkeys(kind for one in left for kind in _describe(one, root))
    return f"{', '.join(others)} or {last}" if others else last


@functools.cache
def _schema_of(model: type[Body]) -> Schema:
    return model.model_json_schema()


def _alternatives(schemas: Iterable[Schema], root: Schema) -> Iterator[Schema]:
    """Resolve references and unions of JSON schemas, and yield each alternative but null."""
    for one in schemas:
        if "$ref" in one:
            yield from _alternatives([root["$defs"][one["$ref"].rsplit("/", 1)[-1]]], root)
        elif choices := one.get("anyOf") or one.get("oneOf"):
            yield from _alternatives(choices, root)
        elif one.get("type") != "null":
            yield one


def _matching(schemas: Iterable[Schema], root: Schema, given: Any, part: Part) -> list[Schema]:
    """Return alternatives that fit the `type` of the object `given` (or its absence); all of them if none fits."""
    alternatives = list(_alternatives(schemas, root))
    if not isinstance(given, dict) or part == "type":
        return alternatives
    if "type" not in given:
        return [one for one in alternatives if "type" not in one.get("required", ())] or alternatives
    name = json.dumps(given["type"])

    def fits(one: Schema) -> bool:
        return name in _names(_alternatives([one.get("properties", {}).get("type", {})], root))

    return [one for one in alternatives if fits(one)] or alternatives


def _names(schemas: Iterable[Schema]) -> list[str]:
    return [json.dumps(name) for one in schemas for name in one.get("enum", [one["const"]] if "const" in one else [])]


def _subschemas(schema: Schema, part: Part) -> list[Schema]:
    if isinstance(part, int):
        schema_of_part = schema.get("items")
    else:
        schema_of_part = schema.get("properties", {}).get(part, schema.get("additionalProperties"))
    return [schema_of_part] if isinstance(schema_of_part, dict) else []


def _describe(schema: Schema, root: Schema, number: int = 0) -> list[str]:
    """Describe a JSON schema's type in words. `number`: 0 for singular, 1 for plural."""
    if names := _names([schema]):
        return names
    kind = schema.get("type", "")
    items = [one for item in _alternatives(_subschemas(schema, 0), root) for one in _describe(item, root, 1)]
    word = _ONE_AND_MANY[kind][number] if kind in _ONE_AND_MANY else "any value"
    return [f"{word} of {' and '.join(dict.fromkeys(items))}" if kind == "array" and items else word]


def _types_of(value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return ("integer", "number")
    words: dict[type[object], str] = {float: "number", str: "string", list: "array", dict: "object"}
    return (words.get(type(value), "null"),)
