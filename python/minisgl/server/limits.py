"""How much the server takes on: sizes of requests, and how many may wait.

Keeps true: what is refused here is refused before it costs anything; every refusal names what was too much.
Doesn't know: the engine's own limits (running requests, pages).
"""

from __future__ import annotations

from minisgl.config import Limits
from minisgl.frontend.engine_client import ProcessClient
from minisgl.server.errors import SERVER, ApiError, bad_value
from minisgl.server.intake import Turns

MAX_STOP_CHARS = 4096  # of one stop string
MAX_CHOICES = 1024  # answers of one request: prompts times n
RETRY_AFTER_S = 1


class Queue:
    """What waits: requests whose bodies wait for their turn, whose prompts are being encoded here, or that have no row
    in the engine."""

    def __init__(self, client: ProcessClient, turns: Turns, limits: Limits) -> None:
        self._client = client
        self._turns = turns
        self._limits = limits
        self.num_encoding = 0

    @property
    def num_requests(self) -> int:
        return self._turns.num_waiting + self.num_encoding + self._client.processor.num_waiting

    def check_room(self, num_requests: int = 1, num_tokens: int = 0) -> None:
        """Raise `ApiError` 429 unless as many more may wait. What is larger than the whole queue may wait alone."""
        waiting, tokens = self.num_requests, self._client.processor.num_waiting_tokens
        most, most_tokens = self._limits.max_queued_requests, self._limits.max_queued_tokens
        if waiting >= most or (waiting and waiting + num_requests > most):
            raise _full(f"{waiting} requests wait already, the limit is {most} (--max-queued-requests)")
        if tokens and tokens + num_tokens > most_tokens:
            raise _full(f"prompts of {tokens} tokens wait already, the limit is {most_tokens} (--max-queued-tokens)")


def _full(reason: str) -> ApiError:
    error = ApiError(429, f"the server is busy: {reason}: try again later", kind=SERVER, code="queue_full")
    error.headers["retry-after"] = str(RETRY_AFTER_S)
    return error


def draining() -> ApiError:
    error = ApiError(503, "the server is shutting down: send this to another one", kind=SERVER, code="draining")
    error.headers["retry-after"] = str(RETRY_AFTER_S)
    return error


def too_late(timeout_s: float) -> ApiError:
    reason = f"the request took longer than {timeout_s:g} s (--request-timeout)"
    return ApiError(504, reason, kind=SERVER, code="request_timeout")


def check_stop(stop: tuple[str, ...], name: str = "stop") -> None:
    for text in stop:
        if len(text) > MAX_STOP_CHARS:
            raise bad_value(name, text, f"at most {MAX_STOP_CHARS} characters in a stop string")
