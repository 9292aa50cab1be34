"""Break one line of the package at a time and record which test fails: `python -m tools.mutate OUT server=35`.

A mutant (tools/mutants.py) is caught when a test of its module fails or hangs, or one of its room's quicker tests does.
Only test files that run its lines are tried. `--again RECORDS` tries the mutants of an earlier run on another tree.

Invariants: mutants and tests run in a copy of the tree, never in the tree itself; an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tools.mutants import PACKAGE, Mutant, changed, draw, place

ROOT = Path(__file__).parents[1]
QUICK_S = 6.0  # CPU seconds of a test file (tests/seconds.json): slower ones run for their own module only
HANG_S = "180"  # of one test, by pytest-timeout
ROOMS = {"scheduler": ("tests/parity", "tests/scheduler")}  # other rooms have the folder of tests of their name
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
PROBE = """
import os
_seen = set()
_test = ""

def by(number):
    global _test
    _test = os.environ.get("PYTEST_CURRENT_TEST", _test).partition("::")[0]
    if (number, _test) not in _seen:
        _seen.add((number, _test))
        with open({log!r}, "a") as file:
            file.write(f"{{number}} {{_test}}\\n")
"""


def with_probe(text: str, mutant: Mutant, number: int) -> str:
    """Return a file's text with a probe that records which tests run the mutant's lines; unchanged if importing runs
    them."""
    lines, line = text.splitlines(keepends=True), text.count("\n", 0, place(text, mutant) or 0) + 1
    functions = (one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    inner = (one for function in functions for body in function.body for one in ast.walk(body))
    around = [
        (min([one.lineno, *(decorator.lineno for decorator in getattr(one, "decorator_list", ()))]), one.col_offset)
        for one in inner
        if isinstance(one, ast.stmt) and one.lineno <= line <= (one.end_lineno or 0)
    ]
    first, indent = max((one for one in around if not lines[one[0] - 1].lstrip().startswith("elif ")), default=(0, 0))
    if first:
        lines.insert(first - 1, f"{' ' * indent}__import__('reached').by({number})\n")
    return "".join(lines)


class Copy:
    """Copy of the tree in a folder of its own, and its tests."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        record = folder / "tests" / "seconds.json"
        self._recorded: dict[str, float] = json.loads(record.read_text("utf-8"))
        self._left_out: list[str] = []  # tests that fail without a mutant

    @classmethod
    def of_this_tree(cls, folder: Path) -> Copy:
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True)
        built = [path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).glob("_rust*.so")]
        for name in {*listed.split("\0"), *built}:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        return cls(folder)

    def tests_of(self, file: str) -> list[str]:
        """Return the test files named after the module, then the other quick ones of its room."""
        path = Path(file).relative_to(PACKAGE)
        names = {path.stem, f"{path.parent.name}_{path.stem}"} if path.stem != "__init__" else {path.parent.name}
        folder = self.root / "tests" / path.parent
        while not folder.is_dir():
            folder = folder.parent
        folders = ROOMS.get(path.parts[0], (f"tests/{path.parts[0]}",))
        own = self._quickest_first({one for name in names for one in folder.glob(f"test_{name}*.py")})
        room = self._quickest_first({one for name in folders for one in (self.root / name).rglob("test_*.py")})
        return own + [one for one in room if one not in own and self._recorded.get(one, 0.0) < QUICK_S]

    def _quickest_first(self, files: set[Path]) -> list[str]:
        names = sorted(path.relative_to(self.root).as_posix() for path in files)
        return sorted(names, key=lambda name: self._recorded.get(name, 0.0))

    def run(self, files: list[str], limit_s: float, most: int = 1) -> list[str]:
        """Return the first tests that fail, at most `most`, or `hangs` after `limit_s` seconds."""
        env = os.environ | {"PYTHONPATH": f"{self.root}/python:{self.root}", "CUDA_VISIBLE_DEVICES": ""}
        # Rust's half of a parametrized test of the scheduler runs no line of the reference.
        options = [
            f"--maxfail={most}",
            *(f"--deselect={one}" for one in self._left_out),
            "-p",
            "no:randomly",
            "-k",
            "not rust_hotpath",
            f"--timeout={HANG_S}",
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *files],
            cwd=self.root, env=env, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return ["hangs"]
        if process.returncode in (0, 5):  # all pass, or none was chosen
            return []
        if most > 1:
            print(output)
        return FAILED.findall(output) or [f"exit status {process.returncode}"]

    @contextlib.contextmanager
    def _instead(self, texts: dict[str, str]) -> Iterator[None]:
        originals = {name: (self.root / name).read_text("utf-8") for name in texts}
        for name, text in texts.items():
            (self.root / name).write_text(text, "utf-8")
        yield
        for name, text in originals.items():
            (self.root / name).write_text(text, "utf-8")

    def reaching(self, mutants: list[Mutant]) -> list[list[str]]:
        """Return, for each mutant, those of its test files that run its lines.

        Runs the tests once without a mutant; tests that fail then are excluded from now on.
        """
        log, module = self.root / "reached.txt", self.root / "python" / "reached.py"
        module.write_text(PROBE.format(log=str(log)), "utf-8")
        log.touch()
        probed: dict[str, str] = {}
        unprobed: set[int] = set()
        for number, mutant in sorted(enumerate(mutants), key=lambda one: -one[1].line):
            text = probed.get(mutant.file) or (self.root / mutant.file).read_text("utf-8")
            probed[mutant.file] = with_probe(text, mutant, number)
            if probed[mutant.file] == text:
                unprobed.add(number)
        tests = list(dict.fromkeys(test for mutant in mutants for test in self.tests_of(mutant.file)))
        with self._instead(probed):
            self._left_out += self.run(tests, 7200.0, most=20)
        reached = {tuple(line.split()) for line in log.read_text("utf-8").splitlines()}
        return [
            [test for test in self.tests_of(mutant.file) if number in unprobed or (str(number), test) in reached]
            for number, mutant in enumerate(mutants)
        ]

    def judge(self, mutant: Mutant, tests: list[str], limit_s: float) -> dict[str, Any]:
        """Return the test that caught a mutant, the number of files that ran its lines, and the seconds."""
        begin = time.monotonic()
        text = changed((self.root / mutant.file).read_text("utf-8"), mutant)
        with self._instead({mutant.file: text}):
            caught = self.run(tests, limit_s) if tests else []
        return {
            "caught": caught[0] if caught else None,
            "reaching": len(tests),
            "seconds": round(time.monotonic() - begin, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Break the package on purpose and see which tests notice.")
    parser.add_argument("out", type=Path, help="results, a JSON line for each mutant; those in it are skipped")
    parser.add_argument("rooms", nargs="*", help="folder of the package and number of mutants, such as server=35")
    parser.add_argument("--seed", type=int, default=52)
    parser.add_argument("--again", type=Path, help="results of an earlier run whose mutants are tried again")
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

        def record(mutant: Mutant, found: dict[str, Any]) -> None:
            print(json.dumps({"seed": args.seed, **asdict(mutant), **found}), file=out, flush=True)

        for room in dict.fromkeys(Path(mutant.file).parts[2] for mutant in left):
            mutants, begin = [], time.monotonic()
            for mutant in (one for one in left if Path(one.file).parts[2] == room):
                path = copy.root / mutant.file
                if path.exists() and place(path.read_text("utf-8"), mutant) is not None:
                    mutants.append(mutant)
                else:
                    record(mutant, {"caught": "the lines are gone"})
            reaching = copy.reaching(mutants)
            limit_s = 3 * (time.monotonic() - begin) + 60
            for mutant, tests in zip(mutants, reaching, strict=True):
                record(mutant, copy.judge(mutant, tests, limit_s))


if __name__ == "__main__":
    main()
