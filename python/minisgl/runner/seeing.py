"""Runs the vision tower over the images of requests before the scheduler gets them, a slice between two steps, so that
other requests go on meanwhile.

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

SLICE_S = 0.03  # of a tower, beside a step; it ends with the operation that exceeds it


@dataclass(slots=True, eq=False)
class _Waiting:
    request: TrackedRequest
    images: deque[PromptImage]
    held: list[object] = field(default_factory=list)


class Seeing:
    """Requests whose images are being computed. `engine` is `None` if it does not see. `wake` is called in the engine's
    thread at the end of a slice; `None`: `add` blocks until all images are computed."""

    def __init__(self, engine: Sees | None, page_size: int, wake: Callable[[], None] | None = None) -> None:
        self._engine = engine
        self._page_size = page_size
        self._wake = wake
        self._waiting: dict[int, _Waiting] = {}  # in order of arrival
        self._run: ImageRun | None = None
        self._running: _Waiting | None = None  # whose image the slice in progress is of

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, req_id: int) -> bool:
        return req_id in self._waiting

    def add(self, request: TrackedRequest, num_cached: Callable[[], int]) -> bool:
        """Take a request whose images are to be computed. Returns False if there is nothing to wait for.
        `num_cached()`: pages that need not be computed."""
        if self._engine is None or not request.images:
            return False
        first = num_cached() * self._page_size
        images = deque(one for one in request.images if one.start + one.num_tokens > first)
        if not images:
            return False
        if self._wake is None:
            request.features = [self._whole(self._engine, image) for image in images]
            return False
        self._waiting[request.req_id] = _Waiting(request, images)
        self._begin()
        return True

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
        return dropped is not None

    def take(self) -> list[TrackedRequest]:
        """Return the request whose last image is done, if any, and go on with the next slice."""
        if self._run is None or not self._run.done():
            return []
        ended, features = self._run.wait()
        waiting, self._run, self._running = self._running, None, None
        assert waiting is not None
        done = []
        if ended and waiting.request.req_id in self._waiting:
            waiting.images.popleft()
            waiting.held.append(features)
            if not waiting.images:
                del self._waiting[waiting.request.req_id]
                waiting.request.features = waiting.held
                done.append(waiting.request)
        self._begin()
        return done

    def _begin(self) -> None:
        """Queue the next slice, unless there is one in progress."""
        if self._engine is not None and self._run is None and self._waiting:
            self._running = next(iter(self._waiting.values()))
            begins = not self._running.held
            self._run = self._engine.see_ahead(self._running.images[0], begins, SLICE_S, self._wake)
