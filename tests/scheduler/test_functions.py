"""Functions of the Rust scheduler that stand by themselves: the page about them, and what the server does."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from minisgl import _rust
from minisgl.scheduler.api import ControlPlaneConfig
from minisgl.scheduler.reference import ReferenceControlPlane
from minisgl.step import Arrival, Events, Int32Array

PAGE = Path(__file__).parents[2] / "docs" / "scheduler.md"


def int32(*numbers: int) -> Int32Array:
    return np.array(numbers, np.int32)


def test_the_examples_of_the_page_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)


# ----------------------------------------------------------------------------------------- against a whole scheduler


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_is_what_the_scheduler_admits(seed: int) -> None:
    """Prompts with nothing in common come to an empty server."""
    draw = random.Random(seed)
    size = draw.choice((1, 2, 4, 16))
    config = ControlPlaneConfig(
        num_pages=draw.randint(8, 120),
        page_size=size,
        max_running_requests=draw.randint(1, 8),
        max_prefill_length=draw.randint(1, 200),
        context_len=60 * size,
    )
    plane = ReferenceControlPlane(config)
    limit = config.limits().max_seq_len
    lengths = [draw.randint(1, min(60, 7 * size)) for _ in range(draw.randint(1, 10))]
    outputs = [draw.randint(1, 30) for _ in lengths]
    arrivals = [
        Arrival(i, np.full(length, 10 * i + 5, np.int32), length, output)
        for i, (length, output) in enumerate(zip(lengths, outputs, strict=True))
    ]
    assert max(lengths) < limit, "nobody is refused"
    ratio = plane.reserve_ratio
    plan = plane.schedule(0, Events(list(arrivals)))
    expected = plane.buffers.ring[plan.ring_index].extend_lens[: plan.num_rows].tolist()
    tokens, pages = _rust.prefill_admission_plan(
        int32(*lengths),
        int32(*[0 for _ in lengths]),
        int32(*[min(output, limit - length) for length, output in zip(lengths, outputs, strict=True)]),
        budget=config.max_prefill_length,
        num_slots=config.max_running_requests,
        num_pages=config.num_pages,
        page_size=size,
        reserve_ratio=ratio,
    )
    assert tokens.tolist() == expected
    assert pages.tolist() == [-(-one // size) for one in expected]


def test_the_estimate_of_those_that_run_counts() -> None:
    def admitted(needed: int, any_started: bool = True) -> int:
        tokens, _ = _rust.prefill_admission_plan(
            int32(10),
            int32(0),
            int32(16),
            budget=99,
            num_slots=1,
            num_pages=20,
            reserve_ratio=512,
            needed_by_started=needed,
            any_started=any_started,
        )
        return len(tokens)

    assert (admitted(2), admitted(3), admitted(3, any_started=False)) == (1, 0, 1)  # 10 + 16 / 2 of 20


def rebuild(plane: ReferenceControlPlane, config: ControlPlaneConfig, draw: random.Random) -> None:
    """Drive a few steps, and rebuild each step's arrays from rows and page tables alone."""
    size, tables = config.page_size, dict[int, list[int]]()
    for step in range(30):
        length = draw.randint(1, 5 * size)
        tokens = np.array([draw.randint(3, 9) for _ in range(length)], np.int32)
        plan = plane.schedule(step, Events([Arrival(step, tokens, length, draw.randint(1, 6))]))
        entry = plane.buffers.ring[plan.ring_index]
        for slot in entry.freed[: plan.num_freed].tolist():
            del tables[slot]
        for slot, _ in entry.assigned[: plan.num_assigned].tolist():
            tables[slot] = []
        at = 0
        for slot, _, count in entry.page_table_updates[: plan.num_page_table_updates].tolist():
            tables[slot] += entry.page_ids[at : at + count].tolist()
            at += count
        n = plan.num_rows
        slots, lens, extend = entry.req_slots[:n], entry.seq_lens[:n], entry.extend_lens[:n]
        columns = config.limits().max_pages_per_request
        rows = [tables[slot] + [-1] * (columns - len(tables[slot])) for slot in slots.tolist()]
        page_tables = np.array(rows, np.int32).reshape(n, columns)
        found = _rust.make_metadata_buffers(page_tables, lens - extend, extend, page_size=size)
        assert found["positions"].tolist() == entry.positions[: plan.num_tokens].tolist()
        assert found["out_loc"].tolist() == entry.out_loc[: plan.num_tokens].tolist()
        assert found["seq_lens"].tolist() == lens.tolist()
        assert found["qo_indptr"].tolist() == entry.qo_indptr[: n + 1].tolist()
        assert found["kv_indptr"].tolist() == entry.kv_indptr[: n + 1].tolist()
        assert found["last_page_len"].tolist() == entry.last_page_len[:n].tolist()
        assert _rust.make_positions(lens - extend, extend).tolist() == found["positions"].tolist()
        by_token = _rust.make_input_mapping(slots.copy(), extend.copy())
        assert by_token.tolist() == np.repeat(slots, extend).tolist()
        samples = np.zeros(n, np.int32)
        samples[entry.sample_rows[: plan.num_samples]] = 1
        write = _rust.make_write_mapping(lens.copy(), samples)
        assert write.tolist() == np.where(samples == 1, lens, -1).tolist()
        plane.commit(step, np.full(n, 4, np.int32))


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_the_arrays_are_those_of_a_step(size: int) -> None:
    config = ControlPlaneConfig(
        num_pages=40, page_size=size, max_running_requests=6, max_prefill_length=4 * size, context_len=20 * size
    )
    rebuild(ReferenceControlPlane(config), config, random.Random(size))


