"""`check` notices every kind of broken state."""

from __future__ import annotations

import pytest

from minisgl.scheduler.api import ControlPlaneError
from minisgl.scheduler.reference import ReferenceControlPlane
from minisgl.scheduler.reference.radix.nodes import page_key
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


@pytest.mark.reference_only
@pytest.mark.parametrize(
    "breakage",
    [
        _lose_page,
        _double_page,
        _unlock,
        _swap_page_table,
        _wrong_tokens,
        _wrong_key,
        _wrong_count,
        _lose_slot,
        _pending,
        _unsorted,
        _forget_live,
        _hide_from_eviction,
        _rewrite_page_table,
    ],
)
def test_check_notices_a_broken_state(breakage: object) -> None:
    driver = Driver()
    driver.step(arrival(3, [3] * 9, max_tokens=1))
    driver.step(arrival(1, [1] * 9), arrival(2, [2] * 9))
    driver.plane.check()
    breakage(driver.plane)  # type: ignore[operator]
    with pytest.raises(ControlPlaneError):
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
