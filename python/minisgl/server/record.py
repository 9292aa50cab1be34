"""What is known of one HTTP request when it is over, and the line that the access log gets of it.

Keeps true: no prompt and no output is in a line unless that was asked for.
Doesn't know: where lines go.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_log = logging.getLogger("minisgl.access")
MAX_LOGGED_CHARS = 4096


@dataclass(slots=True)
class RequestRecord:
    """Filled in on the way. `arrival_time` is `time.monotonic`; tokens count all prompts and choices."""

    method: str
    path: str
    request_id: str
    arrival_time: float = field(default_factory=time.monotonic)
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None
    prompt: str | None = None  # only with --log-prompts
    output: str | None = None

    def line(self) -> dict[str, Any]:
        """The fields of the access line; those that mean nothing for this request are left out."""
        found: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status or "gone",  # the client left before an answer began
            "e2e_s": round(time.monotonic() - self.arrival_time, 4),
        }
        if self.prompt_tokens:
            found |= {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "generated_tokens": self.generated_tokens,
            }
        if self.ttft_s is not None:
            found["ttft_s"] = round(self.ttft_s, 4)
        if self.finish_reasons:
            found["finish_reason"] = ",".join(sorted(set(self.finish_reasons)))
        for name in ("error", "prompt", "output"):
            if (value := getattr(self, name)) is not None:
                found[name] = value[:MAX_LOGGED_CHARS]
        return found

    def log(self) -> None:
        _log.info("request", extra={"fields": self.line()})


def request_id(given: str) -> str:
    """The client's own id if it can stand in a log and a header, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
