"""Matchers by slot: who has one is asked and told, in rows' order, and nobody else."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.grammar.slots import LATE, GrammarSlots
from minisgl.step import Int32Array
from tests.helpers.grammars import PickyMatcher

VOCAB, EOS = 100, (5, 7)


def ids(bits: np.ndarray) -> list[int]:  # type: ignore[type-arg]
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def picky(seed: int, poisoned: int = -1) -> PickyMatcher:
    return PickyMatcher(seed, VOCAB, EOS, poisoned)


def test_only_rows_with_a_grammar_have_masks() -> None:
    slots = GrammarSlots(VOCAB, EOS)
    assert not slots and slots.masks([0, 1]) is None
    assert slots.record([0, 1], np.array([1, 2], np.int32)) == {}
    slots.assign(3, None, [])
    assert not slots
    made = {4: picky(1), 2: picky(2)}
    for slot, matcher in made.items():
        slots.assign(slot, matcher, [])
    assert slots.masks([0, 1, 3]) is None
    masks = slots.masks([4, 0, 2])
    assert masks is not None and masks.rows.tolist() == [0, 2]
    assert [ids(bits) for bits in masks.bits] == [sorted(made[4].allowed()), sorted(made[2].allowed())]


def test_a_slot_that_is_assigned_again_belongs_to_the_new_request() -> None:
    slots, first, second = GrammarSlots(VOCAB, EOS), picky(1), picky(2)
    slots.assign(0, first, [])
    slots.assign(0, second, [token := second.allowed()[0]])
    expected = picky(2)
    expected.consume(token)
    masks = slots.masks([0])
    assert masks is not None and ids(masks.bits[0]) == sorted(expected.allowed())
    slots.assign(0, None, [])
    assert slots.masks([0]) is None


def test_the_matcher_of_a_freed_slot_is_removed() -> None:
    slots = GrammarSlots(VOCAB, EOS)
    for slot in (0, 1):
        slots.assign(slot, picky(slot), [])
    slots.free(np.array([0, 7], np.int32))
    assert slots.masks([0]) is None and slots.masks([1]) is not None
    slots.free(np.array([1], np.int32))
    assert not slots


def test_rows_whose_matcher_fails_get_an_end_and_a_reason() -> None:
    slots, good, bad = GrammarSlots(VOCAB, EOS), picky(1), picky(2)
    slots.assign(1, good, [])
    slots.assign(2, bad, [])
    wrong = next(i for i in range(VOCAB) if i not in bad.allowed())
    right = good.allowed()[0]
    tokens = np.array([44, right, wrong], np.int32)
    failures = slots.record([0, 1, 2], tokens)
    assert failures == {2: f"token {wrong} may not come"} and tokens.tolist() == [44, right, EOS[0]]
    again = np.array([EOS[0]], np.int32)
    assert slots.record([2], again).keys() == {0}, "the step that was under way says it, too"


def test_a_row_with_a_late_mask_has_no_token_until_its_slot_is_assigned_again() -> None:
    slots, slow, quick = GrammarSlots(VOCAB, EOS), PickyMatcher(1, VOCAB, EOS, slow_one_in=1), picky(2)
    slots.assign(1, slow, [])
    slots.assign(2, quick, [])
    for num_late in (1, 1):  # in the step that was under way it is not asked again
        masks = slots.masks([1, 2])
        assert masks is not None and ids(masks.bits[1]) == sorted(quick.allowed())
        tokens = np.array([44, quick.allowed()[0]], np.int32)
        assert slots.record([1, 2], tokens) == {0: LATE} and tokens[0] == EOS[0] and slow.num_late == num_late
        slow.prepare()
    slots.assign(4, slow, [])
    masks = slots.masks([4])
    assert masks is not None and ids(masks.bits[0]) == sorted(slow.allowed())
    slots.free(np.array([1], np.int32))
    slots.assign(1, other := picky(3), [])
    assert slots.masks([1]) is not None and slots.record([1], np.array(other.allowed()[:1], np.int32)) == {}


def test_the_masks_of_a_step_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, left = [0.0], list[float]()

    class Takes(PickyMatcher):
        def try_fill(self, mask: Int32Array, left_s: float) -> bool:
            left.append(left_s)
            now[0] += 0.004
            return super().try_fill(mask, left_s)

    monkeypatch.setattr("minisgl.grammar.slots.time.perf_counter", lambda: now[0])
    slots = GrammarSlots(VOCAB, EOS)
    for slot in range(3):
        slots.assign(slot, Takes(slot, VOCAB, EOS), [])
    slots.masks([0, 1, 2])
    assert left == pytest.approx([0.005, 0.001, 0.0])


def test_a_matcher_that_fails_at_its_mask_ends_its_request() -> None:
    slots = GrammarSlots(VOCAB, EOS)
    slots.assign(0, picky(3, poisoned=0), [])
    masks = slots.masks([0])
    assert masks is not None and ids(masks.bits[0]) == list(EOS)
    tokens = np.array([EOS[1]], np.int32)
    assert slots.record([0], tokens) == {0: "it was poisoned"} and tokens[0] == EOS[0]
