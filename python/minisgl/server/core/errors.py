"""Errors as clients see them: OpenAI's `{"error": {message, type, param, code}}`, Anthropic's under /v1/messages, and
Ollama's under /api.

Invariants: every error response has the shape of its API; 422 is never used; the message names field, value and reason.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from minisgl.sampling_params import ParamError
from minisgl.server.core.fields import Place
from minisgl.server.core.streams import EVENTS, LINES, SSE_DONE, sse

INVALID = "invalid_request_error"
SERVER = "server_error"
RETRY_AFTER_S = 1
_CODES = {404: "not_found", 405: "method_not_allowed"}
NO_MODEL = ("model_not_found", 404)
"""Code and status for an unknown model."""
MESSAGES = "/v1/messages"
MODELS = "/v1/models"
RESPONSES = "/v1/responses"
FILES, BATCHES = "/v1/files", "/v1/batches"
OLLAMA = "/api/"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details of a refused `thread`; clients that read them send the whole conversation from then on."""


def is_anthropic(path: str) -> bool:
    """Return true if `path` is a route of Anthropic's API."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def is_ollama(path: str) -> bool:
    """Return true if `path` is a route of Ollama's API."""
    return path.startswith(OLLAMA)


FORM = "minisgl.form"
"""Key of the ASGI scope: a path, whose API decides the shape of errors, and the request id."""


