"""Ids and times of answers: by chance, or as another server drew them."""

from __future__ import annotations

import re
import time

from minisgl.parsers import ids


def test_one_source_draws_the_same_twice() -> None:
    def draw() -> list[str]:
        with ids.of(ids.Source(7, 1000)):
            return [ids.new_id(), ids.new_id(9, "ab"), ids.new_id(24), str(ids.created())]

    assert draw() == draw()
    assert draw()[3] == "1000"


def test_ids_without_a_source_are_new() -> None:
    found = {ids.new_id() for _ in range(100)}
    assert len(found) == 100
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in found)
    assert re.fullmatch("[ab]{9}", ids.new_id(9, "ab"))
    assert abs(ids.created() - time.time()) < 60


def test_a_source_ends_with_its_block() -> None:
    with ids.of(ids.Source(7, 1000)):
        pass
    assert ids.created() != 1000
