"""The schedulers decide what they decided when the corpus was recorded.

A refactor must leave every digest as it is. A change of policy records the corpus anew (`tests/replay/record.py`) and
says why in its commit.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from minisgl.scheduler.api import ControlPlane, ControlPlaneConfig, Stats
from minisgl.scheduler.reference import ReferenceControlPlane, admission, background, ranking, request, scheduler
from minisgl.scheduler.reference.drafter import Drafter
from minisgl.scheduler.reference.pins import Pins
from minisgl.scheduler.reference.radix import tree
from minisgl.scheduler.reference.radix.tree import RadixTree
from minisgl.scheduler.reference.request import Request, RequestQueue, make_request
from minisgl.scheduler.reference.scheduler.step_pass import StepPass
from minisgl.scheduler.trace import read_trace, replay
from minisgl.step import FinishReason
from tests.replay.record import CORPUS, DIGESTS, DIGITS, SCENARIOS, SUFFIX, Scenario, drive, record, shortened

Factory = Callable[[ControlPlaneConfig], ControlPlane]
RECORDED: dict[str, str] = json.loads(DIGESTS.read_text())
MAX_BYTES = 600_000


def difference(name: str, make: Factory) -> str | None:
    """The first call of a recorded trace in which a scheduler decides otherwise."""
    trace = read_trace(CORPUS / (name + SUFFIX))
    recorded = [RECORDED[name][at : at + DIGITS] for at in range(0, len(RECORDED[name]), DIGITS)]
    assert len(recorded) == len(trace.calls)
    found = replay(trace, make(trace.config))
    for call, (now, then) in enumerate(zip(found.digests, recorded, strict=False)):
        if shortened(now) != then:
            return f"trace {name!r}: call {call}, {trace.call_name(call)}, is the first that differs"
    return f"trace {name!r}: {found.error}" if found.error else None


@pytest.mark.parametrize("name", SCENARIOS)
def test_decisions_are_the_recorded_ones(name: str, control_plane: Factory) -> None:
    assert difference(name, control_plane) is None


def test_the_corpus_is_what_the_recorder_makes() -> None:
    assert list(RECORDED) == list(SCENARIOS)
    assert sorted(file.name for file in CORPUS.glob(f"*{SUFFIX}")) == sorted(name + SUFFIX for name in SCENARIOS)
    for name, scenario in SCENARIOS.items():
        assert gzip.decompress((CORPUS / (name + SUFFIX)).read_bytes()) == record(scenario, "rust_hotpath"), name
    assert sum(file.stat().st_size for file in CORPUS.iterdir()) < MAX_BYTES


def test_scenarios_reach_what_they_are_for(control_plane: Factory) -> None:
    for name, scenario in SCENARIOS.items():
        plane = control_plane(scenario.control_plane_config())
        stats = drive(scenario, plane)
        plane.check()
        policy = scenario.control_plane_config().schedule_policy
        if policy != "fcfs":
            other = dataclasses.replace(scenario, config=scenario.config | {"schedule_policy": "fcfs"})
            assert stats != drive(other, control_plane(other.control_plane_config())), f"{name}: nobody went first"
            continue
        retracts = name.split("-")[0] in ("retraction", "seldom_retracted", "background")
        assert retracts == (stats.num_retracted_total > 2), name
        if "namespaces" in name:
            shared = scenario_without_namespaces(scenario, control_plane)
            assert 0 < stats.num_cached_tokens_total < 2 * shared.num_cached_tokens_total / 3, "prefixes were shared"
        if "pins" in name:
            assert stats.num_pinned_pages > 0
        if "limits" in name:
            assert stats.num_free_pages > 32, "the cache is kept small"
        if "shared_prefix" in name:
            assert stats.num_cached_tokens_total > stats.num_prompt_tokens_total / 2, name
        assert (stats.num_drafted_total > stats.num_accepted_total > 20) == ("drafts" in name), name
        if "guessed" in name:
            alone = dataclasses.replace(scenario, guessed=False)
            without = drive(alone, control_plane(alone.control_plane_config()))
            assert without.num_drafted_total < 20 < stats.num_accepted_total, "the texts themselves say little"
        assert (stats.num_loaded_pages_total > 80) == ("stored" in name), name
        if "naive" in name:
            assert stats.num_cached_tokens_total == 0
        if name.split("-")[0] in ("long", "bursty"):
            assert stats.num_free_pages < 4, f"{name}: nothing was evicted"


def scenario_without_namespaces(scenario: Scenario, control_plane: Factory) -> Stats:
    return drive(dataclasses.replace(scenario, num_namespaces=1), control_plane(scenario.control_plane_config()))


# ------------------------------------------------------------------------------------ one decision changed a little


def newest_first(patch: pytest.MonkeyPatch) -> None:
    def make(*args: Any) -> Request:
        made = make_request(*args)
        background, age, req_id = made.order
        return dataclasses.replace(made, order=(background, -age, req_id))

    patch.setattr(scheduler, "make_request", make)


def length_wins_over_stop(patch: pytest.MonkeyPatch) -> None:
    def accept(self: Request, token: int) -> FinishReason:
        reason = original(self, token)
        return FinishReason.LENGTH if len(self.tokens) >= self.max_len else reason

    original = Request.accept
    patch.setattr(Request, "accept", accept)


def quicker_to_forget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "RATIO_UP", 240)


def bolder_estimate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "RATIO_START", 700)


def slower_to_age(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request, "AGE", 65)


def pin_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """A pin that counts as a use of its pages only as long as its request lives."""
    patch.setattr(Pins, "holds", lambda self, req_id: False)


def background_counts_as_started(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestQueue, "num_ordinary", property(len))


def evict_pages_in_the_other_order(patch: pytest.MonkeyPatch) -> None:
    def evict(self: RadixTree, num_pages: int) -> None:
        before = self.pool.num_free
        original(self, num_pages)
        taken = [self.pool.pop() for _ in range(self.pool.num_free - before)]
        self.pool.push(taken)

    original = RadixTree.evict
    patch.setattr(RadixTree, "evict", evict)


def trust_less(patch: pytest.MonkeyPatch) -> None:
    """A draft is as long as what was right of the one before."""
    original = Drafter.learn
    patch.setattr(Drafter, "learn", lambda self, accepted, length: original(self, accepted // 2, length))


def match_a_page_less(patch: pytest.MonkeyPatch) -> None:
    original = RadixTree.match
    patch.setattr(
        RadixTree,
        "match",
        lambda self, at, tokens, first, last, *where: original(self, at, tokens, first, max(first, last - 1), *where),
    )


def one_budget_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPass, "_budget", lambda self: min(self.config.max_prefill_length, self.budgets[1]))


def loads_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "LOADED_TOKENS", 1 << 20)


def one_namespace_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tree, "page_key", lambda namespace, tokens: tuple(tokens))


def more_beside_prompts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(background, "PREFILL_SHARE", 10)


def longest_prefill_first(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(ranking.RANKS, "srpf", lambda request: -len(request.tokens))


def priorities_are_overruled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "priority", property(lambda self: 0, lambda self, value: None))


@pytest.mark.parametrize(
    "change",
    [
        more_beside_prompts,
        longest_prefill_first,
        priorities_are_overruled,
        one_budget_for_all,
        one_namespace_for_all,
        loads_at_once,
        newest_first,
        length_wins_over_stop,
        quicker_to_forget,
        bolder_estimate,
        slower_to_age,
        pin_at_the_end,
        background_counts_as_started,
        evict_pages_in_the_other_order,
        match_a_page_less,
        trust_less,
    ],
)
def test_a_changed_decision_is_seen(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    assert any(difference(name, ReferenceControlPlane) for name in SCENARIOS)
