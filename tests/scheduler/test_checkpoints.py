"""Checkpoints of models with states: where a text saves one, where another begins, which of them goes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from minisgl.scheduler.inputs import check_config
from minisgl.scheduler.reference.radix import NO_CHECKPOINT, Checkpoints, Node
from minisgl.step import Abort, ClearCache, FinishReason, StepPlan, Unpin
from tests.helpers.scheduler import Driver, arrival

pytestmark = pytest.mark.usefixtures("each_control_plane")

SHARED = list(range(100, 140))  # 10 pages
LONG = list(range(1, 62))  # 15 pages and a token


def driver(**options: Any) -> Driver:
    """Pages of 4 tokens; a state every 16 tokens."""
    settings: dict[str, Any] = {"num_pages": 100, "checkpoint_interval": 16, "num_checkpoints": 20}
    return Driver(**(settings | options))


def saved(one: Driver) -> list[int]:
    """The lengths of the paths to checkpoints."""
    return sorted(len(path) for path, _ in one.plane.tree_states())


def begins(one: Driver, plan: StepPlan | None = None) -> list[tuple[int, int]]:
    plan = one.plan if plan is None else plan
    entry = one.plane.buffers.ring[plan.ring_index]
    return [tuple(row) for row in entry.state_begins[: plan.num_state_begins].tolist()]


def ask(one: Driver, req_id: int, tokens: list[int], max_tokens: int = 1, **options: Any) -> int:
    """To the end of it; with how many tokens of another text it began."""
    one.step(arrival(req_id, tokens, max_tokens, **options))
    one.run()
    return one.view.cached_len[req_id]


def test_a_prompt_is_saved_every_interval_and_where_the_next_turn_goes_on() -> None:
    one = driver()
    assert ask(one, 1, LONG) == 0 and begins(one, one.plans[0]) == [(0, -1)]
    assert saved(one) == [16, 32, 48, 60]
    entry = one.plane.buffers.ring[0]
    assert entry.state_saves[:4, :2].tolist() == [[0, 16], [0, 32], [0, 48], [0, 60]]
    _, _, nodes = one.plane.tree_view(10)
    assert [depth for _, _, _, depth, _, _, _, _, saved_there, _ in nodes if saved_there] == saved(one)
    assert ask(one, 2, [*LONG, 7, 8, 9]) == 60, "the next turn"
    assert ask(one, 3, LONG) == 60, "the same again"
    assert ask(one, 4, LONG[:50]) == 48 and ask(one, 5, LONG[:20]) == 16


def test_a_prompt_of_whole_pages_is_found_again_by_itself() -> None:
    one = driver()
    ask(one, 1, LONG[:40])
    assert saved(one) == [16, 32, 36]
    assert ask(one, 2, LONG[:40]) == 36
    assert one.plane.stats().num_evictable_pages == 9, "the page that nobody finds is free"


def test_at_a_fork_the_second_sequence_saves_a_state_and_the_third_uses_it() -> None:
    one = driver(checkpoint_interval=64)
    assert ask(one, 1, [*SHARED, 1, 2, 3, 4, 5, 6, 7, 8]) == 0
    assert saved(one) == [44]
    assert ask(one, 2, [*SHARED, 11, 12, 13, 14, 15, 16]) == 0
    assert (one.plane.stats().num_cut_short_total, one.plane.stats().num_computed_again_total) == (1, 40)
    assert saved(one) == [40, 44, 44]
    assert ask(one, 3, [*SHARED, 21, 22, 23]) == 40


def test_what_is_computed_again_takes_no_pages_and_writes_nowhere() -> None:
    one = driver(checkpoint_interval=64)
    ask(one, 1, [*SHARED, 1, 2, 3, 4, 5])
    before = one.plane.stats().num_inserted_pages_total
    rows = one.step(arrival(2, [*SHARED, 11, 12, 13, 14, 15], max_tokens=1))
    assert (rows[0].extend_len, len(rows[0].out_loc)) == (45, 5), "the view leaves out what goes to nowhere"
    assert one.plane.stats().num_inserted_pages_total == before + 1
    one.run()


def test_a_text_that_was_made_enters_with_its_last_checkpoint() -> None:
    one = driver()
    ask(one, 1, LONG[:10], max_tokens=60)
    made = one.tokens[1]
    assert saved(one) == [8, 64]
    assert ask(one, 2, [*LONG[:10], *made, 7]) == 64
    assert one.plane.stats().num_free_pages + one.plane.stats().num_evictable_pages == 100


def test_a_retracted_request_continues_from_its_last_checkpoint() -> None:
    one = driver(num_pages=26, max_running_requests=2, context_len=104)
    one.plane.reserve_ratio = 102
    one.step(arrival(1, LONG[:8], max_tokens=70), arrival(2, [50, *LONG[:8]], max_tokens=70))
    one.run()
    assert one.plane.stats().num_retracted_total == 1
    again = [plan for plan in one.plans if any(slot >= 0 for _, slot in begins_at_the_time[plan.step])]
    assert again


begins_at_the_time: dict[int, list[tuple[int, int]]] = {}


@pytest.fixture(autouse=True)
def remembers_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring entry is written again two steps later."""
    begins_at_the_time.clear()
    schedule = Driver.schedule

    def remembering(self: Driver, *events: Any) -> Any:
        rows = schedule(self, *events)
        begins_at_the_time[self.plan.step] = begins(self)
        return rows

    monkeypatch.setattr(Driver, "schedule", remembering)


