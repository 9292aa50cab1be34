"""Errors as clients see them: OpenAI's `{"error": {message, type, param, code}}`, one place for all.

Keeps true: every answer that is not a success has this shape; 422 never; the message names field, value and reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from minisgl.sampling_params import ParamError

INVALID = "invalid_request_error"
SERVER = "server_error"
RETRY_AFTER_S = 1
_CODES = {404: "not_found", 405: "method_not_allowed"}


class ApiError(Exception):
    """An answer with an HTTP status. `param` is the field, `code` the machine-readable reason."""

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

    def response(self) -> Response:
        return Response(msgspec.json.encode(self.body), self.status, self.headers, media_type="application/json")


def bad_value(field: str, value: object, reason: str, code: str | None = "invalid_value") -> ApiError:
    return from_param_error(ParamError(field, value, reason, code))


def from_param_error(error: ParamError) -> ApiError:
    return ApiError(400, str(error), param=error.field, code=error.code or "invalid_value")


@contextlib.contextmanager
def param_errors() -> Iterator[None]:
    """A `ParamError` is an answer."""
    try:
        yield
    except ParamError as error:
        raise from_param_error(error) from error


def engine_error(message: str) -> ApiError:
    """The request was accepted and its forward failed: the client may try again."""
    return ApiError(500, message, kind=SERVER, code="engine_error")


def engine_gone(message: str) -> ApiError:
    return ApiError(503, message, kind=SERVER, code="engine_unavailable")


def _try_again(status: int, message: str, code: str) -> ApiError:
    error = ApiError(status, message, kind=SERVER, code=code)
    error.headers["retry-after"] = str(RETRY_AFTER_S)
    return error


def loading(reason: str) -> ApiError:
    return _try_again(503, reason, "loading")


def draining() -> ApiError:
    return _try_again(503, "the server is shutting down: send this to another one", "draining")


def queue_full(reason: str) -> ApiError:
    return _try_again(429, f"the server is busy: {reason}: try again later", "queue_full")


def too_late(timeout_s: float) -> ApiError:
    reason = f"the request took longer than {timeout_s:g} s (--request-timeout)"
    return ApiError(504, reason, kind=SERVER, code="request_timeout")


def internal_error(error: Exception) -> ApiError:
    return ApiError(500, f"internal error: {type(error).__name__}", kind=SERVER, code="internal_error")


def install_handlers(app: FastAPI) -> None:
    """Give every error of the app the one shape."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        answer = ApiError(error.status_code, message, code=_CODES.get(error.status_code))
        answer.headers.update(error.headers or {})  # 405 says what is allowed
        return answer.response()

    async def on_bug(_: Request, error: Exception) -> Response:
        return internal_error(error).response()

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
