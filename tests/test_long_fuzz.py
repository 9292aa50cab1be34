"""What is run apart: its result, its error, its bound of memory."""

from __future__ import annotations

import os

import pytest

from tests.helpers.long_fuzz import apart

BOUND = 4 << 30


def _own_id(_: int) -> int:
    return os.getpid()


def _sized(num_bytes: int) -> int:
    if num_bytes < 0:
        raise ValueError("less than nothing")
    return len(bytes(num_bytes))


def test_it_is_another_process() -> None:
    assert apart(_own_id, 0, max_bytes=BOUND) != os.getpid()


def test_its_errors_come_back() -> None:
    with pytest.raises(ValueError, match="less than nothing"):
        apart(_sized, -1, max_bytes=BOUND)


def test_beyond_its_bound_is_an_error() -> None:
    assert apart(_sized, 1 << 20, max_bytes=BOUND) == 1 << 20
    with pytest.raises(MemoryError):
        apart(_sized, BOUND, max_bytes=BOUND)
