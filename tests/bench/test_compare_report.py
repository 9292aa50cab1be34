"""How far answers agree, and what an interval of one round is."""

from __future__ import annotations

from minisgl.bench.compare_report import agreement, cell
from minisgl.bench.compare_variants import Answer


def test_agreement_is_the_share_before_the_first_difference() -> None:
    ours = [Answer("one two", 3), Answer("abcd", 3), Answer("", 3)]
    theirs = [Answer("one two", 3), Answer("abXdefgh", 4), Answer("", 3)]
    found = agreement({"ours": ours, "theirs": theirs})
    assert found is not None and found["first"] == "ours" and found["prompts"] == 3
    assert found["variants"] == {"theirs": {"same": 2, "until_difference": [1.0, 0.25, 1.0], "same_num_in": False}}
    assert agreement({"ours": [], "theirs": []}) is None


def test_single_round_has_no_interval() -> None:
    assert cell([12.0, None, None]) == "12.0" and cell([12.0, 11.0, 13.5]) == "12.0 [11.0, 13.5]" and cell(None) is None
