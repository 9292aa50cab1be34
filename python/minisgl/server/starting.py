"""What the server answers before there is a model: alive, not ready, and how far it is.

Keeps true: everything but /livez gets 503, with what is being done; nothing waits for the model.
Doesn't know: processes, requests.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from minisgl.server.errors import SERVER, ApiError
from minisgl.server.limits import RETRY_AFTER_S
from minisgl.server.transport import json_response


class Starting:
    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._doing = "starting the engine"

    def report(self, text: str, done: int = 0, total: int = 0) -> None:
        """A `progress.Report`."""
        self._doing = f"{text}: {done} of {total}" if total else text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = f"the model is loading: {self._doing}"
        if scope["path"] == "/livez":
            answer = json_response({"status": "ok"})
        elif scope["path"] == "/health":
            answer = json_response({"status": "loading", "model": self._model_name, "reason": reason})
            answer.status_code = 503
        else:
            error = ApiError(503, reason, kind=SERVER, code="loading")
            error.headers["retry-after"] = str(RETRY_AFTER_S)
            answer = error.response()
        await answer(scope, receive, send)
