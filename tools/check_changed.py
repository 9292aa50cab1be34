"""Check the changes against main, quickly enough for use between two edits: `make check`.

Checks the format and lint of everything, types if the package changed, clippy and tests of changed Rust crates, clippy
of their dependants, and the nearest Python tests. A change is any difference from the commit where the branch left
main, including uncommitted ones. Test files run in this order, while their recorded seconds (tests/seconds.json) fit
into `BUDGET_S`: changed ones; those named after a changed module; those that check the repository's rules; those of the
module's room (its folder, and the folders in tests/test_mirror.py) that reach a changed module; those elsewhere that
reach one by at most `NEAR` imports. Among equals the nearest come first, then the quickest. The rest is counted and
left for `make test`.

Invariants: the same files choose the same tests; omitted tests are reported; exits with 1 if a part fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.test_mirror import TOGETHER
from tools.changes import ROOT, TESTED, Imports, base_of, changed_files, crates_of, dependants_of, is_test

BUDGET_S = 40.0  # of CPU, as recorded
UNRECORDED_S = 1.0  # what a file that is not in tests/seconds.json is taken to need
NEAR = 2  # imports of the package
ELSEWHERE = ("tests/gpu/", "tests/ray/", "tests/web/")  # they need hardware or packages that most machines lack
RULES = ("tests/test_mirror.py", "tests/test_circles.py", "tests/test_layering.py")
EXTENSION = "python/minisgl/_rust.pyi"
NO_TESTS = 5  # pytest's exit status
BIN = Path(sys.executable).parent


class Chosen(NamedTuple):
    """Test files to run now, in order, and test files that do not fit into the time budget."""

    files: list[str]
    left: list[str]
    seconds: float


def named_after(imports: Imports, file: str) -> list[str]:
    """Return the tests named after a module: `tests/a/test_b.py` and `tests/a/test_b_topic.py` for `minisgl/a/b.py`. A
    folder of tests may be flatter than its folder of modules."""
    parts = Path(file).with_suffix("").parts
    parts = parts[2:] if parts[:2] == ("python", "minisgl") else parts
    folders = {test.rpartition("/")[0] for test in filter(is_test, imports.sources)}
    place = "/".join(("tests", *parts[:-1]))
    while place not in folders and "/" in place:
        place = place.rpartition("/")[0]
    wanted = f"{place}/test_{parts[-1]}"
    return [test for test in imports.sources if test == f"{wanted}.py" or test.startswith(f"{wanted}_")]


def rooms_of(file: str) -> tuple[str, ...]:
    """Return the folders and files that test a module of the package, in addition to the tests named after it."""
    folder = file.removeprefix("python/minisgl/").rpartition("/")[0]
    rows = [row for row in (folder, folder.rpartition("/")[0]) if row in TOGETHER]
    named = TOGETHER[rows[0]].split() if rows else []
    return tuple(
        f"tests/{place}{'' if place.endswith('.py') else '/'}" for place in ([folder] if folder else []) + named
    )


def ranked(imports: Imports, changed: list[str], seconds: dict[str, float]) -> list[str]:
    """Return the tests of a change, the most relevant first."""
    sources = [file for file in changed if file in imports.sources]
    rooms = tuple(room for file in sources if file.startswith("python/minisgl/") for room in rooms_of(file))
    distances = {file: one for file, one in imports.distances(changed).items() if is_test(file)}
    rank = {file: 4 for file, one in distances.items() if one <= NEAR and not file.startswith(ELSEWHERE)}
    rank |= {file: 3 for file in distances if file.startswith(rooms)}
    if sources:
        rank |= dict.fromkeys((rule for rule in RULES if rule in imports.sources), 2)
    rank |= {test: 1 for file in sources if not file.startswith("tests/") for test in named_after(imports, file)}
    if any(file.endswith(".md") for file in changed):
        rank |= dict.fromkeys((file for file in ("tests/test_pages.py",) if file in imports.sources), 1)
    rank |= dict.fromkeys(filter(is_test, changed), 0)
    near = {file: distances.get(file, 0) if rank[file] > 2 else 0 for file in rank}
    return sorted(rank, key=lambda file: (rank[file], near[file], seconds.get(file, UNRECORDED_S), file))


def choose(imports: Imports, changed: list[str], seconds: dict[str, float], budget_s: float = BUDGET_S) -> Chosen:
    """Return the tests that fit into the budget of seconds; the first one is always included."""
    chosen = Chosen([], [], 0.0)
    for file in ranked(imports, changed, seconds):
        took_s = seconds.get(file, UNRECORDED_S)
        if chosen.files and chosen.seconds + took_s > budget_s:
            chosen.left.append(file)
        else:
            chosen.files.append(file)
            chosen = chosen._replace(seconds=chosen.seconds + took_s)
    return chosen


class Part(NamedTuple):
    """Command of the check, with the name shown in its output line."""

    name: str
    command: list[str]
    good: tuple[int, ...] = (0,)


def python_parts(changed: list[str], chosen: Chosen, is_new_rust: bool) -> list[list[Part]]:
    """Return the Python commands in lanes that run in parallel: types, and tests after the extension build."""
    types = [Part("mypy", [f"{BIN}/mypy"])]
    tests = []
    if chosen.files:
        if is_new_rust:
            tests.append(Part("the extension", ["make", "--no-print-directory", "install"]))
        several = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"] if len(chosen.files) > 3 else []
        command = [sys.executable, "-m", "pytest", *several, *chosen.files]
        tests.append(Part(f"tests in Python ({len(chosen.files)} files)", command, (0, NO_TESTS)))
    is_typed = any(file.startswith("python/") or file == "pyproject.toml" for file in changed)
    return [types if is_typed else [], tests]


def rust_parts(root: Path, changed: list[str]) -> list[Part]:
    """Return the commands that check the changed crates; a changed workspace file changes all of them."""
    crates = crates_of(changed)
    if {"Cargo.toml", "Cargo.lock"} & set(changed):
        crates = sorted(manifest.parent.name for manifest in root.glob("rust/*/Cargo.toml"))
    if not crates:
        return []
    named = [word for crate in crates for word in ("-p", crate)]
    tested = [word for crate in crates if crate != "minisgl-py" for word in ("-p", crate)]  # which has no tests
    others = [word for crate in dependants_of(root, crates) for word in ("-p", crate)]
    clippy, strict = ["cargo", "clippy", "--quiet", "--locked", "--profile", "serve"], ["--", "-D", "warnings"]
    parts = [Part(f"clippy of {', '.join(crates)}", [*clippy, "--all-targets", *named, *strict])]
    if tested:
        kernels = ["--config", "rust/kernel-tests.toml"] if "minisgl-kernels" in tested else []
        command = ["cargo", "test", "--quiet", "--lib", "--tests", *TESTED, *kernels, *tested]
        parts.append(Part(f"tests of {', '.join(tested[1::2])}", command))
    if others:
        parts.append(Part(f"clippy of dependants: {', '.join(others[1::2])}", [*clippy, *others, *strict]))
    return parts


def first_parts(changed: list[str]) -> list[Part]:
    parts = [
        Part("ruff format", [f"{BIN}/ruff", "format", "--check", "--quiet", "."]),
        Part("ruff check", [f"{BIN}/ruff", "check", "--quiet", "."]),
    ]
    if any(file.endswith(".rs") for file in changed):
        parts.append(Part("cargo fmt", ["cargo", "fmt", "--check"]))
    return parts


def run(root: Path, part: Part) -> bool:
    """Run a command and print its result line, with its output only if it failed. Return true if it passed."""
    begin = time.monotonic()
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name in ("MAKEFLAGS", "MFLAGS"):
        env.pop(name, None)  # cargo does not join make's job server
    done = subprocess.run(
        part.command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    is_good = done.returncode in part.good
    line = f"check: {part.name}: {'' if is_good else 'FAILED, '}{time.monotonic() - begin:.1f} s"
    print(line if is_good else f"{done.stdout}{line}", flush=True)
    return is_good


def run_all(root: Path, first: list[Part], lanes: list[list[Part]]) -> bool:
    """Run the first commands in turn, then the lanes in parallel, each up to a failure. Return true if all passed."""
    done = [run(root, part) for part in first]
    with ThreadPoolExecutor(max(len(lanes), 1)) as pool:
        return all([*done, *pool.map(lambda lane: all(run(root, part) for part in lane), lanes)])


def is_stale(root: Path, imports: Imports, changed: list[str], chosen: Chosen) -> bool:
    """Return true if the chosen tests use an extension that is older than a changed Rust source."""
    stamp = root / ".venv" / ".installed"
    built = stamp.stat().st_mtime if stamp.exists() else 0.0
    sources = [root / file for file in changed if file.startswith("rust/") and file.endswith((".rs", "Cargo.toml"))]
    return any(file.stat().st_mtime > built for file in sources) and imports.reach(chosen.files, EXTENSION)


def main(root: Path = ROOT) -> int:
    begin = time.monotonic()
    changed = changed_files(root)
    imports = Imports(root)
    record = root / "tests" / "seconds.json"
    seconds: dict[str, float] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    chosen = choose(imports, changed, seconds)
    print(f"check: {len(changed)} files differ from {base_of(root)[:10]}, where this branch left main")
    if chosen.files:
        print(f"check: tests of {chosen.seconds:.0f} recorded seconds: {' '.join(chosen.files)}", flush=True)
    lanes = [*python_parts(changed, chosen, is_stale(root, imports, changed, chosen)), rust_parts(root, changed)]
    is_good = run_all(root, first_parts(changed), [lane for lane in lanes if lane])
    if chosen.left:
        rooms = Counter(file.rpartition("/")[0] for file in chosen.left)
        print(f"check: left for make test: {len(chosen.left)} files near the change: ", end="")
        print(", ".join(f"{count} of {room}" for room, count in sorted(rooms.items())))
    if crates_of(changed) and not imports.reach(chosen.files, EXTENSION):
        print("check: left for make test: tests in Python of what changed in Rust")
    print(f"check: {'all passed' if is_good else 'FAILED'} in {time.monotonic() - begin:.1f} s")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
