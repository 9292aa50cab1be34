"""Draws docstrings for a blind reading: each with its signature, without its file and the code around it.

`python tools/sample_docstrings.py SEED` prints 40 of the package's Python and 40 of the crates' Rust, numbered. A
reader grades each: A (it says what the item is and what it promises), B (it says what the item is), C (it is hard to
understand without the code), D (it does not say what the item is). `--where` adds file and line.
tests/test_docstrings.py reads `docstrings`, too.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ATTRIBUTE = re.compile(r"#!?\[")
END_OF_SIGNATURE = re.compile(r"[{;,}]$")
NUM_EACH = 40


@dataclass(frozen=True)
class Docstring:
    """The documentation of one item. `file` is relative to the repository's root, `line` counts from 1."""

    file: Path
    line: int
    signature: str
    text: str

    @property
    def language(self) -> str:
        return "Python" if self.file.suffix == ".py" else "Rust"


def docstrings(root: Path = ROOT) -> Iterator[Docstring]:
    """Yield every docstring of python/minisgl and of the `src` folders of the crates, headers of modules included."""
    for file in sorted((root / "python" / "minisgl").rglob("*.py")):
        yield from of_python(file.read_text(encoding="utf-8"), file.relative_to(root))
    for file in sorted((root / "rust").glob("*/src/**/*.rs")):
        yield from of_rust(file.read_text(encoding="utf-8").splitlines(), file.relative_to(root))


def of_python(source: str, file: Path) -> Iterator[Docstring]:
    """Yield the docstrings of a module, its classes and its functions."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (text := ast.get_docstring(node)) is None:
            continue
        if isinstance(node, ast.Module):
            yield Docstring(file, 1, "(module)", text)
        else:
            signature = " ".join(line.strip() for line in lines[node.lineno - 1 : node.body[0].lineno - 1])
            yield Docstring(file, node.lineno, signature, text)


def of_rust(lines: list[str], file: Path) -> Iterator[Docstring]:
    """Yield the doc comments of a file: each run of lines with `///` or `//!`."""
    index = 0
    while index < len(lines):
        mark = lines[index].strip()[:3]
        if mark not in ("///", "//!"):
            index += 1
            continue
        first, text = index, list[str]()
        while index < len(lines) and lines[index].strip().startswith(mark):
            text.append(lines[index].strip()[3:].removeprefix(" "))
            index += 1
        signature = "(module)" if mark == "//!" else _rust_signature(lines, index)
        yield Docstring(file, first + 1, signature, "\n".join(text))


def _rust_signature(lines: list[str], index: int) -> str:
    """Return the item that begins at or after line `index`, up to its body, on one line."""
    found: list[str] = []
    for line in lines[index : index + 16]:
        if ATTRIBUTE.match(line.strip()):
            continue
        found.append(line.strip())
        item = " ".join(found)
        if END_OF_SIGNATURE.search(item) and (item.endswith("{") or item.count("(") <= item.count(")")):
            break
    return " ".join(found)


def sample(seed: int, count: int = NUM_EACH) -> list[Docstring]:
    """Draw `count` docstrings of each language; the same seed and the same tree give the same ones."""
    known, drawn = list(docstrings()), list[Docstring]()
    for language in ("Python", "Rust"):
        drawn += random.Random(seed).sample([one for one in known if one.language == language], count)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--where", action="store_true", help="print the file and line of each docstring, too")
    given = parser.parse_args()
    for number, item in enumerate(sample(given.seed), 1):
        where = f"  [{item.file}:{item.line}]" if given.where else ""
        print(f"## {number} ({item.language}){where}\n    {item.signature}\n{item.text}\n")


if __name__ == "__main__":
    main()
