"""/v1/files and /v1/batches: uploaded files of requests run in the background (`runner.py`), and their results become
files.

Invariants: files and batches of another key are not found (404); without --state-dir every route returns 501; a failing
folder is an error that names the cause.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp, Message

from minisgl.config import ServerConfig, most_of
from minisgl.server.batches.body import MAX_KEEP_S, MIN_KEEP_S, BatchAnswer, BatchRequest, FileAnswer
from minisgl.server.batches.lines import MAX_FILE_BYTES, BadLine, CheckedFile, check_file
from minisgl.server.batches.runner import Asked, Runner, Said, State
from minisgl.server.batches.store import (
    FILE_PREFIX,
    KEEP_S,
    OUTPUT_PURPOSE,
    PURPOSE,
    BatchInfo,
    FileInfo,
    Refused,
    Store,
    Usage,
    error_text,
    new_id,
)
from minisgl.server.batches.upload import Upload
from minisgl.server.core.answers import Answer
from minisgl.server.core.api_keys import names
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import BATCHES, FILES, SERVER, ApiError, bad_value, draining, missing, queue_full, wrong
from minisgl.server.core.formatter import json_response, page_of
from minisgl.server.core.request import REQUEST, SMALL_BYTES, HttpRequest, parse, too_large
from minisgl.server.core.routes import Routes
from minisgl.server.core.waiting import Turns, has_room

MAX_UPLOADS = 16
"""Maximum uploads of more than `SMALL_BYTES` at once."""
MAX_NAME_CHARS = 255
MAX_FILES_SHOWN, MAX_BATCHES_SHOWN = 10_000, 100
MAX_WINDOW_S = 14 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])", re.ASCII)
_UNITS_S = {"h": 3600, "d": 86_400}
_CONTENT = "application/jsonl"
T = TypeVar("T")


def num_in_flight(config: ServerConfig, device: str) -> int:
    """Return the maximum requests in flight up to which batch lines are submitted. A sixteenth of all engines' rows
    stays free, since a request that finds its row taken by a line waits a step or two; of the configured limits lines
    use half. `config.dp` must be resolved."""
    assert config.dp != "auto"
    rows = config.engine.rows_on(device) * config.dp
    limits = [most_of(rows)]
    if config.max_inflight is not None:
        limits.append(config.max_inflight // 2)
    if config.max_inflight_per_engine is not None:
        limits.append(config.max_inflight_per_engine * config.dp // 2)
    return max(1, min(limits))


def line_capacity(context: ServerContext) -> Callable[[], int]:
    """Return a function that tells how many more batch lines may be submitted now."""
    most = num_in_flight(context.config, context.info.device)
    return lambda: most - context.queue.num_in_flight()


Ask = Callable[[Asked, int], Awaitable[Said]]
"""Function that submits a line for the API key with this index."""


def line_submitter(app: ASGIApp, config: ServerConfig) -> Ask:
    """Return a function that sends a batch line to `app` as a request, without authorization, and logs it."""
    shown = names(config.api_keys)

    async def ask(attempt: Asked, key: int) -> Said:
        path, body = attempt.line.url, attempt.line.body
        request = HttpRequest("POST", path, attempt.request_id, len(body), submitted=attempt.submitted)
        request.key, request.key_name = key, shown[key] if key else None
        body_parts: list[bytes] = []
        headers: dict[bytes, bytes] = {}

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                headers.update(message["headers"])
            else:
                body_parts.append(message.get("body", b""))

        await app({"type": "http", "method": "POST", "path": path, "headers": [], REQUEST: request}, receive, send)
        request.log()
        return Said.of(request.status, b"".join(body_parts), headers.get(b"retry-after"))

    return ask


class Batches:
    """Files and batches of one server. `room()`: lines that may be submitted now; `ask` submits one."""

    def __init__(self, config: ServerConfig, store: Store, room: Callable[[], int], ask: Ask) -> None:
        self.state = State(store)
        self.runner = Runner(
            self.state,
            self._ask,
            room=room,
            quota=config.state_quota,
            max_line_bytes=config.limits.max_body_bytes,
        )
        self._ask_as = ask
        self._timeout_s = config.limits.slow_client_timeout
        self._limits = msgspec.structs.replace(config.limits, max_body_bytes=SMALL_BYTES)  # for POST /v1/batches
        self._names = ["", *names(config.api_keys)[1:]]
        self._arriving: collections.Counter[str] = collections.Counter()  # bytes, by owner
        self._uploads: collections.Counter[str] = collections.Counter()  # uploads of more than SMALL_BYTES, by owner
        self._checking = asyncio.Lock()
        self._turns = Turns(SMALL_BYTES, lambda _: None)  # a turn is always free: bodies are small
        self._is_stopped = False

    def start(self) -> None:
        self.runner.start()

    async def stop(self, *, engine_died: bool = False) -> None:
        """Stop all batches; the next server resumes them. `engine_died`: running lines are recorded as suspects."""
        self._is_stopped = True
        await self.runner.stop(engine_died=engine_died)
        self.state.close()

    def here(self, request: Request) -> Batches:
        """Return these batches, to handle `request`. Raises `ApiError` 503 after `stop`."""
        if self._is_stopped:
            raise draining()
        return self

    def owner(self, request: Request) -> str:
        """Return the owner of the caller's files: its API key's name, which outlasts changes of the key file."""
        http_request: HttpRequest = request.scope[REQUEST]
        return self._names[http_request.key]

    async def _ask(self, attempt: Asked) -> Said:
        """Submit a line for its owner. Raises `LookupError` if the owner's key is no longer in the key file."""
        if attempt.owner not in self._names:
            raise LookupError(f"the API key {attempt.owner} is not in the key file any more")
        return await self._ask_as(attempt, self._names.index(attempt.owner))

    # ------------------------------------------------------------------------------------------------------- files

    @property
    def num_uploads(self) -> int:
        """Uploads of more than `SMALL_BYTES` in progress, at most `MAX_UPLOADS`."""
        return self._uploads.total()

    @property
    def num_arriving(self) -> int:
        """Bytes received of files that are not yet checked and stored."""
        return self._arriving.total()

    async def upload(self, request: Request) -> FileInfo:
        """Receive, check and store a file, or none of it. Raises `ApiError`, `Refused`, `OSError`, `sqlite3.Error`."""
        owner, name = self.owner(request), new_id(FILE_PREFIX)
        announced = request.scope[REQUEST].content_length or 0
        if announced > 2 * MAX_FILE_BYTES:
            raise too_large(announced, MAX_FILE_BYTES)
        used = await self.state.run(lambda store: store.used_bytes(owner))
        has_place = False

        def count(num_bytes: int) -> None:
            nonlocal has_place
            self._count(owner, used, num_bytes)
            if not has_place and upload.num_bytes > SMALL_BYTES:
                self._check_place(owner)
                self._uploads[owner] += 1
                has_place = True

        path, is_crowded = self.state.store.path(name), lambda: self._uploads.total() >= MAX_UPLOADS
        upload = Upload(path, count, self._timeout_s, is_crowded)

        def add(store: Store) -> None:
            self._check_quota(store.used_bytes(owner) + info.bytes)  # other uploads may have been stored meanwhile
            store.add_file(info)

        try:
            await upload.receive(request)
            expires_at = _check_upload_fields(upload.fields)
            checked = await self._checked(name)
            info = FileInfo(
                id=name,
                owner=owner,
                bytes=upload.num_bytes,
                created_at=int(time.time()),
                filename=(upload.filename or name)[:MAX_NAME_CHARS],
                expires_at=expires_at,
                url=checked.url,
                num_lines=checked.num_lines,
            )
            await self.state.run(add)
        except BaseException:  # also a client that disconnects while the file is added
            self.state.later(lambda store: store.drop_stray(name))
            raise
        finally:
            self._uploads[owner] -= has_place
            self._arriving[owner] -= upload.num_bytes
        return info

    def _check_place(self, owner: str) -> None:
        """Check that an owner may start another large upload (`has_room`). Raises `ApiError` 429."""
        count = self._uploads.total()
        if not has_room(MAX_UPLOADS, max(1, len(self._names) - 1), self._uploads[owner], count, 1):
            raise queue_full(f"{count} files are being uploaded already, {self._uploads[owner]} of this API key")

    def _count(self, owner: str, used: int, count: int) -> None:
        """Count received bytes of an upload. Raises `ApiError` 413 if the owner exceeds its quota."""
        self._arriving[owner] += count
        self._check_quota(used + self._arriving[owner])

    def _check_quota(self, total: int) -> None:
        """Check a key's total bytes against the quota. Raises `ApiError` 413."""
        if total > self.runner.quota:
            limit = f"the limit is {self.runner.quota} (--state-quota): delete some"
            reason = f"the files of this API key would take at least {total} bytes: {limit}"
            raise wrong("file", reason, "quota_exceeded", 413)

    async def _checked(self, name: str) -> CheckedFile:
        """Check the lines of an uploaded file; one file at a time, as that takes CPU seconds. Raises `ApiError` 400."""

        def check() -> CheckedFile:
            with self.state.store.path(name).open("rb") as file:
                return check_file(file, self.runner.max_line_bytes)

        async with self._checking:
            try:
                return await asyncio.to_thread(check)
            except BadLine as error:
                api_error = ApiError(400, f"file: {error}", param=error.field or "file", code="invalid_jsonl")
                api_error.body["error"]["line"] = error.line
                raise api_error from error

    # ----------------------------------------------------------------------------------------------------- batches

    async def create(self, request: Request) -> BatchInfo:
        """Create and start a batch from a request's body. Raises `ApiError`, `Refused`, `OSError`, `sqlite3.Error`."""
        http_request: HttpRequest = request.scope[REQUEST]
        try:
            await http_request.receive(request.receive, self._turns, self._limits)
            body = parse(http_request.body, BatchRequest)
        finally:
            http_request.body_done()
        owner, now = self.owner(request), int(time.time())
        expires, window_s = body.output_expires_after, _window_s(body.completion_window)

        def add(store: Store) -> BatchInfo:
            file = store.file(body.input_file_id, owner)
            if file is None:
                raise bad_value("input_file_id", body.input_file_id, "there is no such file")
            if file.purpose != PURPOSE:
                raise bad_value("input_file_id", file.id, f"its purpose must be {PURPOSE}, not {file.purpose}")
            if body.endpoint != file.url:
                raise bad_value("endpoint", body.endpoint, f"must be {file.url}, as in the lines of {file.id}")
            self._check_quota(store.used_bytes(owner))  # every batch writes files, also a failing one
            store.check_num_files(owner)
            info = BatchInfo(
                id=new_id("batch_"),
                owner=owner,
                endpoint=file.url,
                input_file_id=file.id,
                completion_window=body.completion_window,
                created_at=now,
                expires_at=now + window_s,
                total=file.num_lines,
                metadata=body.metadata,
                output_keep_s=KEEP_S if expires is None else expires.seconds,
                usage=Usage(),
            )
            store.add_batch(info)
            return info

        info = await self.state.run(add)
        self.runner.wake()
        return info

    async def cancel(self, batch_id: str, owner: str) -> BatchInfo | None:
        """Cancel a batch and return it; `None` if there is none. Raises `Refused` if it has ended, `sqlite3.Error`."""
        now = int(time.time())
        batch = await self.state.run(lambda store: store.cancel(batch_id, owner, now))
        if batch is not None:
            self.runner.cancel(batch_id)
        return batch

    def shown(self, info: BatchInfo) -> dict[str, Any]:
        """Return a batch as OpenAI's batch object."""
        reason = self.runner.broken.get(info.id, info.reason)
        status = "failed" if info.id in self.runner.broken else info.status
        errors = [{"code": "batch_failed", "message": reason, "line": None, "param": None}] if reason else []
        ends = ("completed", "failed", "expired", "cancelled")
        return _fields_of(
            BatchAnswer,
            info,
            object="batch",
            errors={"object": "list", "data": errors} if errors else None,
            status=status,
            in_progress_at=info.created_at,
            **{f"{end}_at": info.ended_at if end == info.status else None for end in ends},
            request_counts={"total": info.total, "completed": info.completed, "failed": info.failed},
            usage=_shown_usage(info.usage),
        )


