"""The routes of an HTTP application besides `middleware.Posts`: Starlette's, with a decorator for handlers.

Invariants: a path is served as it is written, without a redirect to one with another last slash; a GET route also
answers HEAD.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

Answering = TypeVar("Answering", bound=Callable[..., Awaitable[Response]])
"""A handler: it is called with the request, and with each parameter of the path by name."""


class Routes(Starlette):
    """An ASGI application of handlers by path and method."""

    def __init__(self) -> None:
        super().__init__()
        self.router.redirect_slashes = False

    def on(self, path: str, *methods: str) -> Callable[[Answering], Answering]:
        """Return a decorator that adds a handler of `methods` at `path`, such as "/v1/files/{file_id}"."""

        def add(handler: Answering) -> Answering:
            async def answer(request: Request) -> Response:
                return await handler(request, **request.path_params)

            self.add_route(path, answer, list(methods))
            return handler

        return add
