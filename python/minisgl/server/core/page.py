"""The web page at `/` and its files below `/web/`: chat, live statistics, the scheduler's steps. See docs/page.md.

Invariants: only files of the package that existed at start are served, by exact name; every response forbids the
browser to run, show or request anything from another server; a file that the browser has cached is not sent again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from starlette.responses import PlainTextResponse, Response

FOLDER = Path(__file__).resolve().parents[2] / "web"
PREFIX = "/web/"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
    ".md": "text/markdown; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # cached, but revalidated by ETag: an update of the server updates the page
}


RUNNING = "Ollama is running"
"""Text that some of Ollama's clients expect at `/`."""
BY_ACCEPT = {"vary": "accept"}


def _asks_for_text(accept: bytes) -> bool:
    """Return true if an Accept header wants plain text and no HTML."""
    kinds = {one.partition(b";")[0].strip().lower() for one in accept.split(b",")}
    return b"text/plain" in kinds and b"text/html" not in kinds


class WebPage:
    """Files of the web page, kept in memory: they are few and small."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files: dict[str, tuple[bytes, dict[str, str]]] = {}
        for file in sorted(folder.rglob("*")):
            if file.suffix in TYPES and file.is_file():
                content = file.read_bytes()
                tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
                entry = (content, HEADERS | {"etag": tag, "content-type": TYPES[file.suffix]})
                self._files[PREFIX + file.relative_to(folder).as_posix()] = entry
        if (start := self._files.get(PREFIX + "index.html")) is not None:
            content, given = start
            self._files["/"] = (content, given | BY_ACCEPT)

    @property
    def paths(self) -> list[str]:
        return list(self._files)

    def answer(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> Response | None:
        """Return the response to a request for a file of the page, or `None` for any other request."""
        if method not in ("GET", "HEAD") or (entry := self._files.get(path)) is None:
            return None
        content, given = entry
        if path == "/" and _asks_for_text(headers.get(b"accept", b"")):
            return PlainTextResponse(RUNNING, headers=BY_ACCEPT)
        known_tags = headers.get(b"if-none-match", b"").decode("latin-1")
        if given["etag"] in {one.strip().removeprefix("W/") for one in known_tags.split(",")}:
            return Response(status_code=304, headers=given)
        return Response(content, headers=given)
