"""`check` notices every kind of broken state."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import pytest

from minisgl.scheduler.api import ControlPlaneError
from minisgl.scheduler.reference import ReferenceControlPlane
from minisgl.scheduler.reference.admission import RATIO_MAX
from minisgl.scheduler.reference.radix.nodes import page_key
from minisgl.scheduler.reference.request import NO_SLOT, State
from minisgl.scheduler.reference.retraction import give_up_pages
from minisgl.step import Events
from tests.helpers.scheduler import Driver, arrival

pytestmark = pytest.mark.usefixtures("each_control_plane")


def _lose_page(plane: ReferenceControlPlane) -> None:
    plane.state.tree.pool.pop()


def _double_page(plane: ReferenceControlPlane) -> None:
    next(iter(plane.state.started)).pages[-1] = plane.state.tree.pool.free_pages()[-1]


def _unlock(plane: ReferenceControlPlane) -> None:
    next(plane.state.tree.nodes()).lock -= 1


def _swap_page_table(plane: ReferenceControlPlane) -> None:
    next(iter(plane.state.started)).pages.reverse()


def _wrong_tokens(plane: ReferenceControlPlane) -> None:
    next(plane.state.tree.nodes()).tokens[-1] += 1


def _wrong_key(plane: ReferenceControlPlane) -> None:
    children = plane.state.tree.root.children
    children[page_key(0, [9] * 4)] = children.pop(page_key(0, [1] * 4))


def _wrong_count(plane: ReferenceControlPlane) -> None:
    plane.state.tree.num_evictable += 1


def _lose_slot(plane: ReferenceControlPlane) -> None:
    plane.state.slots.assign()


def _pending(plane: ReferenceControlPlane) -> None:
    next(iter(plane.state.started)).num_pending += 1


def _unsorted(plane: ReferenceControlPlane) -> None:
    plane.state.started.items.reverse()


def _forget_live(plane: ReferenceControlPlane) -> None:
    plane.state.live.popitem()


def _hide_from_eviction(plane: ReferenceControlPlane) -> None:
    plane.state.tree.heap.clear()


def _rewrite_page_table(plane: ReferenceControlPlane) -> None:
    request = next(iter(plane.state.started))
    old, new = request.pages[-1], plane.state.tree.pool.pop()
    request.pages[-1] = new
    plane.state.tree.pool.push([old])


def _in_two_lists(plane: ReferenceControlPlane) -> None:
    twin = copy(next(iter(plane.state.started)))
    twin.state, twin.handle, twin.pages, twin.slot = State.WAITING, None, [], NO_SLOT
    plane.state.waiting.items.append(twin)


def _lose_checkpoint(plane: ReferenceControlPlane) -> None:
    plane.state.tree.take_slot()


def _wrong_ratio(plane: ReferenceControlPlane) -> None:
    plane.state.ratio.value = RATIO_MAX + 1


BREAKAGES: dict[Callable[[ReferenceControlPlane], None], str] = {
    _lose_page: r"pages \[8\] have no owner",
    _double_page: r"pages \[8\] have more than one owner",
    _unlock: "4 pages are evictable, counted 2",
    _swap_page_table: r"pages \[2\] have more than one owner",
    _wrong_tokens: "request 2: it locks other tokens than its own",
    _wrong_key: "a child of the root is lost",
    _wrong_count: "2 pages are evictable, counted 3",
    _lose_slot: "slots in use and started requests differ",
    _pending: "request 1: wrong count of pending tokens",
    _unsorted: "started is not sorted",
    _forget_live: "the lists and the live requests differ",
    _hide_from_eviction: "the eviction heap and the unlocked leaves differ",
    _rewrite_page_table: "the page table of request 1 changed",
    _in_two_lists: "a request is in two lists",
    _lose_checkpoint: "a slot of a checkpoint is lost or doubled",
    _wrong_ratio: f"the reserve ratio is {RATIO_MAX + 1}",
}


@pytest.mark.reference_only
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_check_notices_a_broken_state(breakage: Callable[[ReferenceControlPlane], None]) -> None:
    driver = Driver(checkpoint_interval=64, num_checkpoints=2) if breakage is _lose_checkpoint else Driver()
    driver.step(arrival(3, [3] * 9, max_tokens=1))
    driver.step(arrival(1, [1] * 9), arrival(2, [2] * 9))
    driver.plane.check()
    breakage(driver.plane)  # type: ignore[arg-type]
    with pytest.raises(ControlPlaneError, match=f"^broken invariant: {BREAKAGES[breakage]}"):
        driver.plane.check()
    with pytest.raises(ControlPlaneError, match="dead"):
        driver.plane.stats() and driver.plane.schedule(2, Events())


@pytest.mark.reference_only
def test_pages_or_slot_given_up_twice_is_an_error_that_names_the_owner() -> None:
    driver = Driver()
    driver.step(arrival(7, [3] * 9))
    state = driver.plane.state  # type: ignore[attr-defined]
    request = next(iter(state.started))
    slot = request.slot
    driver.run()
    with pytest.raises(ControlPlaneError, match=r"^request 7 has no pages to give up$"):
        give_up_pages(request, state.tree)
    with pytest.raises(ControlPlaneError, match=rf"^slot {slot} was freed, but is not in use$"):
        state.slots.free(slot, None)