def test_a_state_saved_in_this_step_is_not_used_in_it() -> None:
    one = driver()
    one.step(arrival(1, LONG, max_tokens=1), arrival(2, [*LONG, 3], max_tokens=1))
    assert one.view.cached_len == {1: 0}, "the second has no room in this step"
    one = driver(max_prefill_length=256)
    one.step(arrival(1, LONG, max_tokens=1), arrival(2, [*LONG, 3], max_tokens=1))
    assert one.view.cached_len == {1: 0, 2: 0}
    one.run()


def test_no_state_is_saved_at_unlocked_pages() -> None:
    """The last page of a whole prompt is cached, and stays the own one: who saves there gives up that very page."""
    one = driver(page_size=1, checkpoint_interval=2, num_checkpoints=2)
    ask(one, 33, [1, 1, 2, 1, 2])
    assert saved(one) == [2, 4]
    ask(one, 37, [1, 1])
    assert saved(one) == [1, 4]


def test_without_slots_texts_are_whole_and_nothing_is_found() -> None:
    one = driver(num_checkpoints=0)
    assert ask(one, 1, LONG, max_tokens=30) == 0 and ask(one, 2, LONG, max_tokens=30) == 0
    assert one.tokens[1] == one.tokens[2]
    assert (one.plane.stats().num_free_pages, one.plane.stats().num_saved_total) == (100, 0)


def test_the_checkpoint_that_saves_least_goes_first_and_its_pages_with_it() -> None:
    one = driver(num_checkpoints=3, checkpoint_interval=400)
    ask(one, 1, list(range(200, 250)))  # saves 48 tokens
    ask(one, 2, list(range(300, 310)))  # saves 8
    ask(one, 3, list(range(400, 430)))  # saves 28
    ask(one, 4, list(range(500, 520)))
    assert saved(one) == [16, 28, 48]
    assert one.plane.stats().num_evictable_pages == (16 + 28 + 48) // 4
    assert ask(one, 5, list(range(300, 310))) == 0
    assert ask(one, 6, list(range(200, 250))) == 48, "what saves much stays, though it is the oldest"


def test_an_unused_checkpoint_is_evicted_at_last() -> None:
    """However much it saves: the worth of those that go is the floor for those that come."""
    one = driver(num_checkpoints=2, checkpoint_interval=400)
    ask(one, 1, list(range(200, 250)))
    for turn in range(20):
        ask(one, 2 + turn, [1000 + turn] * 20)
    assert 48 not in saved(one)


