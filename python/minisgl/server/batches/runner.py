"""Runs batches: lines are sent to their endpoint like any request, a few at a time and with low priority, and their
results are stored.

Invariants: a line is retried until its result is on disk, and has exactly one result there, whenever the process ends,
unless engines keep dying on it; a response that reports a lack of capacity (429, 503) is no result; keys take turns,
line by line; a finished batch has each of its lines once, in its output or its errors.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from minisgl.server.batches.lines import BadLine, BatchLine, read_lines, windows
from minisgl.server.batches.store import BatchInfo, LineResult, Status, Store, Usage, error_text, new_id
from minisgl.server.core.errors import draining

LOOK_S = 30.0
"""Interval at which expiry is checked and new batches are started."""
ROOM_S = 1.0
"""Interval at which waiting lines poll for capacity."""
AGAIN = frozenset({429, 503})
"""Statuses with which a line is retried: no capacity now."""
NO_ROOM = 429
"""Status of a line that did not reach an engine."""
MAX_DEATHS = 3
"""Engine deaths after which a line is not retried. The first death may be caused by another line: from then on each of
the lines that were running is retried with no other of them alongside. The second may be chance, or caused by a request
that is no line; a third is attributed to the line."""
_ERRORS_LEFT: dict[Status, tuple[str, str]] = {
    "expired": ("batch_expired", "the batch's completion_window ended before this line was run"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this line was run"),
    "failed": ("batch_failed", "the batch failed before this line was run"),
}
_log = logging.getLogger("minisgl.server")
T = TypeVar("T")
_Pending: TypeAlias = tuple[LineResult, asyncio.Future[None]]


@dataclass(frozen=True, slots=True)
class Asked:
    """Batch line that is being submitted. `submitted` is set once the engine has it."""

    line: BatchLine
    owner: str
    request_id: str
    submitted: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Said:
    """Response to a batch line. `retry_after_s`: for a response without capacity; `engine_died`: an engine died on the
    line, and the server continues."""

    status: int
    body: bytes
    retry_after_s: float = 1.0
    engine_died: bool = False

    @classmethod
    def of(cls, status: int, body: bytes, retry_after: bytes | None) -> Said:
        """Create the result of a batch line from an HTTP response. `retry_after`: the raw Retry-After header."""
        return cls(status, body, float(retry_after) if retry_after and retry_after.isdigit() else 1.0)


class Endpoint(Protocol):
    async def __call__(self, attempt: Asked) -> Said:
        """Send a line to its endpoint. Raises `LookupError` if the owner's key no longer exists."""


class LineSemaphore:
    """Semaphore for batch lines with the variable limit `room()`, at least one; first come, first served."""

    def __init__(self, room: Callable[[], int]) -> None:
        self._room = room
        self.num_taken = 0
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    async def __aenter__(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._grant_next()
        try:
            while not turn.done():
                await asyncio.wait({turn}, timeout=ROOM_S)
                self._grant_next()
        except asyncio.CancelledError:
            if turn.done():
                await self.__aexit__()
            turn.cancel()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.num_taken -= 1
        self._grant_next()

    def _grant_next(self) -> None:
        while self._waiting and (self._waiting[0].done() or self.num_taken < max(1, self._room())):
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                self.num_taken += 1
                turn.set_result(None)


class State:
    """A store that is used in a thread of its own, so that no event loop waits for the disk."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, "batches")
        self._is_closed = False

    async def run(self, work: Callable[[Store], T]) -> T:
        """Run `work` in the store's thread and return its result. Raises `ApiError` 503 after `close`."""
        if self._is_closed:
            raise draining()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self.store)

    def later(self, work: Callable[[Store], object]) -> None:
        """Queue `work` for the store's thread without waiting; skipped after `close`, the next server cleans up."""
        if not self._is_closed:
            self._thread.submit(work, self.store)

    def close(self) -> None:
        """Finish queued work and close the store. Blocks."""
        self._is_closed = True
        self._thread.shutdown()
        self.store.close()


