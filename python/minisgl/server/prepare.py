"""Prepares text requests for the gateway: everything that is done once per request, with the functions of the Python
front end.

Invariants: every question of the gateway gets one answer; questions are answered on the event loop, and those that
arrive together are read together; a request that only the Python server can answer is forwarded to it before its prompt
is encoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from minisgl.message.prepared import PassOn, Prepared, PreparedGeneration, Read, WholeAnswer, encode
from minisgl.server.core.admission import Admission
from minisgl.server.core.callers import Pairs
from minisgl.server.core.errors import ApiError
from minisgl.server.core.formatter import Formatter
from minisgl.server.core.middleware import CheckedRequest, Middleware, Posts
from minisgl.server.core.request import HttpRequest

if TYPE_CHECKING:
    from minisgl._rust import Gateway

WOKEN_BYTES = 4096
IMAGES_BYTES = 1 << 20
"""Size from which a body to a model that sees is forwarded to the Python server without being read here."""
_TOLD_APART = (b"content-length", b"content-type")
_log = logging.getLogger("minisgl.server")


class Preparing:
    """Answers the questions of one gateway between `start` and `stop`, which are called on the event loop."""

    def __init__(self, gateway: Gateway, middleware: Middleware, posts: Posts) -> None:
        self._gateway = gateway
        self._middleware = middleware
        self._posts = posts
        self._context = posts.context
        self._fd = gateway.questions_fd()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by question id

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._fd, self._read_questions)

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)

    def _read_questions(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe may be empty already
            os.read(self._fd, WOKEN_BYTES)
        loop = asyncio.get_running_loop()
        withdrawn = set(self._gateway.withdrawn())
        for number in withdrawn & self._tasks.keys():
            self._tasks[number].cancel()  # gives back its turn, its thread and its count
        for number, method, target, headers, body in self._gateway.questions():
            if number not in withdrawn:
                self._tasks[number] = loop.create_task(self._answer(number, method, target, headers, body))
                self._tasks[number].add_done_callback(lambda _, number=number: self._tasks.pop(number))  # type: ignore[misc]

    async def _answer(self, number: int, method: str, target: str, headers: Pairs, body: bytes | None) -> None:
        admitted = self._middleware.admit(method, "1.1", target, headers)
        is_head = body is None
        admitted.request.body += body or b""
        del body  # may be large, and wait long for its turn
        try:
            prepared = await self._prepared(admitted, is_head)
            if self._gateway.answer(number, encode(prepared)) and isinstance(prepared, WholeAnswer):
                admitted.request.log()
        except Exception:
            _log.exception("a bug in what the gateway asks about a POST %s", target)
            self._gateway.answer(number, encode(PassOn()))  # the Python server will report the error

    async def _prepared(self, admitted: CheckedRequest, is_head: bool) -> Prepared:
        """Decide how the gateway handles a request: generate, send a complete response, or pass it on to Python.
        `is_head`: the body has not arrived yet."""
        request, early = admitted.request, admitted.early
        if is_head:
            return Read() if early is None and not self._has_images(request) else PassOn()
        if early is None and (request.resumable is not None or self._context.config.log_prompts):
            return PassOn()
        if early is None:
            try:
                answer = await self._posts.prepare(request, None, admitted.path, _is_shown_by_gateway)
                if not isinstance(answer, Formatter):
                    return PassOn()
                if (generation := self._generation(request, answer, admitted.more)) is not None:
                    return generation
                return PassOn()
            except ApiError as error:
                request.error = error.code
                early = error.response(admitted.path)
        request.status = early.status_code
        return _whole(early, admitted.more)

    def _has_images(self, request: HttpRequest) -> bool:
        """Return true if the body is so large that it has images, if the model sees any."""
        info = self._context.client.info
        return info is not None and info.sees and (request.content_length or 0) > IMAGES_BYTES

    def _generation(self, request: HttpRequest, answer: Formatter, more: Pairs) -> PreparedGeneration | None:
        wanted, shown = answer.wanted, answer.for_gateway()
        if shown is None or wanted.only_prompt or wanted.receipts is not None or wanted.images:
            return None
        context = self._context
        admission = Admission.of(context, request, wanted)
        sampling = admission.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
        return PreparedGeneration(
            shown.shape,
            answer.stream,
            shown.include_usage,
            shown.shows_logprobs,
            shown.id,
            shown.created,
            shown.model,
            [prompt.tobytes() for prompt in wanted.prompts],
            sampling,
            admission.lengths.by_prompt,
            shown.parts,
            wanted.priority,
            request.key,
            request.key_name,
            request.shortened_to,
            context.limits.request_timeout,
            request.request_id,
            _texts([*more, *answer.headers]),
        )


def _texts(pairs: Pairs) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in pairs]


def _whole(answer: Response, more: Pairs) -> WholeAnswer:
    given = {name for name, _ in answer.raw_headers}
    headers = [one for one in answer.raw_headers if one[0] not in _TOLD_APART]
    headers += [one for one in more if one[0] not in given]
    return WholeAnswer(answer.status_code, answer.headers.get("content-type", ""), _texts(headers), bytes(answer.body))


def _is_shown_by_gateway(body: Any) -> bool:
    """Return false if the body has images or a field that needs the Python server's formatter; it is then not prepared
    twice."""
    if any(message.images() for message in getattr(body, "messages", None) or ()):
        return False
    asks = any(getattr(body, name, None) for name in _ASKS) or any(getattr(body, n, None) is not None for n in _GIVEN)
    return not asks and body.limit() != 0


_ASKS = ("return_token_ids", "return_tokens_as_token_ids", "continuous_usage", "receipt", "echo")
_GIVEN = ("prompt_logprobs", "best_of", "text", "input_ids")  # if not None
