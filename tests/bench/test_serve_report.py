"""A point's repeats give medians, and sums of what failed."""

from __future__ import annotations

from minisgl.bench.serve_report import median_of


def test_repeats_give_medians_and_sums_of_failures() -> None:
    repeats = [
        {"a": 1.0, "failed": 1, "failures": {"x": 1}, "deep": {"b": 1}, "none": None},
        {"a": 5.0, "failed": 2, "failures": {"x": 1, "y": 1}, "deep": {"b": 2}, "none": None},
        {"a": 2.0, "failed": 0, "failures": {}, "deep": {"b": 9}, "none": None},
    ]
    expected = {"a": 2.0, "failed": 3, "failures": {"x": 2, "y": 1}, "deep": {"b": 2}, "none": None}
    assert median_of(repeats) == expected
