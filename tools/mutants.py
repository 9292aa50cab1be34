"""Draw mutants of the package, small changes of one expression or statement, by a seed (tools/mutate.py tries them).

Invariants: one seed and one tree give the same mutants; a mutant is identified by its file and the text of its lines;
docstrings, annotations, imports and log lines are never changed.
"""

from __future__ import annotations

import ast
import contextlib
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

PACKAGE = "python/minisgl"
INSTEAD = {
    "compare": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
    | {"in": "not in", "not in": "in"},
    "arithmetic": {"+": "-", "-": "+", "*": "//", "//": "*", "%": "//", "/": "*"},
    "boolean": {"and": "or", "or": "and"},
}
KINDS = (*INSTEAD, "constant", "return", "statement", "branch", "error text")
LOGGED = re.compile(r"_?log(ger|ging)?\.|warnings\.|\w+_log\.")


@dataclass(frozen=True)
class Mutant:
    """Change of some lines of a file: `before` and `after` are whole lines of `file`, starting at `line`."""

    file: str
    line: int
    kind: str
    before: str
    after: str


def walk(node: ast.AST, in_error: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield nodes to mutate, and whether each is in an error's text; skips docstrings, annotations, imports, logs."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()) | ast.If(test=ast.Name("TYPE_CHECKING")):
            return
        case ast.Expr(value=ast.Call(func=func)) if LOGGED.match(ast.unparse(func)):
            return
        case ast.Subscript(value=ast.Name("Literal")):
            return
        case ast.Raise():
            in_error = True
        case ast.Call(func=func):
            in_error = in_error or ast.unparse(func).endswith("Error")
    yield node, in_error
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, in_error)


class Source:
    """Text of a file, with its syntax tree."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.tree = ast.parse(text)
        self._starts = [0]
        for line in self.text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _span(self, node: Any) -> tuple[int, int]:
        begin, end = self._starts[node.lineno - 1], self._starts[node.end_lineno - 1]
        return begin + int(node.col_offset), end + int(node.end_col_offset)

    def edits(self) -> Iterator[tuple[str, int, int, str]]:
        """Yield each possible change: its kind, the range of bytes that it replaces and the new text."""
        for node, in_error in walk(self.tree):
            match node:
                case ast.Compare():
                    yield from self._operators("compare", [node.left, *node.comparators])
                case ast.BoolOp():
                    yield from self._operators("boolean", node.values)
                case ast.BinOp() if not any(is_text(side) for side in (node.left, node.right)):
                    yield from self._operators("arithmetic", [node.left, node.right])
                case ast.UnaryOp(op=ast.Not()):
                    yield "boolean", *self._span(node), f"({ast.get_source_segment(self.text.decode(), node.operand)})"
                case ast.Constant(value=int(value)) if not isinstance(value, bool):
                    yield "constant", *self._span(node), str(value + 1)
                case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
                    yield "return", *self._span(value), "None"
                case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
                    yield "statement", *self._span(node), "pass"
                case ast.If() | ast.IfExp() | ast.While():
                    yield "branch", *self._span(node.test), f"not ({self._of(node.test)})"
                case ast.Constant(value=str()) | ast.JoinedStr() if in_error:
                    yield "error text", *self._span(node), without_words(self._of(node))

    def _of(self, node: ast.expr) -> str:
        begin, end = self._span(node)
        return self.text[begin:end].decode()

    def _operators(self, kind: str, operands: list[ast.expr]) -> Iterator[tuple[str, int, int, str]]:
        for left, right in pairwise(operands):
            begin, end = self._span(left)[1], self._span(right)[0]
            between = self.text[begin:end].decode()
            if (operator := between.strip("() \n")) in INSTEAD[kind]:
                yield kind, begin, end, between.replace(operator, INSTEAD[kind][operator])

    def mutants(self, file: str) -> Iterator[Mutant]:
        """Yield the mutants that change the text; some do not compile."""
        for kind, begin, end, new in self.edits():
            first = self.text.rfind(b"\n", 0, begin) + 1
            last = len(self.text) if (newline := self.text.find(b"\n", end)) < 0 else newline
            before = self.text[first:last].decode()
            after = (self.text[first:begin] + new.encode() + self.text[end:last]).decode()
            if after != before:
                yield Mutant(file, self.text.count(b"\n", 0, first) + 1, kind, before, after)


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def without_words(literal: str) -> str:
    """Return a string literal with each word of four letters or more replaced by `x`s; fields in braces are kept."""
    if "\\" in literal:
        return literal
    return re.sub(r"\{[^{}]*\}|[A-Za-z]{4,}", lambda one: one[0] if one[0][0] == "{" else "x" * len(one[0]), literal)


def draw(root: Path, room: str, count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of a room, equally many of each kind if possible, at most one of a line."""
    by_kind = defaultdict[str, list[Mutant]](list)
    texts = {
        path.relative_to(root).as_posix(): path.read_text("utf-8") for path in (root / PACKAGE / room).rglob("*.py")
    }
    for file in sorted(texts):
        for mutant in Source(texts[file]).mutants(file):
            by_kind[mutant.kind].append(mutant)
    chance = random.Random(f"{seed} {room}")
    shuffled = [chance.sample(by_kind[kind], len(by_kind[kind])) for kind in KINDS]
    drawn: dict[tuple[str, int], Mutant] = {}
    for mutant in (one for row in zip_longest(*shuffled) for one in row if one is not None):
        if len(drawn) < count:
            with contextlib.suppress(SyntaxError):
                ast.parse(changed(texts[mutant.file], mutant))
                drawn.setdefault((mutant.file, mutant.line), mutant)
    return sorted(drawn.values(), key=lambda one: (one.file, one.line))


def place(text: str, mutant: Mutant) -> int | None:
    """Return the index of the mutant's first line in a text, nearest to its original place; `None` if it is gone."""
    found = re.finditer(rf"^{re.escape(mutant.before)}$", text, re.MULTILINE)
    places = [(abs(text.count("\n", 0, one.start()) + 1 - mutant.line), one.start()) for one in found]
    return min(places)[1] if places else None


def changed(text: str, mutant: Mutant) -> str:
    """Return a file's text with the mutant applied. The mutant's lines must be present."""
    at = place(text, mutant)
    assert at is not None
    return text[:at] + mutant.after + text[at + len(mutant.before) :]
