"""The building blocks in Rust: what they refuse, and that each function says what its twin in Python says."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from minisgl import hotpath
from minisgl.hotpath import RadixCacheManager
from minisgl.scheduler.parts import Candidate
from minisgl.scheduler.reference import PYTHON

ROOT = Path(__file__).parent.parent


def test_the_examples_of_the_page() -> None:
    page = (ROOT / "docs" / "scheduler.md").read_text(encoding="utf-8").partition("## Its parts, from a script")[2]
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 4


def test_a_prefix_is_found_locked_and_evicted() -> None:
    cache = RadixCacheManager(8, page_size=2)
    pages = cache.take(3)
    assert cache.insert_prefix([1, 2, 3, 4, 5, 6], pages) == 0
    handle, found = cache.match_prefix(np.array([1, 2, 3, 4, 9, 9], np.int32))
    assert (handle.cached_len, found) == (4, pages[:2])
    cache.lock_handle(handle)
    assert cache.size_info() == (1, 2)
    assert cache.evict(1) == [pages[2]]
    cache.lock_handle(handle, unlock=True)
    assert sorted(cache.take(8)) == list(range(8)), "what is evictable is taken, too"
    assert cache.size_info() == (0, 0)
    cache.check_integrity()


def test_pages_stay_with_whoever_brings_what_is_cached_already() -> None:
    cache = RadixCacheManager(4)
    first, second = cache.take(2), cache.take(2)
    cache.insert_prefix([7, 8], first)
    assert cache.insert_prefix([7, 9], second) == 1
    cache.free(second[:1])
    with pytest.raises(ValueError, match=r"pages: \d: not a page that was taken"):
        cache.free(second[:1])
    with pytest.raises(ValueError, match="not a page that was taken"):
        cache.insert_prefix([1, 2], first)
    assert cache.match_prefix([7, 9], namespace=3)[1] == [], "another namespace"


def test_a_handle_whose_pages_may_be_gone_is_refused() -> None:
    cache = RadixCacheManager(2)
    cache.insert_prefix([1, 2], cache.take(2))
    handle, _ = cache.match_prefix([1, 2])
    with pytest.raises(ValueError, match="handle: not locked"):
        cache.lock_handle(handle, unlock=True)
    cache.evict(2)
    with pytest.raises(ValueError, match="handle: its pages may be gone: match again"):
        cache.lock_handle(handle)


def test_a_handle_of_another_cache_or_from_before_a_reset_is_refused() -> None:
    one, other = RadixCacheManager(2), RadixCacheManager(2)
    for cache in (one, other):
        cache.insert_prefix([1], cache.take(1))
    handle, _ = one.match_prefix([1])
    one.lock_handle(handle)
    for unlock in (False, True):
        with pytest.raises(ValueError, match="handle: of another cache, or from before a reset"):
            other.lock_handle(handle, unlock)
    with pytest.raises(ValueError, match="match: of another cache"):
        other.descend(0, one.match(0, [1], 0, 1))
    one.reset()
    with pytest.raises(ValueError, match="from before a reset"):
        one.lock_handle(handle, unlock=True)
    assert one.size_info() == (0, 0) and other.size_info() == (1, 0)
    one.check_integrity()
    other.check_integrity()


def test_a_page_that_nobody_took_changes_nothing() -> None:
    cache = RadixCacheManager(2)
    (page,) = cache.take(1)
    with pytest.raises(ValueError, match="not a page that was taken"):
        cache.insert(0, [7], [1 - page], 0)
    assert cache.match_prefix([7])[1] == []
    cache.check_integrity()


def test_candidates_that_share_what_is_cached_end_the_plan() -> None:
    row = (44, 0, 10, 10, 10, 0, False, 8)
    plan = hotpath.prefill_admission_plan([row, row], budget=200, available=20, page_size=4)
    assert [one[0] for one in plan] == [4, 0] and plan[1][-1] > 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: RadixCacheManager(0), "num_pages: 0: must be between 1"),
        (lambda: RadixCacheManager(4, policy="fifo"), "policy: .fifo.: lru, lfu or naive"),
        (lambda: RadixCacheManager(4).take(5), "num_pages: 5: 4 are free or evictable"),
        (lambda: RadixCacheManager(4, 2).insert_prefix([1, 2, 3], [0]), "tokens: 3 do not fill 1 pages: 2"),
        (lambda: RadixCacheManager(4).match_prefix(np.zeros((2, 2), np.int32)), "tokens: not a list"),
        (lambda: RadixCacheManager(4).match_prefix(np.zeros(2, ">i4")), "tokens: not a list"),
        (lambda: RadixCacheManager(4).match_prefix([2**31]), "tokens: not a list of int32 numbers"),
        (lambda: RadixCacheManager(4).match_prefix([1], namespace=2**31), "namespace: 2147483648: out of range"),
        (lambda: RadixCacheManager(4, num_checkpoints=2**60), "num_checkpoints: must be at most"),
        (lambda: RadixCacheManager(4).take(-1), "num_pages: -1: out of range"),
        (lambda: hotpath.make_positions([0], [-1]), "extend_lens: row 0: -1: at least 0"),
        (lambda: hotpath.make_metadata_buffers([2**31 - 2] * 2, [1, 1], [1, 2]), "starts: row 1: the number of pages"),
        (lambda: hotpath.prefill_admission_plan([], budget=1, available=1, page_size=2**32), "page_size: 4294967296"),
        (lambda: hotpath.prefill_admission_plan([(1, 2)], budget=1, available=1), "candidates: 0: "),  # type: ignore[list-item]
        (lambda: hotpath.make_positions([1], [1, 2]), "extend_lens: 2 numbers, not 1"),
        (lambda: hotpath.make_positions([-1], [1]), "starts: row 0: -1: at least 0"),
        (lambda: hotpath.make_metadata_buffers([0], [3], [0], 2), "pages: 1 numbers, not 2"),
        (lambda: hotpath.make_metadata_buffers([0], [1], [-1]), "pages: a page below 0"),
        (
            lambda: hotpath.prefill_admission_plan([(4, 0, 2, 0, 1, 0, False, 1)], budget=1, available=1),
            "candidates: 0: contradicting counts",
        ),
    ],
)
def test_bad_arguments_are_named(call: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()  # type: ignore[operator]


def test_mappings_have_the_documented_values() -> None:
    assert hotpath.make_positions([5, 0], [1, 3]).tolist() == [5, 0, 1, 2]
    assert hotpath.make_input_mapping([7, 2], [1, 3]).tolist() == [7, 2, 2, 2]
    assert hotpath.make_write_mapping([6, 3], [1, 0]).tolist() == [6, -1]


@pytest.mark.parametrize("seed", range(20))
def test_metadata_is_that_of_the_twin(seed: int) -> None:
    draw = random.Random(seed)
    size, rows = draw.choice([1, 3, 16]), draw.randint(0, 12)
    starts = [draw.randint(0, 99) for _ in range(rows)]
    lens = [draw.choice([1, 1, draw.randint(1, 70)]) for _ in range(rows)]
    counts = [-(-(start + length) // size) - start // size for start, length in zip(starts, lens, strict=True)]
    pages = [draw.randint(0, 5000) for _ in range(sum(counts))]
    made = dict(hotpath.make_metadata_buffers(starts, lens, pages, size))
    packed = made.pop("packed")
    expected = PYTHON.make_metadata(starts, lens, pages, size)
    assert made.keys() == expected.keys()
    for name, array in made.items():
        assert array.dtype == expected[name].dtype == np.int32 and array.tolist() == expected[name].tolist(), name
        assert np.shares_memory(array, packed) or not len(array)


@pytest.mark.parametrize("seed", range(200))
def test_admission_is_that_of_the_twin(seed: int) -> None:
    draw = random.Random(seed)
    size, available = draw.choice([1, 4, 16]), draw.randint(0, 60)
    candidates: list[Candidate] = []
    for _ in range(draw.randint(1, 6)):
        found, loadable, held = draw.randint(0, 6), draw.choice([0, 0, draw.randint(0, 5)]), draw.choice([0, 3])
        unlocked = draw.randint(0, found)
        length = (held + found + loadable) * size + draw.randint(1, 6 * size)
        matched = draw.randint(unlocked, found)
        counts = held, matched, unlocked, found, loadable, draw.random() < 0.2
        candidates.append((length, *counts, draw.choice([0, 1, 30, 10_000])))
    room = {
        "budget": draw.choice([0, 1, 7, 64, 500]),
        "available": available,
        "page_size": size,
        "max_page_changes": draw.choice([2, 20, 1000]),
        "reserve_ratio": draw.choice([0, 102, 716, 1024]),
        "needed": draw.choice([0, 0, 5, 40]),
    }
    assert PYTHON.plan_chunks(candidates, **room) == hotpath.prefill_admission_plan(candidates, **room)  # type: ignore[arg-type]
