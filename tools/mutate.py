"""Breaks one line of the package at a time and records which test fails: `python -m tools.mutate OUT server=35`.

A mutant is one small change of one expression or statement. It is caught when a test of its module fails, or one of its
room's quicker tests, or when they do not end. `--again RECORDS` tries the mutants of an earlier run on another tree.

Invariants: one seed and one tree give the same mutants; a mutant is found again by its file and the text of its lines;
mutants and tests stand in a copy of the tree, never in the tree itself; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = "python/minisgl"
QUICK_S = 6.0  # CPU seconds of a test file (tests/seconds.json): slower ones run for their own module only
HANG_S = "180"  # of one test, by pytest-timeout
ROOMS = {"scheduler": ("tests/parity", "tests/scheduler")}  # other rooms have the folder of tests of their name
INSTEAD = {
    "compare": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
    | {"in": "not in", "not in": "in"},
    "arithmetic": {"+": "-", "-": "+", "*": "//", "//": "*", "%": "//", "/": "*"},
    "boolean": {"and": "or", "or": "and"},
}
KINDS = (*INSTEAD, "constant", "return", "statement", "branch", "error text")
LOGGED = re.compile(r"_?log(ger|ging)?\.|warnings\.|\w+_log\.")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """`before` and `after` are whole lines of `file`, of which the first is `line`."""

    file: str
    line: int
    kind: str
    before: str
    after: str


def walk(node: ast.AST, in_error: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield nodes, each with whether an error is made of it; no docstrings, annotations, imports and log lines."""
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
    """The text of a file, with its syntax tree."""

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
        """Yield each change: its kind, the bytes that it replaces and the new text."""
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
        """Yield what changes the text; not all of it compiles."""
        for kind, begin, end, new in self.edits():
            first = self.text.rfind(b"\n", 0, begin) + 1
            last = len(self.text) if (found := self.text.find(b"\n", end)) < 0 else found
            before = self.text[first:last].decode()
            after = (self.text[first:begin] + new.encode() + self.text[end:last]).decode()
            if after != before:
                yield Mutant(file, self.text.count(b"\n", 0, first) + 1, kind, before, after)


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def without_words(literal: str) -> str:
    """Return the source of a string with each word of four letters or more as `x`s, fields in braces as they are."""
    if "\\" in literal:
        return literal
    return re.sub(r"\{[^{}]*\}|[A-Za-z]{4,}", lambda one: one[0] if one[0][0] == "{" else "x" * len(one[0]), literal)