class Runner:
    """Runs one server's batches. `room()`: lines that may run now; `quota`: bytes per key; `clock`: Unix seconds."""

    def __init__(
        self,
        state: State,
        endpoint: Endpoint,
        *,
        room: Callable[[], int],
        quota: int,
        max_line_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.state = state
        self.endpoint = endpoint
        self.slots = LineSemaphore(room)  # first come, first served: keys take turns
        self.quota = quota
        self.max_line_bytes = max_line_bytes
        self.clock = clock
        self.suspects = asyncio.Lock()  # held by a line on which an engine died: one runs at a time
        self.broken: dict[str, str] = {}  # by batch id: reason of a failure that could not be stored
        self.num_answered = self.num_failed = 0  # lines, since the start
        self._open: dict[str, BatchInfo] = {}  # by id; as of the last sweep
        self._running: dict[str, _Batch] = {}  # by owner
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._main = asyncio.create_task(self._poll_forever())

    async def stop(self, *, engine_died: bool = False) -> None:
        """Cancel running lines; the next server retries them. `engine_died`: the cause is a dead engine, for which each
        of these lines is a suspect and is recorded. Idempotent."""
        main, self._main = self._main, None
        if main is None:
            return
        under_way = [(one.info.id, line) for one in self._running.values() for line in sorted(one.under_way)]
        await _ended(main, *self._tasks)
        if engine_died:
            try:
                await self.state.run(lambda store: store.add_deaths(under_way))
            except (OSError, sqlite3.Error) as error:
                _log.warning("batches: the death of the engine could not be recorded: %s", error_text(error))

    def wake(self) -> None:
        """Make the runner look for new batches now instead of at its next poll."""
        self._wake.set()

    def cancel(self, batch_id: str) -> None:
        """End a running batch as cancelled; the store has its new status already."""
        for one in self._running.values():
            if one.info.id == batch_id:
                one.end("cancelled")

    def lines(self) -> dict[str, int]:
        """Return the counts of lines: waiting and running now, answered and failed since the start."""
        now = self._open | {one.info.id: one.info for one in self._running.values()}
        left = sum(one.total - one.completed - one.failed for one in now.values() if one.id not in self.broken)
        running = self.slots.num_taken
        return {
            "waiting": max(0, left - running),
            "running": running,
            "answered": self.num_answered,
            "failed": self.num_failed,
        }

    async def _poll_forever(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self.state.run(lambda store: store.sweep(int(self.clock())))
                await self._begin()
            except (OSError, sqlite3.Error) as error:
                _log.warning("batches: %s: %s", type(error).__name__, error)
            except Exception:
                _log.exception("batches: a bug; they continue")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):  # `wait_for` may lose a cancellation that comes with its result
                    await self._wake.wait()

    async def _begin(self) -> None:
        """Start one batch for each key that runs none."""
        now = self.clock()
        self._open = {one.id: one for one in await self.state.run(Store.open_batches)}
        for info in self._open.values():
            if info.owner not in self._running and info.id not in self.broken:
                one = self._running[info.owner] = _Batch(self, info)
                task = asyncio.create_task(self._run(one, now))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _run(self, one: _Batch, now: float) -> None:
        info = one.info
        try:
            await one.run(now)
        except (OSError, sqlite3.Error) as error:
            self.broken[info.id] = error_text(error)
            _log.warning("%s: failed, and the failure could not be stored: %s", info.id, self.broken[info.id])
        except Exception:
            self.broken[info.id] = "internal error"
            _log.exception("%s: a bug", info.id)
        finally:
            del self._running[info.owner]
            self._open.pop(info.id, None)
            self.wake()


class _Batch:
    """Execution of one batch, from its stored state to its end."""

    def __init__(self, runner: Runner, info: BatchInfo) -> None:
        self.info = info
        self._runner = runner
        self._state = runner.state
        self._end: asyncio.Future[tuple[Status, str]] = asyncio.get_running_loop().create_future()
        self._pending: list[_Pending] = []  # results to be stored
        self._writer: asyncio.Task[None] | None = None
        self.under_way: set[int] = set()  # numbers of submitted lines without results

    def end(self, status: Status, reason: str = "") -> None:
        """End the batch before all lines have results. Only the first call has an effect."""
        if not self._end.done():
            self._end.set_result((status, reason))

    async def run(self, now: float) -> None:
        if self.info.status == "cancelling":
            self.end("cancelled")
        timer = asyncio.get_running_loop().call_later(max(0.0, self.info.expires_at - now), self.end, "expired")
        lines = asyncio.create_task(self._send_all())
        try:
            either: list[asyncio.Future[Any]] = [lines, self._end]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._end.done():
                status, reason = _outcome(lines)
            else:
                status, reason = self._end.result()
        finally:
            timer.cancel()
            await _ended(lines)
            if self._writer is not None:
                await asyncio.wait({self._writer})
        ended = await self._state.run(lambda store: self._finish(store, status, reason))
        _log.info("%s: %s: %d answered, %d failed", ended.id, status, ended.completed, ended.failed)

    async def _send_all(self) -> None:
        path = self._state.store.path(self.info.input_file_id)
        done = await self._state.run(lambda store: store.answered(self.info.id))
        deaths = await self._state.run(lambda store: store.deaths(self.info.id))
        async with asyncio.TaskGroup() as group, _windows(path, self._runner.max_line_bytes, done) as each:
            while window := await each():
                for line in sorted(window, key=lambda line: line.number not in deaths):
                    attempt = Asked(line, self.info.owner, f"{self.info.id}-{line.number}")
                    if line.number in deaths:
                        await self._ask(attempt, deaths[line.number])
                        continue
                    group.create_task(self._ask(attempt))
                    # encode one line at a time: an interactive request waits for one of them at most
                    await attempt.submitted.wait()

    async def _ask(self, attempt: Asked, deaths: int = 0) -> None:
        """Send a line until it has a result. `deaths`: engines that died on it. Others run while it waits."""
        number = attempt.line.number
        try:
            while deaths < MAX_DEATHS:
                async with self._runner.suspects if deaths else contextlib.nullcontext():
                    response = await self._send_once(attempt)
                if response is None:
                    return
                if response.engine_died:
                    deaths += 1
                    await self._state.run(lambda store: store.add_deaths([(self.info.id, number)]))
                await asyncio.sleep(response.retry_after_s)
            message = f"the engine died {deaths} times while it ran this line: the line is not retried"
            error = {"code": "engine_died", "message": message}
            await self._store_result(LineResult(number, False, _shown(attempt.line, None, error)))
        finally:
            self.under_way.discard(number)
            attempt.submitted.set()

    async def _send_once(self, attempt: Asked) -> Said | None:
        """Send a line once. Returns `None` if its result is stored, else a response that reports a lack of capacity."""
        number = attempt.line.number
        async with self._runner.slots:
            self.under_way.add(number)
            said = await self._runner.endpoint(attempt)
            if said.status == NO_ROOM:
                self.under_way.discard(number)
            if said.status in AGAIN:
                return said
            self.under_way.discard(number)
            attempt.submitted.set()
            is_ok = said.status == 200
            response = {"status_code": said.status, "request_id": attempt.request_id, "body": msgspec.Raw(said.body)}
            text = _shown(attempt.line, response, None)
            await self._store_result(LineResult(number, is_ok, text, usage_of(said.body) if is_ok else Usage()))
            return None

    async def _store_result(self, answer: LineResult) -> None:
        """Store the result of a line; returns when it is on disk. Raises the store's error."""
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((answer, kept))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        await kept

    async def _write(self) -> None:
        """Store pending results of lines; those that arrive meanwhile are written together."""
        while self._pending:
            pending, self._pending = self._pending, []
            before = self.info
            try:
                used = await self._state.run(partial(self._record, answers=[one for one, _ in pending]))
            except BaseException as error:  # the tasks that wait for these results raise it
                for kept in _waiting(pending):
                    kept.set_exception(error)
                return
            self._runner.num_answered += self.info.completed - before.completed
            self._runner.num_failed += self.info.failed - before.failed
            for kept in _waiting(pending):
                kept.set_result(None)
            if used > self._runner.quota:
                self.end("failed", f"files and results of its API key take {used} bytes, too many (--state-quota)")

    def _record(self, store: Store, *, answers: list[LineResult]) -> int:
        self.info = store.record(self.info, answers)
        return store.used_bytes(self.info.owner)

    def _finish(self, store: Store, status: Status, reason: str) -> BatchInfo:
        left = self._results_left(store, status) if status in _ERRORS_LEFT else iter(())
        return store.finish(self.info, status, reason, left, int(self._runner.clock()))

    def _results_left(self, store: Store, status: Status) -> Iterator[LineResult]:
        code, message = _ERRORS_LEFT[status]
        done = store.answered(self.info.id)
        with contextlib.suppress(BadLine, FileNotFoundError), store.path(self.info.input_file_id).open("rb") as file:
            for line in read_lines(file, self._runner.max_line_bytes):
                if line.number not in done:
                    yield LineResult(line.number, False, _shown(line, None, {"code": code, "message": message}))


def _waiting(pending: list[_Pending]) -> list[asyncio.Future[None]]:
    return [kept for _, kept in pending if not kept.done()]


def _outcome(lines: asyncio.Task[None]) -> tuple[Status, str]:
    """Return the status and failure reason of a batch whose lines have all been sent. Raises unexpected errors."""
    error = lines.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None:
        return "completed", ""
    if isinstance(error, BadLine | LookupError):
        return "failed", str(error)
    if isinstance(error, OSError | sqlite3.Error):
        return "failed", error_text(error)
    raise error


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    """Token usage in a response's body, under the names of any endpoint."""

    prompt_tokens: int = 0
    input_tokens: int = 0
    completion_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details = _Details()
    input_tokens_details: _Details = _Details()
    completion_tokens_details: _Details = _Details()
    output_tokens_details: _Details = _Details()


class _Body(msgspec.Struct):
    usage: _Usage = _Usage()


def usage_of(body: bytes) -> Usage:
    """Return the token usage in a response's body; zero if it has none."""
    try:
        usage = msgspec.json.decode(body, type=_Body).usage
    except msgspec.MsgspecError:
        return Usage()
    return Usage(
        usage.prompt_tokens + usage.input_tokens,
        usage.prompt_tokens_details.cached_tokens + usage.input_tokens_details.cached_tokens,
        usage.completion_tokens + usage.output_tokens,
        usage.completion_tokens_details.reasoning_tokens + usage.output_tokens_details.reasoning_tokens,
    )


def _shown(line: BatchLine, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    """Return one line of a batch's output or error file."""
    fields = {"id": new_id("batch_req_"), "custom_id": line.custom_id, "response": response, "error": error}
    return msgspec.json.encode(fields) + b"\n"


@contextlib.asynccontextmanager
async def _windows(
    path: Path, max_line_bytes: int, done: set[int]
) -> AsyncIterator[Callable[[], Coroutine[Any, Any, list[BatchLine]]]]:
    """Open a file and give a function that reads its next window of lines in a thread; an empty window is the end."""
    with await asyncio.to_thread(path.open, "rb") as file:
        each = windows(file, max_line_bytes, done)
        yield lambda: asyncio.to_thread(next, each, [])


async def _ended(*tasks: asyncio.Task[None]) -> None:
    """Cancel the tasks and wait for them; their results and exceptions are ignored."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