def _fields_of(shape: type[Answer], info: BatchInfo | FileInfo, **own: Any) -> dict[str, Any]:
    """Return the fields of the response model `shape` as a dict, from `own` or else from the record `info`."""
    return {name: own[name] if name in own else getattr(info, name) for name in shape.model_fields}


def _shown_usage(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.input + usage.output,
    }


def _check_upload_fields(fields: dict[str, str]) -> int | None:
    """Check `purpose` and return the expiry in Unix seconds; `None`: the file stays. Raises `ApiError` 400."""
    if "purpose" not in fields:
        raise missing("purpose")
    if fields["purpose"] != PURPOSE:
        raise bad_value("purpose", fields["purpose"], f"must be {PURPOSE}: files are supported for batches only")
    if (text := fields.get("expires_after[seconds]")) is None:
        return None
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise bad_value("expires_after[anchor]", fields["expires_after[anchor]"], "must be created_at")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and MIN_KEEP_S <= int(text) <= MAX_KEEP_S):
        raise bad_value("expires_after[seconds]", text, f"must be between {MIN_KEEP_S} and {MAX_KEEP_S}")
    return int(time.time()) + int(text)


def _window_s(text: str) -> int:
    """Parse a completion window such as "24h" or "14d"; return seconds. Raises `ApiError` 400."""
    match = _WINDOW.fullmatch(text)
    seconds = 0 if match is None else int(match[1]) * _UNITS_S[match[2]]
    if not 0 < seconds <= MAX_WINDOW_S:
        raise bad_value("completion_window", text, "must be hours or days, such as 24h, and at most 14d")
    return seconds


