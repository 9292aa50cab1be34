"""Draws docstrings, error texts and paragraphs of the pages for a blind reading, without their files and neighbours.

`python tools/sample_docstrings.py SEED` prints 40 of the package's Python and 40 of the crates' Rust, numbered. A
reader grades each: A (it says what the item is and what it promises), B (it says what the item is), C (it is hard to
understand without the code), D (it does not say what the item is). `--errors` draws 40 texts of errors that Python
raises, `--pages` 40 paragraphs of README.md and docs/. `--where` adds file and line.
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
    """The text of one item. `file` is relative to the repository's root, `line` counts from 1 (a page: always 1)."""

    file: Path
    line: int
    signature: str
    text: str


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


def errors(root: Path = ROOT) -> Iterator[Docstring]:
    """Yield the text of each exception that the package raises with one; what is filled in stands in braces."""
    for file in sorted((root / "python" / "minisgl").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                texts = [ast.unparse(one) for one in node.exc.args if isinstance(one, ast.JoinedStr | ast.Constant)]
                if text := max(texts, key=len, default=""):  # others are names of fields and codes
                    yield Docstring(file.relative_to(root), node.lineno, f"raise {ast.unparse(node.exc.func)}", text)


def paragraphs(root: Path = ROOT) -> Iterator[Docstring]:
    """Yield the paragraphs and lists of README.md and of the pages in docs/; tables and code are left out."""
    for file in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        heading = ""
        for block in re.split(r"\n\n+", re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)):
            if block.startswith("#"):
                heading = block.splitlines()[0]
            elif len(block) > 80 and not block.lstrip().startswith(("|", "<", "!", "[!")):
                yield Docstring(file.relative_to(root), 1, f"{file.name}, {heading}", block.strip())


def sample(seed: int, kinds: list[list[Docstring]], count: int = NUM_EACH) -> list[Docstring]:
    """Draw `count` items of each kind; the same seed and the same tree give the same ones."""
    return [item for kind in kinds for item in random.Random(seed).sample(kind, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--errors", action="store_true", help="draw texts of errors")
    parser.add_argument("--pages", action="store_true", help="draw paragraphs of the pages")
    parser.add_argument("--where", action="store_true", help="print the file of each item, and its line")
    given = parser.parse_args()
    if given.errors or given.pages:
        kinds = [list(errors())] * given.errors + [list(paragraphs())] * given.pages
    else:
        known = list(docstrings())
        kinds = [[item for item in known if item.file.suffix == suffix] for suffix in (".py", ".rs")]
    for number, item in enumerate(sample(given.seed, kinds), 1):
        where = f"  [{item.file}:{item.line}]" if given.where else ""
        print(f"## {number}{where}\n    {item.signature}\n{item.text}\n")


if __name__ == "__main__":
    main()