# ------------------------------------------------------------------------------------------------------ bad arguments

BAD = {
    "unlike lengths": lambda: _rust.make_positions(int32(1, 2), int32(1)),
    "a negative length": lambda: _rust.make_input_mapping(int32(0), int32(-1)),
    "too many tokens": lambda: _rust.make_positions(int32(0, 0), int32(2**31 - 1, 2**31 - 1)),
    "a position beyond int32": lambda: _rust.make_positions(int32(2**31 - 1), int32(1)),
    "int64": lambda: _rust.make_positions(np.zeros(1, np.int64), int32(1)),  # type: ignore[arg-type]
    "not contiguous": lambda: _rust.make_positions(np.zeros(4, np.int32)[::2], int32(1, 1)),
    "a list": lambda: _rust.make_write_mapping([1], int32(1)),  # type: ignore[arg-type]
    "a row without tokens": lambda: _rust.make_metadata_buffers(np.zeros((1, 1), np.int32), int32(0), int32(0)),
    "a short page table": lambda: _rust.make_metadata_buffers(np.zeros((1, 1), np.int32), int32(0), int32(3), 2),
    "page tables of other rows": lambda: _rust.make_metadata_buffers(np.zeros((2, 9), np.int32), int32(0), int32(1)),
    "no page size": lambda: _rust.make_metadata_buffers(np.zeros((1, 1), np.int32), int32(0), int32(1), 0),
    "nothing to compute": lambda: _rust.prefill_admission_plan(
        int32(4), int32(4), int32(1), budget=1, num_slots=1, num_pages=1
    ),
    "no output": lambda: _rust.prefill_admission_plan(int32(4), int32(0), int32(0), budget=1, num_slots=1, num_pages=1),
    "a negative candidate": lambda: _rust.prefill_admission_plan(
        int32(-4), int32(0), int32(1), budget=1, num_slots=1, num_pages=1
    ),
    "a ratio above 1": lambda: _rust.prefill_admission_plan(
        int32(4), int32(0), int32(1), budget=1, num_slots=1, num_pages=1, reserve_ratio=1025
    ),
    "no pages": lambda: _rust.RadixCacheManager(0),
    "an unknown policy": lambda: _rust.RadixCacheManager(1, 1, "fifo"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError):
        BAD[name]()


def test_a_refused_insertion_changes_nothing() -> None:
    cache = _rust.RadixCacheManager(4)
    cache.insert_prefix(int32(1, 2), int32(0, 1))
    for tokens, pages in ((int32(7, 8), int32(2, 1)), (int32(7, 8), int32(2, 2)), (int32(7, 8), int32(2, 4))):
        with pytest.raises(ValueError, match="pages"):
            cache.insert_prefix(tokens, pages)
    with pytest.raises(ValueError, match="do not fill"):
        cache.insert_prefix(int32(7, 8), int32(2))
    with pytest.raises(ValueError, match="num_pages"):
        cache.evict(3)
    assert cache.size_info() == (2, 0)
    assert cache.insert_prefix(int32(7, 8), int32(2, 3)) == 0
    cache.check_integrity()


def test_handles_are_refused_where_they_mean_nothing() -> None:
    cache, other = _rust.RadixCacheManager(4), _rust.RadixCacheManager(4)
    cache.insert_prefix(int32(1, 2), int32(0, 1))
    handle, _ = cache.match_prefix(int32(1, 2))
    with pytest.raises(ValueError, match="another manager"):
        other.lock_handle(handle)
    with pytest.raises(ValueError, match="not locked"):
        cache.lock_handle(handle, unlock=True)
    cache.evict(1)
    with pytest.raises(ValueError, match="match again"):
        cache.lock_handle(handle)
    cache.check_integrity()