def _shown_file(info: FileInfo) -> dict[str, Any]:
    """Return a file record as OpenAI's file object."""
    return _fields_of(FileAnswer, info, object="file", status="processed", status_details=None)


# ---------------------------------------------------------------------------------------------------------- routes


async def _query(batches: Batches, work: Callable[[Store, str], T], request: Request) -> T:
    """Run `work(store, owner)` for the caller in the store's thread. Raises `ApiError` where the store fails."""
    owner = batches.owner(request)
    with _store_errors():
        return await batches.state.run(lambda store: work(store, owner))


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Convert errors of the store into `ApiError`: 409 if it refuses, 500 if the disk or database fails."""
    try:
        yield
    except Refused as error:
        raise ApiError(409, str(error), code=error.code) from error
    except (OSError, sqlite3.Error) as error:
        raise ApiError(500, f"--state-dir: {error_text(error)}", kind=SERVER, code="storage_failed") from error


def _missing_item(what: str, name: str) -> ApiError:
    return ApiError(404, f"{what}_id: {name[:80]!r} does not exist here", param=f"{what}_id", code=f"{what}_not_found")


def add_files(app: Routes, batches_of: Callable[[Request], Batches]) -> None:
    """Add the routes of /v1/files. `batches_of` returns the server's batches, or raises `ApiError`."""

    @app.on(FILES, "POST")
    async def upload(request: Request) -> Response:
        with _store_errors():
            return json_response(_shown_file(await batches_of(request).upload(request)))

    @app.on(FILES, "GET")
    async def files(request: Request) -> Response:
        batches, purpose = batches_of(request), request.query_params.get("purpose")
        if purpose not in (None, PURPOSE, OUTPUT_PURPOSE):
            raise bad_value("purpose", purpose, f"must be {PURPOSE} or {OUTPUT_PURPOSE}")
        all_ = await _query(batches, Store.files, request)
        shown = [_shown_file(one) for one in all_ if purpose in (None, one.purpose)]
        return json_response(page_of(shown, request, MAX_FILES_SHOWN, MAX_FILES_SHOWN))

    async def file_of(request: Request, file_id: str) -> tuple[Batches, FileInfo]:
        batches = batches_of(request)
        info = await _query(batches, lambda store, owner: store.file(file_id, owner), request)
        if info is None:
            raise _missing_item("file", file_id)
        return batches, info

    @app.on(FILES + "/{file_id}", "GET")
    async def file(request: Request, file_id: str) -> Response:
        return json_response(_shown_file((await file_of(request, file_id))[1]))

    @app.on(FILES + "/{file_id}/content", "GET")
    async def content(request: Request, file_id: str) -> Response:
        batches, info = await file_of(request, file_id)
        return FileResponse(batches.state.store.path(info.id), media_type=_CONTENT)

    @app.on(FILES + "/{file_id}", "DELETE")
    async def delete(request: Request, file_id: str) -> Response:
        batches, _ = await file_of(request, file_id)
        await _query(batches, lambda store, owner: store.delete_file(file_id, owner), request)
        return json_response({"id": file_id, "object": "file", "deleted": True})


