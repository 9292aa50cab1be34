"""Images of requests are computed in slices before the scheduler gets the requests: in order, one slice at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minisgl.engine.api import ImageCounts
from minisgl.prompt_image import PromptImage
from minisgl.runner.request_tracker import TrackedRequest
from minisgl.runner.seeing import Seeing
from minisgl.sampling_params import SamplingParams

PAGE = 4


class Run:
    """A slice that ends when the test says so."""

    def __init__(self, image: PromptImage, begins: bool) -> None:
        self.image, self.begins = image, begins
        self.result: tuple[bool, object] | None = None

    def done(self) -> bool:
        return self.result is not None

    def wait(self) -> tuple[bool, object]:
        return self.result or (True, self.image.digest)


class Tower:
    """A tower whose runs the test ends."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.num_given_up = 0

    def image_counts(self) -> ImageCounts:
        return ImageCounts()

    def see_ahead(self, image: PromptImage, begins: bool, slice_s: float, wake: Callable[[], None] | None) -> Run:
        self.runs.append(Run(image, begins))
        return self.runs[-1]

    def give_up_image(self) -> None:
        self.num_given_up += 1

    def end(self, *, image: bool) -> None:
        """End the slice in progress; with `image` it was the image's last."""
        run = self.runs[-1]
        run.result = (image, run.image.digest if image else None)


def request(req_id: int, *starts: int) -> TrackedRequest:
    images = tuple(PromptImage(bytes([req_id, start]), start, 8, (2, 4), b"") for start in starts)
    return TrackedRequest(req_id, SamplingParams(seed=0, max_tokens=1), np.zeros(99, np.int32), 99, images=images)


def seeing(tower: Tower) -> Seeing:
    return Seeing(tower, PAGE, lambda: None)


def test_a_request_leaves_with_the_features_of_its_images() -> None:
    tower = Tower()
    waiting, one = seeing(tower), request(1, 0, 20)
    assert waiting.add(one, lambda: 0) and 1 in waiting and len(tower.runs) == 1
    assert waiting.take() == [] and len(tower.runs) == 1, "the slice in progress has not ended"
    for image in (False, False, True, True):
        assert len(waiting) == 1
        tower.end(image=image)
        left = waiting.take()
    assert left == [one] and not waiting and len(tower.runs) == 4
    assert list(one.features) == [b"\x01\x00", b"\x01\x14"]
    assert [run.begins for run in tower.runs] == [True, True, True, False]


def test_requests_leave_in_their_order_and_what_is_cached_needs_no_tower() -> None:
    tower = Tower()
    waiting = seeing(tower)
    first, second = request(1, 0), request(2, 0, 20)
    assert waiting.add(first, lambda: 0) and waiting.add(second, lambda: 2)
    assert not waiting.add(request(3, 0), lambda: 2), "pages 0 and 1 have the whole image"
    assert not waiting.add(request(4), lambda: 0)
    tower.end(image=True)
    assert waiting.take() == [first]
    tower.end(image=True)
    assert waiting.take() == [second]
    assert [run.image.start for run in tower.runs] == [0, 20]


def test_a_request_that_ends_gives_its_run_up() -> None:
    tower = Tower()
    waiting, second = seeing(tower), request(2, 0)
    waiting.add(request(1, 0), lambda: 0)
    waiting.add(second, lambda: 0)
    assert waiting.drop(1) and tower.num_given_up == 1 and not waiting.drop(1)
    tower.end(image=True)
    assert waiting.take() == [] and not second.features, "the slice was of a request that has ended"
    tower.end(image=True)
    assert waiting.take() == [second]
    assert tower.num_given_up == 1


def test_a_retracted_request_is_seen_again_once_its_pages_are_evicted() -> None:
    tower, one, num_cached = Tower(), request(1, 0, 20), 7
    waiting = seeing(tower)
    waiting.sent_back(one, lambda: num_cached)
    assert waiting.take() == [] and not tower.runs and not waiting and 1 not in waiting, "the scheduler has it"
    num_cached = 3
    assert waiting.take() == [] and tower.runs[-1].image.start == 20, "page 3 had the beginning of the second image"
    tower.end(image=False)
    assert waiting.take() == []
    tower.end(image=True)
    assert waiting.take() == [] and list(one.features) == [b"\x01\x14"] and len(tower.runs) == 2
    num_cached = 0
    assert waiting.take() == [] and tower.runs[-1].image.start == 0
    tower.end(image=False)
    waiting.take()
    waiting.started(1)
    assert waiting.take() == [] and tower.num_given_up == 0, "its step takes what the slice in progress computes"
    tower.end(image=False)
    assert waiting.take() == [] and tower.num_given_up == 1 and len(tower.runs) == 4


def test_a_retracted_request_that_has_ended_or_whose_scheduler_is_replaced_is_not_seen() -> None:
    tower, one, other = Tower(), request(1, 0), request(2, 0)
    waiting = seeing(tower)
    waiting.sent_back(one, lambda: 0)
    one.images = ()  # as the tracker does
    assert waiting.take() == [] and not tower.runs
    waiting.sent_back(other, lambda: 0)
    waiting.lost()
    assert waiting.take() == [] and not tower.runs


def test_without_somebody_to_wake_images_are_computed_at_once() -> None:
    tower, one = Tower(), request(1, 0, 20)
    assert not Seeing(tower, PAGE).add(one, lambda: 0)
    assert len(one.features) == 2
    assert not Seeing(None, PAGE).add(request(2, 0), lambda: 0)
