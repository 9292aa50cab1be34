"""Looks up and reads stored KV pages of requests before the scheduler gets them, so that loading a page is a memory
copy; also pages of retracted requests, which the scheduler learns of in a `PagesRead`.

Invariants: no step waits for a disk; each request leaves once, in order of arrival, with the pages that were found,
possibly none, unless it is dropped.
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
    """Requests whose stored pages are being read. `store` is `None` if there is no page store. `wake` is called in the
    reader's thread when a request is done; `None`: reading blocks."""

    def __init__(self, store: PageReader | None, page_size: int, wake: Callable[[], None] | None = None) -> None:
        self._store = store
        self._page_size = page_size
        self._wake = wake
        self._reader: ThreadPoolExecutor | None = None
        self._waiting: dict[int, TrackedRequest] = {}
        self._sent_back: dict[int, TrackedRequest] = {}  # retracted, at the scheduler
        self._done: queue.SimpleQueue[tuple[TrackedRequest, Future[StoredPages]]] = queue.SimpleQueue()

    @property
    def has_store(self) -> bool:
        return self._store is not None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, req_id: int) -> bool:
        return req_id in self._waiting

    def add(self, request: TrackedRequest, num_cached: Callable[[], int]) -> bool:
        """Start reading a request's stored pages. Returns False if there are none to read. `num_cached()`: cached
        pages."""
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
        """Start reading the pages of a retracted request. They are still cached, but may be evicted before its
        readmission: so all are read."""
        most = (len(request.tokens) - 1) // self._page_size
        if self._store is not None and not request.no_match and most:
            self._sent_back[request.req_id] = request
            self._begin(self._sent_back, request, 0, most)

    def started(self, req_id: int) -> None:
        """Cancel the reading for a retracted request that was admitted again."""
        self._sent_back.pop(req_id, None)

    def _begin(self, waiting: dict[int, TrackedRequest], request: TrackedRequest, first: int, end: int) -> None:
        self._reader = self._reader or ThreadPoolExecutor(1, "page-reader")
        reading = self._reader.submit(self._read, waiting, request, first, end - first)
        if self._wake is None:
            wait((reading,))
            self._done.put((request, reading))
        else:
            reading.add_done_callback(partial(self._was_read, request))

    def drop(self, req_id: int) -> bool:
        """Remove a waiting request. Returns whether it waited here."""
        return self._waiting.pop(req_id, None) is not None

    def take(self) -> list[Arrival | PagesRead]:
        """Return the events for requests whose pages were read."""
        events: list[Arrival | PagesRead] = []
        while not self._done.empty():
            request, reading = self._done.get()
            req_id, pages = request.req_id, reading.result()
            first, end = pages.columns
            if self._waiting.pop(req_id, None) is not None:
                request.stored = pages if end > first else None
                events.append(request.arrival())
            elif self._sent_back.pop(req_id, None) is request and end > first:
                request.stored = pages
                events.append(PagesRead(req_id, first, end))
        return events

    def close(self) -> None:
        """Drop all requests and stop the reader's thread."""
        self._waiting.clear()
        self._sent_back.clear()
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def _read(self, waiting: dict[int, TrackedRequest], request: TrackedRequest, first: int, most: int) -> StoredPages:
        """Read up to `most` pages from page `first`, or none if the request is no longer in `waiting`. Runs in the
        reader's thread."""
        assert self._store is not None
        most = most if waiting.get(request.req_id) is request else 0
        return self._store.stage(request.tokens, first, most, request.space)

    def _was_read(self, request: TrackedRequest, reading: Future[StoredPages]) -> None:
        """Pass on a finished read. Runs in the reader's thread."""
        self._done.put((request, reading))
        if self._wake is not None:
            self._wake()