def add_batches(app: Routes, batches_of: Callable[[Request], Batches]) -> None:
    """Add the routes of /v1/batches. `batches_of` returns the server's batches, or raises `ApiError`."""

    @app.on(BATCHES, "POST")
    async def create(request: Request) -> Response:
        batches = batches_of(request)
        with _store_errors():
            return json_response(batches.shown(await batches.create(request)))

    @app.on(BATCHES, "GET")
    async def all_batches(request: Request) -> Response:
        batches = batches_of(request)
        all_ = await _query(batches, Store.batches, request)
        return json_response(page_of([batches.shown(one) for one in all_], request, MAX_BATCHES_SHOWN))

    @app.on(BATCHES + "/{batch_id}", "GET")
    async def batch(request: Request, batch_id: str) -> Response:
        batches = batches_of(request)
        info = await _query(batches, lambda store, owner: store.batch(batch_id, owner), request)
        if info is None:
            raise _missing_item("batch", batch_id)
        return json_response(batches.shown(info))

    @app.on(BATCHES + "/{batch_id}/cancel", "POST")
    async def cancel(request: Request, batch_id: str) -> Response:
        batches = batches_of(request)
        with _store_errors():
            info = await batches.cancel(batch_id, batches.owner(request))
        if info is None:
            raise _missing_item("batch", batch_id)
        return json_response(batches.shown(info))


def not_kept(path: str) -> ApiError:
    """Return the error 501 for routes of files and batches on a server without --state-dir."""
    text = f"{path}: files and batches need a folder: start the server with --state-dir DIR"
    return ApiError(501, text, code="not_supported")


def no_batches(request: Request) -> Batches:
    """Refuse a request on a server without a state folder. Raises `ApiError` 501."""
    raise not_kept(request.url.path)