def test_a_pin_keeps_the_checkpoint_of_its_prompt() -> None:
    one = driver(num_checkpoints=2, checkpoint_interval=400, max_pinned_pages=20)
    one.step(arrival(1, list(range(200, 210)), max_tokens=1, pin=True))
    one.run()
    for turn in range(9):
        ask(one, 2 + turn, [1000 + turn] * 40)
    assert ask(one, 50, list(range(200, 212))) == 8
    one.step(ClearCache())
    assert saved(one) == [8]
    one.step(Unpin(1))
    one.step(ClearCache())
    assert saved(one) == [] and one.plane.stats().num_checkpoints == 0


def test_an_emptied_cache_and_an_abort_give_all_slots_back() -> None:
    one = driver()
    one.step(arrival(1, LONG, max_tokens=90))
    for _ in range(30):
        one.step()
    assert one.plane.stats().num_checkpoints == 5, "four of the prompt, one of the text"
    one.step(Abort(1))
    assert one.ends[1] is FinishReason.ABORT and saved(one) == [16, 32, 48, 60, 80]
    one.step(ClearCache())
    assert one.plane.stats().num_checkpoints == 0 and one.plane.stats().num_free_pages == 100


def test_a_cache_that_keeps_nothing_saves_nothing() -> None:
    one = driver(cache="naive")
    assert ask(one, 1, LONG, max_tokens=40) == 0 and ask(one, 2, LONG) == 0
    assert one.plane.stats().num_saved_total == 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"checkpoint_interval": 6}, "checkpoint_interval: 6: must be whole pages of 4"),
        ({"checkpoint_interval": 0}, "num_checkpoints: 20: needs checkpoint_interval above 0"),
        ({"checkpoint_interval": -4}, "checkpoint_interval: -4: must be at least 0"),
        ({"num_checkpoints": -1}, "num_checkpoints: -1: must be at least 0"),
        ({"max_draft_len": 2}, "max_draft_len: 2: must be 0 with checkpoint_interval"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        driver(**settings)


def test_the_order_is_that_of_a_plain_list() -> None:
    """Random saves, uses, pins and losses on a path, beside a list that is searched from end to end."""
    numbers = random.Random(5)
    for _ in range(100):
        checkpoints, nodes = Checkpoints(6), [Node(None, [], [])]
        for length in (3, 1, 4, 1, 5, 9, 2, 6):
            nodes.append(Node(nodes[-1], [0] * length, [0]))
        worth: dict[int, tuple[int, int]] = {}  # by node: its worth, when it was used
        floor, uses, held = [0], [0], set[int]()

        def value(
            at: int,
            nodes: list[Node] = nodes,
            worth: dict[int, tuple[int, int]] = worth,
            floor: list[int] = floor,
            uses: list[int] = uses,
        ) -> None:
            uses[0] += 1
            above = max((one for one in range(1, at) if nodes[one].checkpoint != NO_CHECKPOINT), default=0)
            worth[at] = floor[0] + sum(len(node.tokens) for node in nodes[above + 1 : at + 1]), uses[0]

        for _ in range(60):
            have = [at for at, node in enumerate(nodes) if node.checkpoint != NO_CHECKPOINT]
            at, what = numbers.randrange(1, len(nodes)), numbers.randrange(5)
            if at not in have:
                slot = checkpoints.pop()
                if slot is None and worth:
                    gone = min(worth, key=lambda one: worth[one])
                    assert checkpoints.least() is nodes[gone]
                    floor[0] = worth.pop(gone)[0]
                    slot = checkpoints.give_up(nodes[gone])
                if slot is None:
                    assert checkpoints.least() is None
                    continue
                checkpoints.put(nodes[at], slot, 0)
                checkpoints.settle()
                value(at)
            elif what == 0 and at not in held:
                checkpoints.hold(nodes[at])
                held.add(at)
                del worth[at]
            elif what == 1 and at in held:
                checkpoints.unhold(nodes[at])
                held.discard(at)
                value(at)
            elif what == 2 and at not in held:
                checkpoints.push(checkpoints.take_off(nodes[at]))
                del worth[at]
            elif at in worth:
                checkpoints.use(nodes[at])
                value(at)


def test_settings_without_states_decide_as_before() -> None:
    check_config(Driver().config)
    assert Driver().plane.stats().num_checkpoints == 0
