"""tools/mutate.py: what it changes, what it leaves alone, and that a mutant is found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.seconds import WAIT_S
from tools.mutants import KINDS, Mutant, Source, changed, draw, place
from tools.mutate import Copy, with_probe

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
    assert place("a\n        x = 1\n    x = 10\n", mutant) is None


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


def test_a_mutant_is_tried_under_the_tests_of_its_module_then_the_quick_ones_of_its_room(tree: Path) -> None:
    assert Copy(tree).tests_of(FILE) == ["tests/room/test_part_edges.py", "tests/room/test_more.py"]


def test_a_probe_stands_before_the_statement_of_the_mutant() -> None:
    by_line = {one.line: with_probe(TEXT, one, 7).splitlines() for one in Source(TEXT).mutants(FILE)}
    assert by_line[10] == TEXT.splitlines()  # a constant of the module: importing it runs that
    assert by_line[19][18:20] == ["    __import__('reached').by(7)", "    return a - b"]


@pytest.mark.slow
def test_only_tests_that_run_the_lines_are_tried_and_the_first_that_fails_or_hangs_is_told(tree: Path) -> None:
    more, edges = "tests/room/test_more.py", "tests/room/test_part_edges.py"
    (tree / FILE).write_text("def f(a):\n    return a - 1\n\n\ndef g(a):\n    return a - 2\n", "utf-8")
    load = "import runpy\npart = runpy.run_path('python/minisgl/room/part.py')\n"
    (tree / edges).write_text(f"{load}def test_f():\n    part['f'](3)\n", "utf-8")
    (tree / more).write_text(f"{load}def test_g():\n    part['f'](3)\n    assert part['g'](3) == 1\n", "utf-8")
    copy, mutants = Copy(tree), Source((tree / FILE).read_text("utf-8")).mutants(FILE)
    minus = [one for one in mutants if one.kind == "arithmetic"]
    reaching = copy.reaching(minus)
    assert reaching == [[edges, more], [more]]
    found = [copy.judge(mutant, tests, WAIT_S)["caught"] for mutant, tests in zip(minus, reaching, strict=True)]
    assert found == [None, f"{more}::test_g"]
    assert copy.judge(minus[0], [edges], 0.1)["caught"] == "hangs"
    assert " - 1" in (tree / FILE).read_text("utf-8") and " + " not in (tree / FILE).read_text("utf-8")
