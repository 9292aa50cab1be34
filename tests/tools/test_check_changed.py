"""What `make check` runs for given changes, and what it says of the rest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.repository import committed, write
from tools import check_changed
from tools.changes import ROOT, Imports
from tools.check_changed import Chosen, Part, choose, first_parts, is_stale, python_parts, rust_parts

TEST = "def test_one(): pass\n"
FILES = {
    "python/minisgl/__init__.py": "",
    "python/minisgl/_rust.pyi": "",
    "python/minisgl/tokenizer/core.py": "",
    "python/minisgl/tokenizer/deep/leaf.py": "import minisgl._rust\n",
    "python/minisgl/tokenizer/near.py": "from minisgl.tokenizer import core\n",
    "python/minisgl/middle.py": "from minisgl.tokenizer import near\n",
    "python/minisgl/far.py": "from minisgl import middle\n",
    "tests/tokenizer/test_core.py": TEST,
    "tests/tokenizer/test_core_topic.py": TEST,
    "tests/tokenizer/test_leaf.py": "from minisgl.tokenizer.deep import leaf\n",
    "tests/tokenizer/test_far.py": "from minisgl import far\n",
    "tests/e2e/test_near.py": "from minisgl.tokenizer import near\n",
    "tests/e2e/test_core.py": "from minisgl.tokenizer.core import x\n",
    "tests/e2e/test_far.py": "from minisgl import far\n",
    "tests/gpu/test_core.py": "from minisgl.tokenizer.core import x\n",
    "tests/test_mirror.py": TEST,
    "tests/test_pages.py": TEST,
    "tests/tools/test_audit.py": TEST,
    "tools/audit.py": "",
}
CORE = "python/minisgl/tokenizer/core.py"
NAMED = ["tests/tokenizer/test_core.py", "tests/tokenizer/test_core_topic.py"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return committed(tmp_path, FILES)


@pytest.mark.parametrize(
    ("changed", "files"),
    [
        ([], []),
        (["docs/cache.md"], ["tests/test_pages.py"]),
        (["python/minisgl/web/page.css"], []),
        (["tools/audit.py"], ["tests/tools/test_audit.py", "tests/test_mirror.py"]),
        (["tests/e2e/test_far.py"], ["tests/e2e/test_far.py", "tests/test_mirror.py"]),
        (["tests/gpu/test_core.py"], ["tests/gpu/test_core.py", "tests/test_mirror.py"]),
        (
            ["python/minisgl/tokenizer/deep/leaf.py"],
            ["tests/tokenizer/test_leaf.py", "tests/test_mirror.py"],
        ),
        (
            [CORE],
            [
                *NAMED,
                "tests/test_mirror.py",
                "tests/tokenizer/test_far.py",
                "tests/e2e/test_core.py",
                "tests/e2e/test_near.py",
            ],
        ),
    ],
)
def test_chosen_tests_of_a_change_are_the_nearest_first(repository: Path, changed: list[str], files: list[str]) -> None:
    assert choose(Imports(repository), changed, {}).files == files


def test_a_budget_leaves_what_does_not_fit_and_runs_the_first_whatever_it_takes(repository: Path) -> None:
    imports = Imports(repository)
    seconds = {NAMED[0]: 50.0, "tests/tokenizer/test_far.py": 30.0, "tests/e2e/test_core.py": 9.0}
    found = choose(imports, [CORE], seconds, budget_s=40.0)
    assert found.files == [NAMED[1], "tests/test_mirror.py", "tests/tokenizer/test_far.py", "tests/e2e/test_near.py"]
    assert found.left == [NAMED[0], "tests/e2e/test_core.py"]
    assert found.seconds == 33.0
    assert choose(imports, [NAMED[0]], seconds, budget_s=40.0).files == NAMED[:1]


def test_parts_are_what_the_change_needs() -> None:
    def names(changed: list[str]) -> list[str]:
        chosen = Chosen([file for file in changed if file.startswith("tests/")], [], 1.0)
        lanes = [*python_parts(changed, chosen, is_new_rust=False), rust_parts(ROOT, changed)]
        return [part.name for part in first_parts(changed) + [part for lane in lanes for part in lane]]

    always = ["ruff format", "ruff check"]
    assert names(["README.md"]) == always
    assert names(["python/minisgl/llm.py"]) == [*always, "mypy"]
    assert names(["tests/test_llm.py"]) == [*always, "tests in Python (1 files)"]
    assert names(["rust/minisgl-store/src/lib.rs"]) == [
        *always,
        "cargo fmt",
        "clippy of minisgl-store",
        "tests of minisgl-store",
        "clippy of dependants: minisgl-cpu, minisgl-py",
    ]
    assert names(["rust/minisgl-py/src/lib.rs"]) == [*always, "cargo fmt", "clippy of minisgl-py"]
    assert any("minisgl-core" in name and "minisgl-text" in name for name in names(["Cargo.lock"]))


def test_the_extension_is_built_for_tests_that_use_it_if_it_is_older_than_a_changed_source(repository: Path) -> None:
    source, stamp = "rust/minisgl-py/src/lib.rs", repository / ".venv" / ".installed"
    write(repository, {source: "", ".venv/.installed": ""})
    imports = Imports(repository)
    uses, does_not = Chosen(["tests/tokenizer/test_leaf.py"], [], 1.0), Chosen(["tests/e2e/test_far.py"], [], 1.0)
    os.utime(repository / source, (1.0, 1.0))
    assert not is_stale(repository, imports, [source], uses)
    os.utime(stamp, (0.5, 0.5))
    assert is_stale(repository, imports, [source], uses)
    assert not is_stale(repository, imports, [source], does_not)
    assert not is_stale(repository, imports, [CORE], uses)
    assert python_parts([source], uses, is_new_rust=True)[1][0].name == "the extension"


def test_a_failed_part_shows_what_it_said_and_ends_its_lane_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(name: str, code: int) -> Part:
        return Part(name, [sys.executable, "-c", f"print('said by {name}'); raise SystemExit({code})"])

    assert check_changed.run_all(tmp_path, [part("a", 0)], [[part("b", 0)], [part("c", 0)]])
    capsys.readouterr()
    assert not check_changed.run_all(
        tmp_path, [part("d", 0)], [[part("e", 3), part("f", 0)], [part("g", 0), part("h", 0)]]
    )
    said = capsys.readouterr().out
    assert "said by e" in said and "check: e: FAILED" in said
    assert "said by g" not in said and "check: h: " in said and "check: f" not in said
    assert not check_changed.run_all(tmp_path, [part("i", 1)], [])


def test_a_change_that_fails_a_test_fails_the_check(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_changed, "first_parts", lambda changed: [])
    write(repository, {"tests/e2e/test_far.py": "def test_one(): assert 1 == 2\n"})
    assert check_changed.main(repository) == 1
    said = capsys.readouterr().out
    assert "assert 1 == 2" in said and "check: tests in Python (2 files): FAILED" in said
    write(repository, {"tests/e2e/test_far.py": TEST + "# changed\n"})
    assert check_changed.main(repository) == 0
    assert "check: all passed" in capsys.readouterr().out
