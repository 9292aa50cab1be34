"""Requests whose pages are looked up and read from a store before the scheduler hears of them: what it is told is at
hand, so that a load is a copy. And those that it has sent back to wait: it hears of what was read when it was.

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
from minisgl.step import Arrival, PagesRead


class Reading:
    """`store`: None where there is none. `wake` is called in another thread when a request may leave; None: it may at
    once."""

    def __init__(self, store: PageReader | None, page_size: int, wake: Callable[[], None] | None = None) -> None:
        self._store = store
        self._page_size = page_size
        self._wake = wake
        self._reader: ThreadPoolExecutor | None = None
        self._waiting: dict[int, TrackedRequest] = {}
        self._sent_back: dict[int, TrackedRequest] = {}  # at the scheduler
        self._done: queue.SimpleQueue[tuple[TrackedRequest, Future[StoredPages]]] = queue.SimpleQueue()

    @property
    def has_store(self) -> bool:
        return self._store is not None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, req_id: int) -> bool:
        return req_id in self._waiting

    def add(self, request: TrackedRequest, num_cached: Callable[[], int]) -> bool:
        """Whether the request waits here from now on. `num_cached`: pages of it that need not be read."""
        most = (len(request.tokens) - 1) // self._page_size
        if self._store is None or request.no_match or not most:
            return False
        first = num_cached()
        if first >= most:
            return False
        self._waiting[request.req_id] = request
        self._begin(self._waiting, request, first, most)
        return True

    def sent_back(self, request: TrackedRequest) -> None:
        """The scheduler has taken its pages. The tree has them still, but may lose them before its turn comes: all of
        them are read."""
        most = (len(request.tokens) - 1) // self._page_size
        if self._store is not None and not request.no_match and most:
            self._sent_back[request.req_id] = request
            self._begin(self._sent_back, request, 0, most)

    def started(self, req_id: int) -> None:
        """It has a slot again, and what is read is of no use."""
        self._sent_back.pop(req_id, None)

    def _begin(self, place: dict[int, TrackedRequest], request: TrackedRequest, first: int, end: int) -> None:
        self._reader = self._reader or ThreadPoolExecutor(1, "page-reader")
        reading = self._reader.submit(self._read, place, request, first, end - first)
        if self._wake is None:
            wait((reading,))
            self._done.put((request, reading))
        else:
            reading.add_done_callback(partial(self._was_read, request))

    def drop(self, req_id: int) -> bool:
        """Whether it was here."""
        return self._waiting.pop(req_id, None) is not None

    def take(self) -> list[Arrival | PagesRead]:
        """What the scheduler is to hear of the requests that need not wait any more."""
        found: list[Arrival | PagesRead] = []
        while not self._done.empty():
            request, reading = self._done.get()
            req_id, pages = request.req_id, reading.result()
            first, end = pages.columns
            if self._waiting.pop(req_id, None) is not None:
                request.stored = pages if end > first else None
                found.append(request.arrival())
            elif self._sent_back.pop(req_id, None) is request and end > first:
                request.stored = pages
                found.append(PagesRead(req_id, first, end))
        return found

    def close(self) -> None:
        """Nobody waits any more."""
        self._waiting.clear()
        self._sent_back.clear()
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def _read(self, place: dict[int, TrackedRequest], request: TrackedRequest, first: int, most: int) -> StoredPages:
        """In the reader's thread."""
        assert self._store is not None
        most = most if place.get(request.req_id) is request else 0
        return self._store.stage(request.tokens, first, most, request.space)

    def _was_read(self, request: TrackedRequest, reading: Future[StoredPages]) -> None:
        """In the reader's thread."""
        self._done.put((request, reading))
        if self._wake is not None:
            self._wake()
