"""What a router does, by examples; the reference and the one in Rust."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl.routing.api import KeyShare, Placed, RouterConfig
from tests.helpers.routing import Make, add_all, config, prompt, up, where, with_keys

# --------------------------------------------------------------------------------------------------------- policies


def test_round_robin_skips_engines_that_are_down_or_full(make: Make) -> None:
    router = up(make(config("round_robin", 3, max_inflight_per_engine=2)), 3)
    assert router.engine_down(1) == []
    add_all(router, range(5))
    assert where(router) == [(0, 0), (1, 2), (2, 0), (3, 2)] and router.num_waiting == 1
    router.engine_up(1)
    assert where(router) == [(4, 1)]


def test_least_load_counts_what_was_placed_and_what_others_sent(make: Make) -> None:
    router = up(make(config("least_load", 2)), 2)
    router.report(0, 2, 1)
    add_all(router, range(5))
    assert where(router) == [(0, 1), (1, 1), (2, 1), (3, 0), (4, 1)]
    assert router.loads() == [1, 4]
    router.report(0, 0, 1)  # its own: the others are gone
    add_all(router, [5])
    assert where(router) == [(5, 0)]


def test_equal_loads_take_turns(make: Make) -> None:
    """An idle fleet would fill one cache, and leave the others empty."""
    for policy in ("least_load", "cache_aware"):
        router = up(make(config(policy, 3)), 3)  # type: ignore[arg-type]
        engines = []
        for req_id in range(6):
            router.add(req_id, prompt(*range(10 * req_id, 10 * req_id + 5)))
            engines.append(where(router)[0][1])
            router.remove(req_id)
        assert engines == [0, 1, 2, 0, 1, 2]


def test_random_goes_everywhere_and_follows_its_seed(make: Make) -> None:
    def engines(seed: int) -> list[int]:
        router = up(make(config("random", 4, seed=seed)), 4)
        add_all(router, range(400))
        return [engine for _, engine in where(router)]

    assert engines(1) == engines(1) != engines(2)
    assert all(60 < count < 140 for count in np.bincount(engines(7), minlength=4))


def test_the_deepest_match_wins_while_the_load_is_near(make: Make) -> None:
    router = up(make(config("cache_aware", 2)), 2)
    long, other = prompt(*range(17)), prompt(*range(8), 99)
    router.add(0, long)
    assert router.place() == [Placed(0, 0, 0)]
    for req_id, tokens, expected in ((1, long, 16), (2, other, 8), (3, prompt(5, *range(8)), 0)):
        router.add(req_id, tokens)
        (found,) = router.place()
        assert (found.matched_len, found.engine) == (expected, 0 if expected else 1)
    router.add(4, long)
    router.add(5, long)
    assert router.place() == [Placed(4, 0, 16), Placed(5, 1, 0)]  # 4 beside 1: more than 2 above


def test_no_prefix_is_found_from_another_namespace(make: Make) -> None:
    router = up(make(config("cache_aware", 1)), 1)
    tokens = prompt(*range(9))
    for req_id, (namespace, expected) in enumerate([(0, 0), (1, 0), (2, 0), (1, 8), (0, 8)]):
        router.add(req_id, tokens, namespace=namespace)
        assert router.place() == [Placed(req_id, 0, expected)]


def test_the_threshold_grows_with_the_load(make: Make) -> None:
    """Half of the least load, if that is more than `balance_requests`."""
    router = up(make(config("cache_aware", 2)), 2)
    router.report(0, 100, 0)
    router.report(1, 100, 0)
    for req_id in range(60):
        router.add(req_id, prompt(1, 2, 3, 4, 5))
    assert [engine for _, engine in where(router)][:53] == [0] * 51 + [1, 1]  # which has it, too, now


def test_a_whole_prompt_that_is_cached_still_has_a_token_to_compute(make: Make) -> None:
    router = up(make(config("cache_aware", 1)), 1)
    for req_id, expected in ((0, 0), (1, 4)):
        router.add(req_id, prompt(*range(8)))
        assert router.place() == [Placed(req_id, 0, expected)]


def test_the_least_recently_used_pages_are_forgotten_first_deepest_first(make: Make) -> None:
    router = up(make(config("cache_aware", 1, tree_pages=4)), 1)
    a, b = prompt(*range(12), 0), prompt(*range(100, 108), 0)

    def matched(req_id: int, tokens: Any) -> int:
        router.add(req_id, tokens)
        (found,) = router.place()
        return found.matched_len

    assert [matched(0, a), matched(1, b), matched(2, a), matched(3, b)] == [0, 0, 8, 4]
    router.engine_up(0)  # again, with nothing in it
    assert matched(4, a) == 0


def test_a_lost_engine_is_thought_empty_when_it_is_back(make: Make) -> None:
    router = up(make(config("cache_aware", 2)), 2)
    add_all(router, [0])
    router.add(1, prompt(1, 2, 3, 4, 5))
    where(router)
    lost = router.engine_down(1)
    assert lost == [1]
    router.engine_up(1)
    router.add(1, prompt(1, 2, 3, 4, 5), again=True)
    assert router.place() == [Placed(1, 1, 0)]


# ----------------------------------------------------------------------------------------------------------- the line


def test_nothing_is_placed_before_an_engine_is_up(make: Make) -> None:
    router = make(config("cache_aware"))
    add_all(router, [3])
    assert router.place() == [] and router.num_waiting == 1
    router.engine_up(1)
    assert where(router) == [(3, 1)] and router.loads() == [0, 1]


def test_limits_in_sum_and_by_engine(make: Make) -> None:
    router = up(make(config("least_load", 2, max_inflight=3, max_inflight_per_engine=2)), 2)
    add_all(router, range(6))
    assert where(router) == [(0, 0), (1, 1), (2, 0)] and router.num_waiting == 3
    router.remove(0)
    assert where(router) == [(3, 1)] and router.place() == []
    router.remove(2)
    router.remove(3)
    assert where(router) == [(4, 0), (5, 1)] and router.loads() == [1, 2]


def test_priorities_age(make: Make) -> None:
    """One of priority 1 is overtaken by 63 later ones of priority 0, not by 64: the 64th is as old, and comes later."""
    router = make(config("least_load", 1))
    router.add(1000, prompt(1), priority=1)
    add_all(router, range(100))
    router.engine_up(0)
    order = [req_id for req_id, _ in where(router)]
    assert order.index(1000) == 63 and [i for i in order if i != 1000] == list(range(100))


def test_requests_added_again_go_before_all_others_in_order(make: Make) -> None:
    router = up(make(config("least_load", 2, max_inflight_per_engine=3)), 2)
    add_all(router, range(8))
    where(router)
    router.add(100, prompt(1), priority=-1000)
    lost = router.engine_down(1)
    assert lost == [1, 3, 5] and router.loads() == [3, 0]
    for req_id in lost:
        router.add(req_id, prompt(1), priority=5, again=True)
    assert router.place() == []
    router.engine_up(1)
    assert where(router) == [(1, 1), (3, 1), (5, 1)]
    router.remove(0)
    assert where(router) == [(100, 0)]


def test_a_waiting_one_can_leave_and_its_id_is_free_again(make: Make) -> None:
    router = make(config("least_load", 1))
    add_all(router, [1, 2])
    with pytest.raises(ValueError, match="req_id 2: is in use"):
        router.add(2, prompt(1))
    router.remove(1)
    router.remove(77)
    assert router.num_waiting == 1
    router.engine_up(0)
    assert where(router) == [(2, 0)]
    with pytest.raises(ValueError, match="req_id 2: is in use"):
        router.add(2, prompt(1))
    router.remove(2)
    add_all(router, [2])
    assert where(router) == [(2, 0)]


# --------------------------------------------------------------------------------------------------------------- keys


def test_a_key_at_its_limit_holds_up_nobody_else(make: Make) -> None:
    router = up(make(with_keys(config("least_load", 1), KeyShare(max_inflight=1))), 1)
    add_all(router, [0, 1, 2], key=1)
    add_all(router, [3])
    assert where(router) == [(3, 0), (0, 0)] and router.num_waiting == 2
    assert router.engine_down(0) == [3, 0]
    add_all(router, [3, 0])
    router.add(5, prompt(1), key=1, again=True)
    router.add(6, prompt(1), key=1, again=True)
    router.engine_up(0)
    assert [req_id for req_id, _ in where(router)] == [5, 3, 0]
    router.remove(5)
    assert where(router) == [(6, 0)]


def tokens_by_key(router: Any, lens: dict[int, int], num_turns: int) -> dict[int, int]:
    """Both keys always have some waiting; one request at a time, of `lens[key]` tokens in and as many out."""
    got, next_id, key_of = dict.fromkeys(lens, 0), 0, {}
    for key, length in lens.items():
        for _ in range(2):
            router.add(next_id, np.ones(length, np.int32), key=key)
            key_of[next_id] = key
            next_id += 1
    for _ in range(num_turns):
        (placed,) = router.place()
        key = key_of.pop(placed.req_id)
        got[key] += 2 * lens[key]
        router.remove(placed.req_id, lens[key])
        router.add(next_id, np.ones(lens[key], np.int32), key=key)
        key_of[next_id] = key
        next_id += 1
    return got


@pytest.mark.parametrize(("shares", "lens"), [((1, 1), (10, 10)), ((3, 1), (10, 10)), ((1, 1), (100, 5))])
def test_keys_get_their_shares_in_tokens(make: Make, shares: tuple[int, int], lens: tuple[int, int]) -> None:
    keys = [KeyShare(share) for share in shares]
    router = up(make(with_keys(config("least_load", 1, max_inflight=1), *keys)), 1)
    got = tokens_by_key(router, {1: lens[0], 2: lens[1]}, 2000)
    assert got[1] / got[2] == pytest.approx(shares[0] / shares[1], rel=0.05)


def test_idle_time_is_no_credit(make: Make) -> None:
    """Key 2 comes late: it gets half from then on, not all until it has caught up."""
    router = up(make(with_keys(config("least_load", 1, max_inflight=1), KeyShare(), KeyShare())), 1)
    add_all(router, range(1000), key=1)
    for _ in range(500):
        router.remove(where(router)[0][0])
    add_all(router, range(5000, 5100), key=2)
    order = []
    for _ in range(50):
        ((req_id, _),) = where(router)
        order.append(req_id)
        router.remove(req_id)
    assert 20 <= sum(req_id >= 5000 for req_id in order) <= 30


def test_waiting_at_the_own_limit_is_no_credit(make: Make) -> None:
    """Key 2 waited for its limit while key 1 went on: it does not get all turns afterwards."""
    keys = (KeyShare(), KeyShare(max_inflight=1))
    router = up(make(with_keys(config("least_load", 1, max_inflight=2), *keys)), 1)
    add_all(router, range(1000), key=1)
    add_all(router, range(5000, 5100), key=2)
    assert where(router) == [(0, 0), (5000, 0)]
    last = 0
    for _ in range(300):
        router.remove(last)
        ((last, _),) = where(router)
    assert last == 300
    router.remove(last)
    order = []
    router.remove(5000)
    for _ in range(40):
        order.extend(req_id for req_id, _ in where(router))
        router.remove(order[len(order) - 2] if len(order) > 1 else order[0])
    assert 12 <= sum(req_id >= 5000 for req_id in order) <= 28


# ------------------------------------------------------------------------------------------------------ bad arguments


def test_invalid_arguments_are_refused(make: Make) -> None:
    router = up(make(config("least_load", 2)), 2)
    for call in (router.engine_up, router.engine_down, lambda engine: router.report(engine, 0, 0)):
        for engine in (2, -1):
            with pytest.raises(ValueError, match=f"engine {engine}: must be below 2"):
                call(engine)
    for key in (1, -1):
        with pytest.raises(ValueError, match=f"key {key}: must be below 1"):
            router.add(0, prompt(1), key=key)
    assert router.num_waiting == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "fastest"),
        ("num_engines", 0),
        ("page_size", 0),
        ("tree_pages", 0),
        ("balance_percent", -1),
        ("max_inflight", -1),
        ("seed", 2**64),
        ("keys", (KeyShare(0),)),
        ("keys", (KeyShare(), KeyShare(2**20 + 1))),
        ("keys", (KeyShare(1, -1),)),
    ],
)
def test_an_invalid_configuration_is_refused(make: Make, field: str, value: Any) -> None:
    settings: dict[str, Any] = {"policy": "random", "num_engines": 2, field: value}
    with pytest.raises(ValueError, match=rf"^{field}"):
        make(RouterConfig(**settings))


def test_of_an_engine_twice_its_pages_are_remembered(make: Make) -> None:
    router = make(RouterConfig("cache_aware", 2, page_size=4))
    router.engine_up(0, 1)  # pages
    tokens = np.arange(40, dtype=np.int32)
    found = []
    for req_id in range(2):
        router.add(req_id, tokens)
        found += router.place()
        router.remove(req_id)
    assert [one.matched_len for one in found] == [0, 8]
    router.engine_up(0)
    for req_id in range(2):
        router.add(req_id, tokens)
        found += router.place()
        router.remove(req_id)
    assert [one.matched_len for one in found[2:]] == [0, 36]
