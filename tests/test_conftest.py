"""What a run of the tests says at its end, the order of its files, and the limits of its properties."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies

from tests import conftest
from tests.helpers.seconds import Tally, longest_first, patience, patiently


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
    monkeypatch.setattr(conftest, "_TALLY", Tally())
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


def test_seconds_are_said_by_folder_and_by_file() -> None:
    tally = Tally()
    for file, cpu in (("tests/a/test_x.py", 3.0), ("tests/a/test_y.py", 4.0), ("tests/test_z.py", 1.0)):
        tally.add(SimpleNamespace(nodeid=f"{file}::test", when="teardown", duration=9.0, cpu_s=cpu))
    assert [line.split() for line in tally.lines()] == [
        [cpu, "s", "of", "CPU", wall, "s", *name.split()]
        for cpu, wall, name in (
            ("7.0", "18.0", "tests/a"),
            ("1.0", "9.0", "tests"),
            ("4.0", "9.0", "tests/a/test_y.py"),
            ("3.0", "9.0", "tests/a/test_x.py"),
            ("1.0", "9.0", "tests/test_z.py"),
            ("8.0", "27.0", "all of 3 tests"),
        )
    ]


def test_files_that_took_longest_come_first_and_stay_whole() -> None:
    nodes = ["a::1", "a::2", "new::1", "b::1", "b::2"]
    order = longest_first(nodes, {"a": 2.0, "b": 30.0})
    assert [nodes[at] for at in order] == ["b::1", "b::2", "a::1", "a::2", "new::1"]


def test_a_slow_machine_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert patience() >= 1
    monkeypatch.setenv("TEST_PATIENCE", "3.5")
    assert patiently(60) == 210


@pytest.mark.parametrize(("asked", "is_long", "runs", "is_slow"), [
    (250, False, conftest.MAX_EXAMPLES, False),
    (250, True, 250, True),
    (20, False, 20, False),
    (20, True, 20, False),
])  # fmt: skip
def test_many_examples_of_a_property_are_for_long_runs(asked: int, is_long: bool, runs: int, is_slow: bool) -> None:
    seen = []

    @settings(max_examples=asked, database=None)
    @given(strategies.floats())
    def holds(number: float) -> None:
        seen.append(number)

    item: Any = SimpleNamespace(obj=holds)
    assert conftest.few_examples(item, is_long) is is_slow
    holds()
    assert len(seen) == runs
