"""Log lines on stderr: plain text, or one JSON object per line.

Invariants: one line per event, whatever text it has; control characters never reach a terminal. A line of plain text
begins with the time and, from level warning, with the level; a line that begins with spaces continues the one before.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

LogFormat = Literal["text", "json"]
LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
WARNING = "warning: "
_TO_QUOTE = frozenset(' "=')  # a value with one of these is written in quotes
_server = logging.getLogger("minisgl.server")
_engine = logging.getLogger("minisgl.engine")


class _Formatter(logging.Formatter):
    def __init__(self, kind: LogFormat, *, times: bool) -> None:
        super().__init__()
        self._kind = kind
        self._times = times

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        text = record.getMessage()
        if self._kind == "text" and not text.isprintable():
            text = "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self._kind == "json":
            at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
            head = {"time": at, "level": record.levelname.lower(), "logger": record.name, "event": text}
            return json.dumps(head | fields, ensure_ascii=False)
        if fields:
            text += " " + " ".join(f"{name}={_plain(value)}" for name, value in fields.items())
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        if self._times and not text.startswith("  "):
            text = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {text}"
        return text


def _plain(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and _TO_QUOTE.isdisjoint(text) else json.dumps(text)


def shows_access(access: bool, level: str) -> bool:
    """Return true if requests are logged (access log) at this level."""
    return access and LEVELS[level] <= logging.INFO


def set_up(kind: LogFormat, *, access: bool, level: str = "info", times: bool = True) -> None:
    """Send the log records of minisgl and uvicorn of at least `level` to stderr. Call once, in a server process.
    `times`: prefix text lines with the time."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(kind, times=times))
    for name in ("minisgl", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    logging.getLogger("minisgl").setLevel(LEVELS[level])
    logging.getLogger("minisgl.access").setLevel(LEVELS[level] if access else logging.CRITICAL)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, LEVELS[level]))


say, warn = _server.info, _server.warning
"""Log a line of the server itself."""
complain = _server.error
"""Log the reason why the server ends."""


def report(text: str) -> None:
    """Log a line of an engine process, as a warning if it begins with `warning: `."""
    (warn if text.startswith(WARNING) else say)(text.removeprefix(WARNING))


def narrate(lines: Sequence[str]) -> None:
    for line in lines:
        _engine.debug(line)
