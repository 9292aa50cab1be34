"""tools/mutate.py: what it changes, what it leaves alone, and that a mutant is found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.seconds import WAIT_S
from tools.mutate import KINDS, Copy, Mutant, Source, changed, draw

TEXT = '''"""Holds 7 things."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import os

_log = None
Size = Literal[3]
MAX = 5  # é


def f(a: int, b: "int < 3" = 1) -> int:
    """Return 4."""
    _log.info("of %d", 6)
    if a < b and not a:
        raise ValueError(f"at most {MAX} of these")
    a.append(b)
    return a - b
'''
LINES = {  # by kind: lines of the text that become others
    "compare": {"if a < b and not a:": "if a <= b and not a:"},
    "boolean": {"if a < b and not a:": "if a < b and (a):"},
    "constant": {"MAX = 5  # é": "MAX = 6  # é"},
    "arithmetic": {"return a - b": "return a + b"},
    "return": {"return a - b": "return None"},
    "statement": {"a.append(b)": "pass"},
    "branch": {"if a < b and not a:": "if not (a < b and not a):"},
    "error text": {
        'raise ValueError(f"at most {MAX} of these")': 'raise ValueError(f"at xxxx {MAX} of xxxxx")',
    },
}
FILE = "python/minisgl/room/part.py"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_changes_its_line(kind: str) -> None:
    found = {(one.before.strip(), one.after.strip()) for one in Source(TEXT).mutants(FILE) if one.kind == kind}
    assert set(LINES[kind].items()) <= found


def test_docstrings_annotations_imports_and_log_lines_stay() -> None:
    mutants = list(Source(TEXT).mutants(FILE))
    left_out = [one.before for one in mutants if "log" in one.before or "Literal" in one.before or '"""' in one.before]
    assert left_out == []
    assert {one.after for one in mutants if "def f" in one.before} == {'def f(a: int, b: "int < 3" = 2) -> int:'}


def test_a_mutant_is_found_again_at_the_nearest_lines_of_its_text() -> None:
    mutant = Mutant(FILE, 2, "constant", "    x = 1", "    x = 2")
    assert changed("a\nb\n    x = 1\nc\n    x = 1\n", mutant) == "a\nb\n    x = 2\nc\n    x = 1\n"
    assert changed("a\n        x = 1\n    x = 10\n", mutant) is None


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        FILE: TEXT,
        "tests/room/test_part_edges.py": "",
        "tests/room/test_other.py": "",
        "tests/room/test_more.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "tests/seconds.json").write_text('{"tests/room/test_other.py": 6.5}', "utf-8")
    return tmp_path


def test_one_seed_draws_the_same_mutants_one_of_a_line(tree: Path) -> None:
    drawn = draw(tree, "room", 99, 1)
    assert drawn == draw(tree, "room", 99, 1)
    assert len({one.line for one in drawn}) == len(drawn) == 6  # as many lines as can be changed
    assert len({one.kind for one in draw(tree, "room", 4, 1)}) == 4


def test_a_mutant_runs_under_the_tests_of_its_module_then_the_quick_ones_of_its_room(tree: Path) -> None:
    copy = Copy(tree)
    assert copy.stages(FILE) == (["tests/room/test_part_edges.py"], ["tests/room/test_more.py"])


def test_what_caught_a_mutant_is_the_first_test_that_fails_or_a_hang(tree: Path) -> None:
    passes, fails = "tests/room/test_more.py", "tests/room/test_part_edges.py"
    (tree / passes).write_text("def test_all():\n    assert True\n", "utf-8")
    (tree / fails).write_text("def test_all():\n    assert False\n", "utf-8")
    assert Copy(tree).run([passes, fails], WAIT_S) == f"{fails}::test_all"
    (tree / fails).write_text("import time\ntime.sleep(3600)\n", "utf-8")
    assert Copy(tree).run([fails], 1.0) == "hangs"
