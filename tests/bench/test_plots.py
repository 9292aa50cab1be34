"""Plots are left out, and said to be, where matplotlib is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from minisgl.bench.plots import line_plot


def test_without_matplotlib_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = line_plot(tmp_path / "x.png", [], title="Curve", x_label="", y_label="")
    assert "Curve" in text and "matplotlib is missing" in text
    assert not (tmp_path / "x.png").exists()
