"""Requests between messages and the scheduler while their pages are read: who waits, who does not, who leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from minisgl.runner.reading import Reading
from minisgl.runner.request_tracker import RequestTracker, TrackedRequest
from minisgl.sampling_params import SamplingParams
from minisgl.step import Arrival, Int32Array, PagesRead
from tests.helpers.seconds import WAIT_S

SIZE = 4


class Pages:
    def __init__(self, first: int, end: int) -> None:
        self.columns = (first, end)

    def page(self, column: int) -> bytes:
        return bytes([column])


class Store:
    """It has the first pages of every text; `held`: reading waits until it is let go."""

    def __init__(self, num_pages: int, held: bool = False) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.spaces: list[bytes] = []
        self._num_pages = num_pages
        self.go_on = threading.Event()
        if not held:
            self.go_on.set()

    def stage(self, tokens: Int32Array, first: int, most: int, space: bytes) -> Pages:
        assert self.go_on.wait(WAIT_S)
        self.spaces.append(space)
        self.asked.append((int(tokens[0]), first, most))
        return Pages(first, max(first, min(first + most, self._num_pages)))


def request(req_id: int, length: int = 18, **sampling: object) -> TrackedRequest:
    tokens = np.full(length, req_id, np.int32)
    params = SamplingParams(max_tokens=5, seed=0, **sampling)  # type: ignore[arg-type]
    return RequestTracker().add(req_id, params, tokens, length)


def nothing_cached() -> int:
    return 0


def not_asked() -> int:
    raise AssertionError("nobody needs to know")


def test_without_a_store_no_request_waits() -> None:
    reading = Reading(None, SIZE)
    assert not reading.add(request(1), not_asked) and not reading.take() and not len(reading)


@pytest.mark.parametrize(
    "one",
    [request(1, 4), request(1, prompt_logprobs=1), request(1, embedding="mean")],
    ids=["no page before the last token", "scored", "embedded"],
)
def test_a_request_that_can_load_nothing_does_not_wait(one: TrackedRequest) -> None:
    assert not Reading(Store(9), SIZE).add(one, not_asked)


def test_pages_are_read_and_kept_in_the_requests_own_space() -> None:
    plain, own = request(1), request(2)
    own.space = b"own"
    store = Store(9)
    reading = Reading(store, SIZE)
    assert reading.add(plain, nothing_cached) and reading.add(own, nothing_cached)
    reading.sent_back(own)
    assert store.spaces == [b"", b"own", b"own"]
    assert (plain.assignment(0).space, own.assignment(0).space) == (b"", b"own")
    reading.close()


def test_without_wake_pages_are_read_at_once() -> None:
    store = Store(3)
    reading = Reading(store, SIZE)
    one, cached, unknown = request(1), request(2), request(3)
    assert reading.add(one, lambda: 1)
    assert not reading.add(cached, lambda: 4), "the tree has all that it may find"
    assert reading.add(unknown, lambda: 3)
    assert store.asked == [(1, 1, 3), (3, 3, 1)]
    arrival, other = reading.take()
    assert isinstance(arrival, Arrival) and isinstance(other, Arrival) and not reading.take()
    assert (arrival.req_id, other.req_id) == (1, 3)
    assert (arrival.stored_from, arrival.stored_to) == (1, 3)
    assert one.assignment(0).stored is not None and one.assignment(0).stored is None, "once: then they are loaded"
    assert (unknown.stored, other.stored_from, other.stored_to) == (None, 0, 0)
    reading.close()


def test_requests_leave_in_order_of_arrival_unless_dropped() -> None:
    woken = threading.Semaphore(0)
    store = Store(9, held=True)
    reading = Reading(store, SIZE, woken.release)
    every = [request(number) for number in range(1, 6)]
    assert all(reading.add(one, nothing_cached) for one in every)
    assert not reading.take() and len(reading) == 5 and 3 in reading
    assert reading.drop(3) and not reading.drop(3) and 3 not in reading
    store.go_on.set()
    assert all(woken.acquire(timeout=WAIT_S) for _ in every)
    assert [one.req_id for one in reading.take()] == [1, 2, 4, 5]
    assert (3, 0, 4) not in store.asked, "of who has left nothing is read"
    reading.close()


def test_all_pages_of_a_retracted_request_are_read_unless_it_has_restarted() -> None:
    reading = Reading(Store(3), SIZE)
    one, started, new = request(1), request(2), request(3, 4)
    for each in (one, started, new):
        reading.sent_back(each)
    reading.started(2)
    assert not len(reading), "the scheduler has them"
    assert reading.take() == [PagesRead(1, 0, 3)] and not reading.take()
    assert one.assignment(0).stored is not None and started.assignment(0).stored is None
    Reading(None, SIZE).sent_back(one)
    reading.close()


def test_a_request_retracted_twice_gets_one_event() -> None:
    woken = threading.Semaphore(0)
    store = Store(3, held=True)
    reading = Reading(store, SIZE, woken.release)
    one = request(1)
    reading.sent_back(one)
    reading.started(1)
    reading.sent_back(one)
    store.go_on.set()
    assert woken.acquire(timeout=WAIT_S) and woken.acquire(timeout=WAIT_S)
    assert reading.take() == [PagesRead(1, 0, 3)]
    reading.close()


def test_close_waits_for_no_request() -> None:
    closed = threading.Event()
    store = Store(9, held=True)
    reading = Reading(store, SIZE, closed.set)
    for number in range(1, 4):
        reading.add(request(number), nothing_cached)
    ending: Callable[[], None] = reading.close
    thread = threading.Thread(target=ending)
    thread.start()
    store.go_on.set()
    thread.join(WAIT_S)
    assert not thread.is_alive() and not len(reading) and len(store.asked) <= 1