def draw(root: Path, room: str, count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of a room, the same number of each kind as far as there are any, one of a line."""
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
                ast.parse(changed(texts[mutant.file], mutant) or "")
                drawn.setdefault((mutant.file, mutant.line), mutant)
    return sorted(drawn.values(), key=lambda one: (one.file, one.line))


def changed(text: str, mutant: Mutant) -> str | None:
    """Return a file's text with the mutant in it, at the lines nearest to where it was; `None` if they are gone."""
    found = re.finditer(rf"^{re.escape(mutant.before)}$", text, re.MULTILINE)
    places = [(abs(text.count("\n", 0, one.start()) + 1 - mutant.line), one.start()) for one in found]
    if not places:
        return None
    _, at = min(places)
    return text[:at] + mutant.after + text[at + len(mutant.before) :]


class Copy:
    """A tree of its own in a folder, and its tests."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        record = folder / "tests" / "seconds.json"
        self._recorded: dict[str, float] = json.loads(record.read_text("utf-8"))

    @classmethod
    def of_this_tree(cls, folder: Path) -> Copy:
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True)
        built = [path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).glob("_rust*.so")]
        for name in {*listed.split("\0"), *built}:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        return cls(folder)

    def stages(self, file: str) -> tuple[list[str], list[str]]:
        """Return the test files that have the module's name, and the other quick ones of its room."""
        path = Path(file).relative_to(PACKAGE)
        names = {path.stem, f"{path.parent.name}_{path.stem}"} if path.stem != "__init__" else {path.parent.name}
        folder = self.root / "tests" / path.parent
        while not folder.is_dir():
            folder = folder.parent
        mirrors = self._quickest_first({one for name in names for one in folder.glob(f"test_{name}*.py")})
        folders = ROOMS.get(path.parts[0], (f"tests/{path.parts[0]}",))
        room = self._quickest_first({one for name in folders for one in (self.root / name).rglob("test_*.py")})
        return mirrors, [one for one in room if one not in mirrors and self._recorded.get(one, 0.0) < QUICK_S]

    def _quickest_first(self, files: set[Path]) -> list[str]:
        names = sorted(path.relative_to(self.root).as_posix() for path in files)
        return sorted(names, key=lambda name: self._recorded.get(name, 0.0))

    def run(self, files: list[str], limit_s: float) -> str | None:
        """Return the first test that fails, `hangs` after `limit_s`, `None` if all pass."""
        env = os.environ | {"PYTHONPATH": f"{self.root}/python:{self.root}", "CUDA_VISIBLE_DEVICES": ""}
        # Rust's half of a parametrized test of the scheduler runs no line of the reference.
        options = ["-x", "-p", "no:randomly", "-k", "not rust_hotpath", f"--timeout={HANG_S}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *files],
            cwd=self.root, env=env, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "hangs"
        if process.returncode in (0, 5):  # all pass, or none was chosen
            return None
        found = FAILED.search(said)
        return found[1] if found else f"exit status {process.returncode}"

    def judge(self, mutant: Mutant, limit_s: float) -> dict[str, Any]:
        """Return the test that caught a mutant, in which stage it did, and the seconds."""
        path, begin = self.root / mutant.file, time.monotonic()
        original = path.read_text("utf-8") if path.exists() else ""
        if (text := changed(original, mutant)) is None:
            return {"caught": "the lines are gone", "stage": None, "seconds": 0.0}
        path.write_text(text, "utf-8")
        runs = ((stage, self.run(files, limit_s)) for stage, files in enumerate(self.stages(mutant.file), 1) if files)
        stage, caught = next(((stage, test) for stage, test in runs if test), (None, None))
        path.write_text(original, "utf-8")
        return {"caught": caught, "stage": stage, "seconds": round(time.monotonic() - begin, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Break the package on purpose and see which tests notice.")
    parser.add_argument("out", type=Path, help="JSON lines, one a mutant; those that are there are not tried again")
    parser.add_argument("rooms", nargs="*", help="a folder of the package and how many mutants: server=35")
    parser.add_argument("--seed", type=int, default=52)
    parser.add_argument("--again", type=Path, help="the records of a run whose mutants are tried again")
    args = parser.parse_intermixed_args()

    def recorded(path: Path) -> list[Mutant]:
        records = map(json.loads, path.read_text("utf-8").splitlines() if path.exists() else ())
        return [Mutant(**{field.name: record[field.name] for field in fields(Mutant)}) for record in records]

    left = recorded(args.again) if args.again else []
    for room, _, count in (one.partition("=") for one in args.rooms):
        left += draw(ROOT, room, int(count), args.seed)
    left = [mutant for mutant in left if mutant not in recorded(args.out)]
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, args.out.open("a", encoding="utf-8") as out:
        copy = Copy.of_this_tree(Path(folder))
        for room in dict.fromkeys(Path(mutant.file).parts[2] for mutant in left):
            mutants, begin = [one for one in left if Path(one.file).parts[2] == room], time.monotonic()
            files = [name for mutant in mutants for stage in copy.stages(mutant.file) for name in stage]
            if failed := copy.run(list(dict.fromkeys(files)), 3600.0):
                raise SystemExit(f"mutate: {failed} fails without a mutant")
            limit_s = 3 * (time.monotonic() - begin) + 60
            for mutant in mutants:
                found = {"seed": args.seed, **asdict(mutant), **copy.judge(mutant, limit_s)}
                print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
