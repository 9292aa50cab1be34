"""The Rust scheduler beside the Python reference: the same events give the same plans, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.scheduler.api import Stats
from minisgl.scheduler.reference import drafts
from minisgl.scheduler.reference.radix.tree import RadixTree
from minisgl.scheduler.reference.request import Request
from minisgl.step import FinishReason
from tests.helpers.parity import Divergence, run
from tests.helpers.shrink import described, minimal

STEPS = 250  # of one run


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_20_000_steps(first: int) -> None:
    retracted = cached = 0
    for seed in range(first, first + 20):
        stats = check_seed(seed)
        retracted += stats.num_retracted_total
        cached += stats.num_cached_tokens_total
    assert retracted and cached, "the runs are too easy"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_half_a_million_steps(times: int) -> None:
    for seed in range(1_000_000, 1_000_000 + times * 2000):
        check_seed(seed)


def check_seed(seed: int) -> Stats:
    """A divergence comes with the smallest run that shows one."""
    try:
        return run(random.Random(seed).randint, STEPS).theirs.stats()  # type: ignore[no-any-return]
    except Divergence as error:
        assert error.script is not None
        raise AssertionError(f"seed {seed}: {described(minimal(error.script, error))}") from error


def free_whole_leaves(patch: pytest.MonkeyPatch) -> None:
    def evict(self: RadixTree, num_pages: int) -> None:
        leaf = self.heap.peek()
        original(self, num_pages if leaf is None else max(num_pages, len(leaf.pages)))

    original = RadixTree.evict
    patch.setattr(RadixTree, "evict", evict)


def forget_the_minimum(patch: pytest.MonkeyPatch) -> None:
    """A stop id ends an answer however short it is."""

    def accept(self: Request, token: int) -> FinishReason:
        reason = original(self, token)
        return FinishReason.STOP if token in self.stop_ids else reason

    original = Request.accept
    patch.setattr(Request, "accept", accept)


def take_drafts_of_any_length(patch: pytest.MonkeyPatch) -> None:
    def take(request: Request, length: int, tokens: Sequence[int]) -> None:
        original(request, len(request.tokens), tokens)

    original = drafts.take
    patch.setattr(drafts, "take", take)


@pytest.mark.parametrize("change", [free_whole_leaves, forget_the_minimum, take_drafts_of_any_length])
def test_a_divergence_comes_with_a_minimal_list_of_events(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one scheduler changed on purpose, at the first seed that notices."""
    change(monkeypatch)
    with pytest.raises(AssertionError, match=r"seed \d+: ") as caught:
        for seed in range(20):
            check_seed(seed)
    steps = [line for line in str(caught.value).splitlines() if line.startswith("step ")]
    assert "".join(steps).count("Arrival(") <= 4
    assert len(steps) <= 80  # an answer may have to be so long until it shows


@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_shrinking(data: st.DataObject) -> None:
    """The same runs drawn by hypothesis: a divergence comes back with a minimal list of events."""
    run(lambda low, high: data.draw(st.integers(low, high)), 25)
