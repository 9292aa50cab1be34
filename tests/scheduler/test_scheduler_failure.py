"""What goes wrong: failed forwards, malformed events, calls out of order, settings that make no sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig, ControlPlaneError
from minisgl.scheduler.backend import make_control_plane
from minisgl.scheduler.digest import plan_digest
from minisgl.scheduler.reference import ReferenceControlPlane
from minisgl.step import Abort, Arrival, EventError, Events, FinishReason, ForwardFailed, StepBuffers
from tests.helpers.scheduler import Driver, arrival, crowded, lengths

pytestmark = pytest.mark.usefixtures("each_control_plane")

CONFIG = ControlPlaneConfig(64, 4, 8, 64, 256)


def test_a_failed_forward_ends_its_rows_and_the_others_start_again() -> None:
    driver = Driver(max_running_requests=2)
    driver.step(arrival(1, [1] * 6, no_overlap=True), arrival(2, [2] * 6, max_tokens=2), arrival(3, [3] * 6))
    driver.schedule()
    driver.commit()  # request 2 ends, request 1 has 2 tokens
    driver.schedule()  # 1 decodes, 3 starts
    driver.uncommitted.clear()
    rows = driver.schedule(ForwardFailed(2), arrival(4, [4] * 6))
    assert lengths(rows) == [(4, 6)]
    output = driver.commit()
    assert output.req_ids.tolist() == [1, 3, 4]
    assert output.reasons.tolist() == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.NONE]
    driver.run()
    assert len(driver.tokens[4]) == 4


def test_a_failed_forward_stands_in_for_the_step_behind_it_too() -> None:
    driver = Driver()
    driver.step(arrival(1, [1] * 9, no_overlap=True))
    driver.schedule()
    assert lengths(driver.schedule(arrival(2, [2] * 9))) == [(2, 9)]
    driver.uncommitted.clear()
    assert lengths(driver.schedule(ForwardFailed(1))) == [(2, 9)], "only in the step behind: computed from zero"
    assert driver.plan.num_freed == 2
    assert driver.view.cached_len[2] == 0
    driver.commit()
    driver.run()
    assert driver.ends == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    assert driver.tokens[2] == [1009, 1010, 1011, 1012]


def test_after_a_failed_forward_pages_slots_and_cache_are_as_at_start() -> None:
    driver = Driver()
    driver.step(arrival(1, [1] * 9, max_tokens=1))
    driver.step(arrival(2, [2] * 9), arrival(3, [3] * 9, max_tokens=9))
    driver.schedule(Abort(2))
    driver.uncommitted.clear()
    driver.schedule(ForwardFailed(2), arrival(4, [1] * 9))
    assert driver.ends == {1: FinishReason.LENGTH}
    assert driver.view.owner == {0: 4}
    assert driver.view.cached_len[4] == 0
    assert driver.plane.page_table(4) == [0, 1, 2]
    driver.commit()
    assert driver.ends == {1: FinishReason.LENGTH, 2: FinishReason.ABORT, 3: FinishReason.ERROR}


def test_a_request_retracted_since_the_failed_step_ends_too() -> None:
    driver = crowded(3, 3)
    driver.schedule()
    driver.schedule()
    assert driver.plan.num_retracted == 1
    driver.uncommitted.clear()
    driver.schedule(ForwardFailed(4))
    driver.commit()
    assert driver.ends == dict.fromkeys(range(3), FinishReason.ERROR)


GOOD = np.arange(4, dtype=np.int32)

BAD_ARRIVALS = {
    "id in use": (Arrival(1, GOOD, 4, 4), "req_id"),
    "id too large": (Arrival(2**63, GOOD, 4, 4), "req_id"),
    "no tokens": (Arrival(2, GOOD[:0], 0, 4), "tokens"),
    "int64 tokens": (Arrival(2, np.arange(4), 4, 4), "tokens"),  # type: ignore[arg-type]
    "a list": (Arrival(2, [1, 2], 2, 4), "tokens"),  # type: ignore[arg-type]
    "two dimensions": (Arrival(2, GOOD.reshape(2, 2), 4, 4), "tokens"),
    "negative token": (Arrival(2, GOOD - 1, 4, 4), "tokens"),
    "wrong sum": (Arrival(2, GOOD, 3, 4), "num_prompt"),
    "no prompt": (Arrival(2, GOOD, 0, 9, num_generated=4), "num_prompt"),
    "negative num_generated": (Arrival(2, GOOD, 5, 9, num_generated=-1), "num_generated"),
    "no output": (Arrival(2, GOOD, 4, 0), "max_tokens"),
    "output used up": (Arrival(2, GOOD, 2, 2, num_generated=2), "max_tokens"),
    "negative min_tokens": (Arrival(2, GOOD, 4, 4, min_tokens=-1), "min_tokens"),
    "priority too large": (Arrival(2, GOOD, 4, 4, priority=2**31), "priority"),
    "namespace too large": (Arrival(2, GOOD, 4, 4, namespace=2**31), "namespace"),
    "negative namespace": (Arrival(2, GOOD, 4, 4, namespace=-1), "namespace"),
}


@pytest.mark.parametrize("name", BAD_ARRIVALS)
def test_a_malformed_arrival_is_named_and_changes_nothing(name: str) -> None:
    bad, field = BAD_ARRIVALS[name]
    driver, twin = Driver(), Driver()
    for each in (driver, twin):
        each.step(arrival(1, [1] * 9))
    good = [Abort(1), arrival(7, [7] * 5)]
    before = driver.plane.stats()
    with pytest.raises(EventError) as caught:
        driver.plane.schedule(1, Events([*good, bad]))
    assert (caught.value.index, caught.value.field) == (2, field)
    assert driver.plane.stats() == before
    assert lengths(driver.step(*good)) == lengths(twin.step(*good))
    assert plan_digest(driver.plan, driver.plane.buffers) == plan_digest(twin.plan, twin.plane.buffers)


def test_an_id_twice_in_one_call_is_an_error() -> None:
    driver = Driver()
    with pytest.raises(EventError) as caught:
        driver.schedule(arrival(1, [1]), Abort(1), arrival(1, [1]))
    assert (caught.value.index, caught.value.field) == (2, "req_id")


def test_a_failed_forward_must_come_first_and_be_the_oldest_in_flight() -> None:
    driver = Driver()
    driver.step(arrival(1, [1]))
    with pytest.raises(EventError):
        driver.schedule(ForwardFailed(0))
    driver.schedule()
    with pytest.raises(EventError):
        driver.schedule(ForwardFailed(2))
    with pytest.raises(EventError):
        driver.schedule(Abort(5), ForwardFailed(1))
    driver.uncommitted.clear()
    driver.schedule(ForwardFailed(1))


def test_calls_out_of_order_kill_the_object() -> None:
    def fresh() -> Driver:
        driver = Driver()
        driver.schedule(arrival(1, [1]))
        return driver

    tokens = np.array([5], np.int32)
    calls: dict[str, Callable[[ControlPlane], object]] = {
        r"schedule\(2\) came after schedule\(0\)": lambda plane: plane.schedule(2, Events()),
        r"commit\(1\)": lambda plane: plane.commit(1, tokens),
        "2": lambda plane: plane.commit(0, np.zeros(2, np.int32)),
        "int": lambda plane: plane.commit(0, np.array([5])),
        "step 0 sampled a negative token": lambda plane: plane.commit(0, np.array([-1], np.int32)),
        r"schedule\(2\) came before commit\(0\)": lambda plane: (
            plane.schedule(1, Events()),
            plane.schedule(2, Events()),
        ),
    }
    for said, call in calls.items():
        plane = fresh().plane
        with pytest.raises(ControlPlaneError, match=said):
            call(plane)
        with pytest.raises(ControlPlaneError, match="dead"):
            plane.commit(0, tokens)
        with pytest.raises(ControlPlaneError, match="dead"):
            plane.schedule(1, Events())


@pytest.mark.reference_only
def test_an_unforeseen_error_in_a_call_is_a_control_plane_error_and_kills_the_object() -> None:
    driver = Driver()
    driver.step(arrival(1, [1] * 3))
    next(iter(driver.plane.state.started)).pages.clear()
    with pytest.raises(ControlPlaneError):
        driver.plane.schedule(1, Events())
    with pytest.raises(ControlPlaneError, match="dead"):
        driver.plane.check()


def test_configurations_that_make_no_sense_are_refused() -> None:
    for name in ("num_pages", "page_size", "max_running_requests", "max_prefill_length", "context_len"):
        with pytest.raises(ValueError, match=name):
            Driver(**{name: 0})
    with pytest.raises(ValueError, match="cache"):
        Driver(cache="fifo")
    with pytest.raises(ValueError, match="graph_sizes"):
        Driver(graph_sizes=(4, 2))
    with pytest.raises(ValueError, match="buffers"):
        Driver(buffers=StepBuffers(CONFIG.limits()), num_pages=32)


@pytest.mark.reference_only
def test_control_planes_are_chosen_by_name() -> None:
    assert isinstance(make_control_plane("python", CONFIG), ReferenceControlPlane)
    assert type(make_control_plane("rust_hotpath", CONFIG)).__module__ == "minisgl._rust"
    with pytest.raises(ValueError, match="python, rust_hotpath"):
        make_control_plane("fortran", CONFIG)


def test_an_unknown_policy_is_refused(
    control_plane: Callable[[ControlPlaneConfig], ControlPlane],
) -> None:
    with pytest.raises(ValueError, match="schedule_policy: 'sjf': must be one of fcfs, lpm, srpf"):
        control_plane(ControlPlaneConfig(16, 4, 8, 64, 61, schedule_policy="sjf"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_pinned_pages", -1), ("max_pinned_pages", 2), ("cache_token_budget", -1), ("cache_max_prompt", -1)],
)
def test_limits_of_the_cache_are_checked(
    control_plane: Callable[[ControlPlaneConfig], ControlPlane], field: str, value: int
) -> None:
    """16 pages, of which the longest request needs 15: its last token needs no KV."""
    config = ControlPlaneConfig(16, 4, 8, 64, 61)
    assert config.num_pinnable_pages == 1
    control_plane(replace(config, max_pinned_pages=1, cache_token_budget=1, cache_max_prompt=1))
    with pytest.raises(ValueError, match=f"{field}: {value}: must be at "):
        control_plane(replace(config, **{field: value}))
