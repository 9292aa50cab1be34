"""Functions have at most 60 lines and five levels of nested blocks, in Python and in Rust. The exceptions are listed.

Python is parsed. Rust is counted by the layout of rustfmt, which CI checks: a function ends at the first line
that is its own indentation and a brace. Clippy's `too_many_lines` would do, too, but needs attributes and a build.

Invariants: an exception names its function (in Rust with its crate) and the reason, not its file, so that moving it
changes nothing here; one that is no longer needed must go.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES, MOST_LEVELS = 60, 5
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
RUST_HEAD = re.compile(
    r"( *)(?:pub(?:\([\w: ]+\))? )?(?:default )?(?:const )?(?:async )?(?:unsafe )?(?:extern \"C\" )?fn (\w+)"
)

LONG_PYTHON = {
    "build_torch_engine": "one story: memory, weights, pool, graphs, each of which needs the one before",
    "config_of": "a config of llama.cpp's names, key by key",
    "_serve": "one story: from ready to the exit code, in the order that stopping needs",
}
LONG_RUST = {
    "core add": "a request's fields, checked in order",
    "core check_tree": "every invariant of the tree, one after the other",
    "core commit_alive": "the rules of a row's end, in their order",
    "core make_metadata_buffers": "the arrays of a step, written in one pass over its rows",
    "cpu fmt": "a row for each operation: how it is printed",
    "cpu head_steps": "what is done to a head, in the order in which it is done",
    "cpu new": "the buffers of a forward, with the size of each",
    "cpu run": "one story: the parts of a step, in their order",
    "kernels attend_chunk": "one loop over a page's keys that keeps its sums in registers",
    "kernels few_blocks": "one loop over blocks that keeps its sums in registers",
    "kernels panels_by_rows": "one loop over panels that keeps its sums in registers",
    "kernels attend_row": "one loop over a row's pages that keeps its sums in registers",
    "kernels run": "the tiles of a processor with AMX, loaded and stored by hand",
    "kernels values": "one loop over a page's values that keeps its sums in registers",
}


def statements(node: ast.AST) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield each list of statements that stands right below `node`, with its field."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        if isinstance(found := getattr(node, field, None), list):
            yield field, found


def levels(node: ast.AST, depth: int = 0) -> int:
    """Return how deep blocks are nested below `node`; an `elif` is at the level of its `if`."""
    deepest = depth
    for field, found in statements(node):
        for child in found:
            is_elif = field == "orelse" and isinstance(node, ast.If) and isinstance(child, ast.If) and len(found) == 1
            deepest = max(deepest, levels(child, depth + (isinstance(child, BLOCKS) and not is_elif)))
    return deepest


def python_functions(node: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function below `node` with its name; a method's begins with its class."""
    for _, found in statements(node):
        for child in found:
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{within}{child.name}", child
            yield from python_functions(child, f"{child.name}." if isinstance(child, ast.ClassDef) else within)


def rust_functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of lines of every function that has a body of several lines."""
    lines = text.split("\n")
    for first, line in enumerate(lines):
        if not (head := RUST_HEAD.match(line)) or line.endswith(("}", ";")):
            continue
        body = next(i for i in range(first, len(lines)) if lines[i].endswith(("{", ";", "}")))
        if lines[body].endswith("{"):
            end = next(i for i in range(body, len(lines)) if lines[i] == head[1] + "}")
            yield head[2], end - first + 1


def test_functions_in_python_are_short_and_flat() -> None:
    files = [file for top in ("python/minisgl", "benchmark", "tools") for file in (ROOT / top).rglob("*.py")]
    found = [(file.name, *one) for file in files for one in python_functions(ast.parse(file.read_text("utf-8")))]
    long = {name: file for file, name, node in found if (node.end_lineno or 0) - node.lineno >= MOST_LINES}
    assert {name: file for name, file in long.items() if name not in LONG_PYTHON} == {}, "split, or list with a reason"
    assert LONG_PYTHON.keys() - long.keys() == set(), "no longer long"
    assert {f"{file}: {name}" for file, name, node in found if levels(node) > MOST_LEVELS} == set()


def test_functions_in_rust_are_short() -> None:
    files = [file for file in ROOT.glob("rust/*/src/**/*.rs") if "tests" not in (file.parent.name, file.stem)]
    crates = {file: file.relative_to(ROOT / "rust").parts[0].removeprefix("minisgl-") for file in files}
    found = [(file, *one) for file in files for one in rust_functions(file.read_text("utf-8"))]
    assert len(found) > 1000
    long = {f"{crates[file]} {name}": file.name for file, name, lines in found if lines > MOST_LINES}
    assert {name: file for name, file in long.items() if name not in LONG_RUST} == {}, "split, or list with a reason"
    assert LONG_RUST.keys() - long.keys() == set(), "no longer long"


def test_levels_are_those_of_blocks() -> None:
    text = "def f():\n if a:\n  pass\n elif b:\n  for c in d:\n   with e:\n    pass\n"
    assert levels(ast.parse(text).body[0]) == 3
    assert list(rust_functions("fn f() {\n    g();\n}\n\nfn g(\n    a: u8,\n) -> u8 {\n    1\n}\n")) == [
        ("f", 3),
        ("g", 5),
    ]
