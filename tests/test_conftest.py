"""What a run of the tests says at its end of those that did not run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


@dataclass
class Reporter:
    """Of pytest's terminal reporter what the hook uses."""

    stats: dict[str, list[Any]]
    said: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        self.said.append(title)

    def line(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts = Counter[str]()
    monkeypatch.setattr(conftest, "_DESELECTED", counts)
    return counts


def test_each_reason_is_a_line_with_its_count(left_out: Counter[str]) -> None:
    longreprs: list[Any] = [("file.py", 3, "Skipped: no CUDA device")] * 2 + [("other.py", 9, "2 devices\nare needed")]
    reporter = Reporter({"skipped": [SimpleNamespace(longrepr=one) for one in longreprs]})
    left_out["slow (make slow-test)"] = 43
    conftest.pytest_terminal_summary(reporter)
    assert reporter.said == [
        "not run",
        "    2 skipped: no CUDA device",
        "    1 skipped: 2 devices",
        "   43 deselected: slow (make slow-test)",
    ]


def test_nothing_left_out_is_nothing_said(left_out: Counter[str]) -> None:
    reporter = Reporter({})
    conftest.pytest_terminal_summary(reporter)
    assert not reporter.said


def test_processes_that_leave_out_the_same_are_counted_once(left_out: Counter[str]) -> None:
    for count in (5, 5):
        conftest.pytest_testnodedown(SimpleNamespace(workeroutput={"left_out": {"slow": count}}), None)
    session = SimpleNamespace(shouldstop=None)
    plugins = SimpleNamespace(getplugin={"dsession": session}.get)
    died = SimpleNamespace(config=SimpleNamespace(pluginmanager=plugins))
    conftest.pytest_testnodedown(died, "killed")
    assert session.shouldstop
    assert left_out == {"slow": 5}
