"""Requests whose pages are looked up and read from a store before the scheduler hears of them: what it is told is at
hand, so that a load is a copy.

Invariants: no step waits for a disk; a request leaves once, in the order in which it came: with what was found of it,
which may be nothing, or told to end.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from minisgl.engine.api import PageReader, StoredPages
from minisgl.runner.request_tracker import TrackedRequest


class Reading:
    """`store`: None where there is none. `wake` is called in another thread when a request may leave; None: it may at
    once."""

    def __init__(self, store: PageReader | None, page_size: int, wake: Callable[[], None] | None = None) -> None:
        self._store = store
        self._page_size = page_size
        self._wake = wake
        self._reader: ThreadPoolExecutor | None = None
        self._waiting: dict[int, TrackedRequest] = {}
        self._done: queue.SimpleQueue[tuple[int, Future[StoredPages]]] = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, req_id: int) -> bool:
        return req_id in self._waiting

    def add(self, request: TrackedRequest, num_cached: Callable[[], int]) -> bool:
        """Whether the request waits here from now on. `num_cached`: pages of it that need not be read."""
        most = (len(request.tokens) - 1) // self._page_size
        if self._store is None or not request.keeps or request.no_match or not most:
            return False
        first = num_cached()
        if first >= most:
            return False
        self._waiting[request.req_id] = request
        self._reader = self._reader or ThreadPoolExecutor(1, "page-reader")
        reading = self._reader.submit(self._read, request.req_id, request, first, most - first)
        if self._wake is None:
            wait((reading,))
            self._done.put((request.req_id, reading))
        else:
            reading.add_done_callback(partial(self._was_read, request.req_id))
        return True

    def drop(self, req_id: int) -> bool:
        """Whether it was here."""
        return self._waiting.pop(req_id, None) is not None

    def take(self) -> list[TrackedRequest]:
        """Those that need not wait any more."""
        found = []
        while not self._done.empty():
            req_id, reading = self._done.get()
            request = self._waiting.pop(req_id, None)
            if request is None:
                continue
            if (pages := reading.result()).columns[1] > pages.columns[0]:
                request.stored = pages
            found.append(request)
        return found

    def close(self) -> None:
        """Nobody waits any more."""
        self._waiting.clear()
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def _read(self, req_id: int, request: TrackedRequest, first: int, most: int) -> StoredPages:
        """In the reader's thread."""
        assert self._store is not None
        return self._store.stage(request.tokens, first, most if self._waiting.get(req_id) is request else 0)

    def _was_read(self, req_id: int, reading: Future[StoredPages]) -> None:
        """In the reader's thread."""
        self._done.put((req_id, reading))
        if self._wake is not None:
            self._wake()
