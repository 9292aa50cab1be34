"""Runs the vision tower over the images of requests before the scheduler gets them, a slice between two steps, so that
other requests go on meanwhile; also over images of retracted requests whose pages are evicted.

Invariants: one image at a time, in order of arrival; a slice is queued only when the one before has ended; a request
leaves with the features of the images that its cached pages lack, which are held until it has a slot, or is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from minisgl.engine.api import ImageRun, Sees
from minisgl.prompt_image import PromptImage
from minisgl.runner.request_tracker import TrackedRequest

SLICE_S = 0.03  # of a tower, beside a step; it ends with the work item that exceeds it


@dataclass(slots=True, eq=False)
class _Waiting:
    request: TrackedRequest
    images: deque[PromptImage]  # still to be computed
    num_cached: Callable[[], int]
    held: dict[bytes, object] = field(default_factory=dict)  # features by digest

    def lacks(self, page_size: int) -> deque[PromptImage]:
        """Return the images that are neither held nor in cached pages."""
        first = self.num_cached() * page_size
        images = (one for one in self.request.images if one.start + one.num_tokens > first)
        return deque(one for one in images if one.digest not in self.held)


class Seeing:
    """Requests whose images are being computed. `engine` is `None` if it does not see. `wake` is called in the engine's
    thread at the end of a slice; `None`: `add` blocks until all images are computed."""

    def __init__(self, engine: Sees | None, page_size: int, wake: Callable[[], None] | None = None) -> None:
        self._engine = engine
        self._page_size = page_size
        self._wake = wake
        self._waiting: dict[int, _Waiting] = {}  # in order of arrival
        self._sent_back: dict[int, _Waiting] = {}  # retracted, at the scheduler
        self._run: ImageRun | None = None
        self._running: _Waiting | None = None  # whose image the slice in progress is of

    @property
    def sees(self) -> bool:
        return self._engine is not None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, req_id: int) -> bool:
        return req_id in self._waiting

    def add(self, request: TrackedRequest, num_cached: Callable[[], int]) -> bool:
        """Take a request whose images are to be computed. Returns False if there is nothing to wait for.
        `num_cached()`: pages that need not be computed."""
        if self._engine is None or not request.images:
            return False
        waiting = _Waiting(request, deque(), num_cached)
        waiting.images = waiting.lacks(self._page_size)
        if not waiting.images:
            return False
        if self._wake is None:
            request.features = [self._whole(self._engine, image) for image in waiting.images]
            return False
        self._waiting[request.req_id] = waiting
        self._begin()
        return True

    def sent_back(self, request: TrackedRequest, num_cached: Callable[[], int]) -> None:
        """Compute the images of a retracted request, as soon as its pages are evicted, until it is admitted again."""
        if self._engine is not None and self._wake is not None and request.images:
            self._sent_back[request.req_id] = _Waiting(request, deque(), num_cached)

    def started(self, req_id: int) -> None:
        """Forget a retracted request that was admitted again: its step computes what is left of its images."""
        self._sent_back.pop(req_id, None)

    def lost(self) -> None:
        """Forget retracted requests: their scheduler is replaced."""
        self._sent_back.clear()

    @staticmethod
    def _whole(engine: Sees, image: PromptImage) -> object:
        while not (seen := engine.see_ahead(image, False, SLICE_S, None).wait())[0]:
            pass
        return seen[1]

    def drop(self, req_id: int) -> bool:
        """Remove a waiting request. Returns whether it waited here."""
        dropped = self._waiting.pop(req_id, None)
        if dropped is not None and dropped is self._running and self._engine is not None:
            self._engine.give_up_image()
            self._running = None
        return dropped is not None

    def take(self) -> list[TrackedRequest]:
        """Return the request whose last image is done, if any, and go on with the next slice."""
        if self._run is None and self._sent_back:
            self._begin()
        if self._run is None or not self._run.done():
            return []
        ended, features = self._run.wait()
        waiting, self._run, self._running = self._running, None, None
        done = []
        if waiting is not None and ended:
            done = self._seen(waiting, features)
        elif waiting is not None and self._engine is not None and not self._has(waiting):
            self._engine.give_up_image()  # its step, which was launched since, has taken what was computed
        self._begin()
        return done

    def _has(self, waiting: _Waiting) -> bool:
        return any(all.get(waiting.request.req_id) is waiting for all in (self._waiting, self._sent_back))

    def _seen(self, waiting: _Waiting, features: object) -> list[TrackedRequest]:
        """Record the features of a request's next image. Return the request if it can leave."""
        request = waiting.request
        waiting.held[waiting.images.popleft().digest] = features
        if self._sent_back.get(request.req_id) is waiting:
            request.features = tuple(waiting.held.values())
        elif request.req_id in self._waiting and not waiting.images:
            del self._waiting[request.req_id]
            request.features = tuple(waiting.held.values())
            return [request]
        return []

    def _begin(self) -> None:
        """Queue the next slice, unless there is one in progress."""
        if self._engine is not None and self._run is None and (waiting := self._next()) is not None:
            # a retracted request does not wait until held features leave room: it may be admitted at any time
            self._running, begins = waiting, not waiting.held and waiting.request.req_id in self._waiting
            self._run = self._engine.see_ahead(waiting.images[0], begins, SLICE_S, self._wake)

    def _next(self) -> _Waiting | None:
        """Return a request that lacks features, retracted ones first: the scheduler may admit those at any time."""
        for req_id, waiting in list(self._sent_back.items()):
            waiting.images = waiting.lacks(self._page_size)
            if waiting.images:
                return waiting
            if not waiting.request.images:  # it has ended
                del self._sent_back[req_id]
        return next(iter(self._waiting.values()), None)
