"""Stand-in for a model hub, on loopback, with a second port as the CDN to which it redirects large files.

Implements Hugging Face's API (commits, pages of a tree, `resolve` with hashes and redirects, error codes) and
ModelScope's (`repo/files`, `repo`). `asked` are the received requests, in order.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".gguf", ".safetensors")  # in LFS, and so on the other port
PAGE = 2  # files of a page of a tree
COMMIT = "c0ffee" + "0" * 34


@dataclass(frozen=True)
class HubRequest:
    port: str  # hub or cdn
    path: str
    range: str | None
    token: str | None


@dataclass
class Repo:
    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    commit: str = COMMIT


@dataclass
class ModelHub:
    """State of the hub. `cuts`: bytes after which the next file responses are cut off; -1: whole. `stall_at`: bytes
    after which a response pauses until `go_on`; `stalled` is set meanwhile. `limits`: the next Retry-After headers."""

    repos: dict[str, Repo] = field(default_factory=dict)
    asked: list[HubRequest] = field(default_factory=list)
    cuts: deque[int] = field(default_factory=deque)
    limits: deque[str] = field(default_factory=deque)
    failures: deque[int] = field(default_factory=deque)  # statuses of the next answers
    takes_ranges: bool = True
    wrong: str = ""  # a file that arrives with other bytes than its hash is of
    stall_at: int | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['hub']}"

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Return the environment of a process that uses this hub and a cache of its own."""
        mine = {"HF_ENDPOINT": self.endpoint, "MODELSCOPE_ENDPOINT": self.endpoint, "HF_HOME": str(home)}
        others = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "MODELSCOPE", "TRANSF"))}
        shown = {"HF_TOKEN": token, "MODELSCOPE_API_TOKEN": token} if token else {}
        return others | mine | {"MINISGL_CACHE": str(home / "minisgl")} | shown

    def of_files(self, path: str = "") -> list[HubRequest]:
        return [one for one in self.asked if one.port == "cdn" and path in one.path]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_hash(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    port_name: str
    hub: ModelHub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        hub, token = self.hub, self.headers.get("Authorization")
        hub.asked.append(HubRequest(self.port_name, self.path, self.headers.get("Range"), token))
        if hub.limits:
            return self.refuse(429, "", {"Retry-After": hub.limits.popleft()})
        if hub.failures:
            return self.refuse(hub.failures.popleft(), "")
        if self.port_name == "cdn":
            _, repo, path = unquote(self.path).split("|")
            return self.file(hub.repos[repo].files[path], path)
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if found := re.fullmatch(r"/api/models/(.+?/.+?)/revision/(.+)", parts.path):
            if repo := self.allowed(found[1], found[2]):
                self.json({"sha": repo.commit})
        elif found := re.fullmatch(r"/api/models/(.+?/.+?)/tree/(.+)", parts.path):
            if repo := self.allowed(found[1], found[2]):
                self.tree(repo, int(query.get("cursor", 0)))
        elif found := re.fullmatch(r"/api/v1/models/(.+?/.+?)/repo/files", parts.path):
            if repo := self.allowed(found[1], COMMIT):
                listed = [
                    {"Path": path, "Size": len(data), "Type": "blob", "Sha256": sha256(data)}
                    for path, data in repo.files.items()
                ]
                self.json({"Code": 200, "Data": {"Files": [{"Path": "docs", "Size": 0, "Type": "tree"}, *listed]}})
        elif found := re.fullmatch(r"/api/v1/models/(.+?/.+?)/repo", parts.path):
            if self.allowed(found[1], COMMIT):
                self.resolve(found[1], query["FilePath"])
        elif (found := re.fullmatch(r"/(.+?/.+?)/resolve/(.+?)/(.+)", parts.path)) and (
            self.allowed(found[1], found[2], weights=True)
        ):
            self.resolve(found[1], unquote(found[3]))
        elif not found:
            self.refuse(404, "EntryNotFound")
        return None

    def allowed(self, name: str, revision: str, weights: bool = False) -> Repo | None:
        """Return the repository if access is allowed; else send Hugging Face's error: 401 without a token, 404 or 403
        with."""
        repo, token = self.hub.repos.get(name), self.headers.get("Authorization")
        if token == "Bearer wrong":
            self.refuse(401, "", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repo is None or (repo.private and token != "Bearer member"):
            self.refuse(404 if token else 401, "RepoNotFound")
        elif weights and repo.gated and token != "Bearer member":
            self.refuse(403 if token else 401, "GatedRepo")
        elif revision not in ("main", "master", repo.commit):
            self.refuse(404, "RevisionNotFound")
        else:
            return repo
        return None

    def tree(self, repo: Repo, cursor: int) -> None:
        paths = sorted(repo.files)[cursor : cursor + PAGE]
        rows: list[dict[str, Any]] = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": "docs"}]
        for path in paths:
            data = repo.files[path]
            lfs = {"lfs": {"oid": sha256(data), "size": len(data)}} if path.endswith(LARGE) else {}
            rows.append({"type": "file", "oid": git_hash(data), "size": len(data), "path": path, **lfs})
        address = f"{self.hub.endpoint}{urlsplit(self.path).path}?recursive=true&cursor={cursor + PAGE}"
        more = cursor + PAGE < len(repo.files)
        self.json(rows, {"Link": f'<{address}>; rel="next"'} if more else {})

    def resolve(self, name: str, path: str) -> None:
        data = self.hub.repos[name].files.get(path)
        if data is None:
            return self.refuse(404, "EntryNotFound")
        if not path.endswith(LARGE):
            return self.file(data, path)
        place = f"http://127.0.0.1:{self.hub.ports['cdn']}/|{name}|{path}"
        headers = {"Location": place, "X-Linked-Etag": f'"{sha256(data)}"', "X-Repo-Commit": COMMIT}
        return self.answer(302, b"", headers)

    def file(self, data: bytes, path: str) -> None:
        hub, wanted = self.hub, self.headers.get("Range")
        if path == hub.wrong:
            data = bytes([data[0] ^ 1]) + data[1:]
        begin, end, status, headers = 0, len(data), 200, {"ETag": f'"{sha256(data)}"'}
        if wanted and hub.takes_ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), int(last) + 1 if last else len(data), 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        body = data[begin:end]
        cut = hub.cuts.popleft() if hub.cuts and self.port_name == "cdn" else -1
        self.head(status, len(body), headers)
        if cut >= 0:
            self.wfile.write(body[:cut])
            self.close_connection = True
        elif hub.stall_at is not None and self.port_name == "cdn":
            self.wfile.write(body[: hub.stall_at])
            self.wfile.flush()
            hub.stalled.set()
            hub.go_on.wait()
            self.close_connection = True
        else:
            self.wfile.write(body)

    def json(self, value: object, headers: Mapping[str, str] = {}) -> None:
        self.answer(200, json.dumps(value).encode(), headers)

    def refuse(self, status: int, code: str, headers: Mapping[str, str] = {}) -> None:
        self.answer(status, b"", {"X-Error-Code": code, **headers})

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.head(status, len(body), headers)
        self.wfile.write(body)

    def head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    hub = ModelHub()
    servers = []
    for name in ("hub", "cdn"):
        handler = type("Handler", (_Handler,), {"port_name": name, "hub": hub})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        hub.ports[name] = server.server_port
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        for server in servers:
            server.shutdown()
            server.server_close()