class ApiError(Exception):
    """Error response with an HTTP status. `param` is the field, `code` the machine-readable reason."""

    def __init__(
        self, status: int, message: str, *, kind: str = INVALID, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers: dict[str, str] = {}
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @property
    def code(self) -> str | None:
        code: str | None = self.body["error"]["code"]
        return code

    def rename(self, written: str) -> None:
        """Replace the field's name in the error with `written`, the name that the client used."""
        detail = self.body["error"]
        given, detail["param"] = detail["param"], written
        if detail["message"].startswith(given):
            detail["message"] = written + detail["message"].removeprefix(given)

    def anthropic_body(self) -> dict[str, Any]:
        detail = self.body["error"]
        error = {"type": _ANTHROPIC_KINDS.get(self.status, INVALID), "message": detail["message"]}
        if detail["param"] == "thread":
            error["details"] = _NO_THREADS
        return {"type": "error", "error": error}

    def ollama_body(self) -> dict[str, Any]:
        return {"error": self.body["error"]["message"]}

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the error body in the shape of the API that `path` belongs to."""
        if is_anthropic(path):
            return self.anthropic_body()
        return self.ollama_body() if is_ollama(path) else self.body

    def response(self, path: str = "", request_id: str = "") -> Response:
        """Return the response to a request for `path`. Anthropic's bodies also have the request id."""
        body = self.body_for(path)
        if request_id and is_anthropic(path):
            body["request_id"] = request_id
        return Response(msgspec.json.encode(body), self.status, self.headers, media_type="application/json")

    def answer(self, scope: Mapping[str, Any]) -> Response:
        """Return the error as a response to the request of this ASGI scope."""
        return self.response(*scope.get(FORM, (scope["path"],)))


class WrittenError(ApiError):
    """Error about a field by the name that the client wrote, although an API converted the body."""

    @classmethod
    def of(cls, error: ParamError) -> WrittenError:
        return cls(400, str(error), param=error.field, code=error.code)

    def rename(self, written: str) -> None:
        """Keep the name."""


class TooLong(ApiError):
    """Error for a prompt that leaves no room for output, worded as clients of each API recognize it: LiteLLM by
    OpenAI's words, Claude Code by Anthropic's. `at_least`: there may be more tokens than `count`; `of_images`: how many
    of them images take."""

    def __init__(self, field: str, count: int, limit: int, *, at_least: bool = False, of_images: int = 0) -> None:
        super().__init__(400, "", param=field, code="context_length_exceeded")
        self._count, self._limit, self._at_least = count, limit, at_least
        self._of_images = f" ({of_images} of them of images)" if of_images else ""
        self.rename(field)

    def rename(self, written: str) -> None:
        tokens = f"at least {self._count}" if self._at_least else str(self._count)
        text = (
            f"This model's maximum context length is {self._limit} tokens. However, {written} has {tokens} tokens"
            f"{self._of_images} and the answer needs at least one: shorten {written}."
        )
        self.args = (text,)
        self.body["error"] |= {"message": text, "param": written}

    def anthropic_body(self) -> dict[str, Any]:
        body = super().anthropic_body()
        body["error"]["message"] = (
            f"prompt is too long: {self._count} tokens > {self._limit - 1} maximum{self._of_images}"
        )
        return body


def last_event(path: str, body: dict[str, Any], kind: str = EVENTS) -> bytes:
    """Return the last bytes of a failed stream of this path and content type. `body`: the error response's."""
    if is_anthropic(path):
        return sse(body, "error")
    if path == RESPONSES:
        detail = body["error"]
        event = {"type": "error", **{name: detail.get(name) for name in ("code", "message", "param")}}
        return sse({**event, "sequence_number": 0}, "error")
    if is_ollama(path) or kind.startswith(LINES):
        return msgspec.json.encode(body) + b"\n"
    return sse(body) + SSE_DONE


Names = Sequence[tuple[str, str]]
"""Regular expressions for field names of the chat API, and their replacements in another API."""


def renamed_field(names: Names, given: str) -> str:
    """Return the name by which the client knows the field `given` of the chat API, unless that is a `Place`."""
    if isinstance(given, Place):
        return given
    for pattern, name in names:
        written, num_found = re.subn(f"^(?:{pattern})(?![^.])", name, given)
        if num_found:
            return written
    return given


@contextlib.contextmanager
def renamed(names: Names) -> Iterator[None]:
    """Rename the field of any `ApiError` raised inside to the name that the client used."""
    try:
        yield
    except ApiError as error:
        given = error.body["error"]["param"]
        if given is not None and (written := renamed_field(names, given)) != given:
            error.rename(written)
        raise


def wrong(field: str, reason: str, code: str = "invalid_value", status: int = 400) -> ApiError:
    """Return an error for a field whose message does not repeat the value."""
    return ApiError(status, f"{field}: {reason}", param=field, code=code)


def missing(field: str) -> ApiError:
    return wrong(field, "required", "missing_required_parameter")


def bad_value(field: str, value: object, reason: str, code: str | None = "invalid_value") -> ApiError:
    return from_param_error(ParamError(field, value, reason, code))


def from_param_error(error: ParamError) -> ApiError:
    return ApiError(400, str(error), param=error.field, code=error.code or "invalid_value")


@contextlib.contextmanager
def param_errors() -> Iterator[None]:
    """Convert a `ParamError` raised inside into an `ApiError`."""
    try:
        yield
    except ParamError as error:
        raise from_param_error(error) from error


def engine_error(message: str) -> ApiError:
    """Return the error 500 for an accepted request whose forward pass failed; the client may retry."""
    return ApiError(500, message, kind=SERVER, code="engine_error")


def grammar_refused(message: str) -> ApiError:
    """Return the error 400 for a grammar that passed the server's checks and was refused by the engine process."""
    return ApiError(400, message, param="response_format", code="invalid_value")


def engine_gone(message: str) -> ApiError:
    return ApiError(503, message, kind=SERVER, code="engine_unavailable")


def _try_again(status: int, message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    error = ApiError(status, message, kind=SERVER, code=code)
    error.headers["retry-after"] = str(retry_after_s)
    return error


def loading(reason: str) -> ApiError:
    return _try_again(503, reason, "loading")


def draining() -> ApiError:
    return _try_again(503, "the server is shutting down: send the request to another one", "draining")


def queue_full(reason: str) -> ApiError:
    return _try_again(429, f"the server is busy: {reason}: try again later", "queue_full")


def key_limit(reason: str, retry_after_s: int) -> ApiError:
    """Return the error 429 for a caller that has reached a limit of its API key."""
    return _try_again(429, f"{reason}: try again in {retry_after_s} s", "key_limit", retry_after_s)


def model_not_loaded(reason: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """Return the error 503 for one of several models that is not loaded."""
    return _try_again(503, f"model: {reason}", "model_not_loaded", retry_after_s)


def too_late(timeout_s: float) -> ApiError:
    reason = f"the request took longer than {timeout_s:g} s (--request-timeout)"
    return ApiError(504, reason, kind=SERVER, code="request_timeout")


def internal_error(kind: str) -> ApiError:
    """Return the error 500 for a bug. `kind`: for example an exception's class name."""
    return ApiError(500, f"internal error: {kind}", kind=SERVER, code="internal_error")


def no_embedding() -> ApiError:
    return engine_error("the engine returned no embedding")


def too_many_dimensions(requested: int, has: int) -> ApiError:
    return bad_value("dimensions", requested, f"the model has {has} dimensions")


def _meant(path: str, known: Sequence[str]) -> str | None:
    """Return the route that a wrong path most likely means (a base URL with a doubled or missing `/v1`), or `None`."""
    if path.startswith("/v1/v1/"):
        return path.removeprefix("/v1")
    candidates = [one for one in known if one.count("/") > 1 and (path.endswith(one) or one.endswith(path))]
    return max(candidates, key=len) if path.count("/") != len(path) and candidates else None


def install_handlers(app: Starlette) -> None:
    """Install exception handlers that give every error of the app its API's shape."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.answer(request.scope)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"]
        message = f"{request.method} {path}: {error.detail}"  # not the URL: it would show the client's Host
        meant = None if error.status_code != 404 else _meant(path, [getattr(one, "path", "") for one in app.routes])
        answer = ApiError(error.status_code, message if meant is None else f"{message}: the path is {meant}")
        answer.body["error"]["code"] = _CODES.get(error.status_code)
        answer.headers.update(error.headers or {})  # 405 has Allow
        _, request_id = request.scope.get(FORM, ("", ""))
        return answer.answer(request.scope) if meant is None else answer.response(meant, request_id)

    async def on_bug(request: Request, error: Exception) -> Response:
        return internal_error(type(error).__name__).answer(request.scope)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
