"""Plots are left out, and said to be, where matplotlib is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from minisgl.bench.plots import Series, line_plot


def test_without_matplotlib_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = line_plot(tmp_path / "x.png", [], title="Curve", x_label="", y_label="")
    assert "Curve" in text and "matplotlib is missing" in text
    assert not (tmp_path / "x.png").exists()


def test_a_picture_has_its_texts_few_lines_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    series = [Series("one", [0.5, 1.0], [1.0, 30.0]), Series("other & <more>", [0.5, 1.0], [2.0, 9.0])]
    written = []
    for name in ("a.svg", "b.svg"):
        line_plot(tmp_path / name, series, title="Curve", x_label="load", y_label="TTFT", log_y=True)
        written.append((tmp_path / name).read_text(encoding="utf-8"))
    assert written[0] == written[1]
    texts = {"".join(one.itertext()) for one in ElementTree.fromstring(written[0]).iter() if one.tag.endswith("text")}
    assert {"one", "other & <more>", "Curve", "load", "TTFT"} <= texts
    assert len(written[0].splitlines()) < 200
