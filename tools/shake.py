"""Run tests many times on a busy machine, to find those that fail by chance: `make shake TESTS=... N=20`.

    python -m tools.shake tests/a/test_b.py::test_c rust:minisgl-store::counter --times 20
    python -m tools.shake --since main --times 5 --seconds 300

A target is a pytest file or id, or `rust:CRATE` for all tests of a crate, or `rust:CRATE::PART` for those with PART in
their name. In a busy round a load process computes on each core. In a slow round, one in four, the test has one core,
and the load processes on that core leave it about a fifth. Each round has a seed of its own, which Hypothesis, proptest
and Python's hashes get. `--since REV` adds the targets of a change since REV: changed tests that use a process, a
socket, a thread or a clock, directly or through a helper, and such crates. The output of a failed round is stored in
target/shake/. Exits with 1 if a round failed.

Invariants: load processes end with this process, however that ends; rounds that a budget skips are reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tools.changes import ROOT, TESTED, Imports, changed_files, crates_of, is_test

NEIGHBOUR = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n for _ in range(1000000): pass"
SLOW_EVERY = 4  # rounds
NICER = 3  # a core's time for a process halves with three steps of nice
GRACE_S = 20.0  # seconds for an interrupted test to end its children
NO_TESTS = 5  # pytest's exit status
WAITS = re.compile(
    r"\b(?:subprocess|Popen|psutil|multiprocessing|socket|threading|Thread|asyncio|signal|monotonic|perf_counter"
    r"|time\.(?:time|sleep)|thread::|tokio|Instant|SystemTime|Tcp(?:Listener|Stream)|UnixStream|Command::new)\b"
)


class Kind(NamedTuple):
    """Kind of round. `slower`: the factor by which a test computes more slowly than on a quiet core."""

    name: str
    neighbours: list[int]
    """Core of each load process."""
    prefix: list[str]
    """Command prefix that pins the test to a core."""
    slower: float


def kinds() -> tuple[Kind, Kind]:
    cores = sorted(os.sched_getaffinity(0))
    steps = min(NICER, 19 - os.nice(0))
    num_beside = round(4 * 0.5 ** (steps / NICER))
    prefix = ["taskset", "-c", str(cores[-1]), "nice", "-n", str(steps)]
    return Kind("busy", cores, [], 2.0), Kind("slow", [cores[-1]] * num_beside, prefix, 5.0)


@contextlib.contextmanager
def busy(cores: list[int]) -> Iterator[list[int]]:
    """Keep each of these cores busy during the `with`; yields the process ids."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for core in cores:
            command = ["taskset", "-c", str(core), sys.executable, "-IS", "-c", NEIGHBOUR, str(os.getpid())]
            quiet = subprocess.DEVNULL
            running.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet))
        yield [one.pid for one in running]
    finally:
        for one in running:
            one.kill()
        for one in running:
            one.wait()


@dataclass
class Target:
    """Test to run, and the results of its rounds."""

    name: str
    command: list[str]
    folder: Path
    recorded_s: float = 0.0
    takes_seed: bool = True
    rounds: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    has_no_tests: bool = False
    longest_s: float = 0.0
    """Seconds of the longest round, converted to a quiet machine."""

    def expected_s(self, kind: Kind) -> float:
        return max(self.recorded_s, self.longest_s) * kind.slower

    def argv(self, seed: int) -> list[str]:
        return [*self.command, f"--hypothesis-seed={seed}"] if self.takes_seed else self.command


def python_target(root: Path, name: str, recorded: dict[str, float]) -> Target:
    return Target(name, [sys.executable, "-m", "pytest", name], root, recorded.get(name.partition("::")[0], 0.0))


def rust_targets(root: Path, name: str) -> list[Target]:
    """Build a crate's tests; return one target for each program that contains a test of this name."""
    crate, _, part = name.removeprefix("rust:").partition("::")
    flags = TESTED if (root / "rust" / "tests.toml").exists() else ["--locked"]
    build = ["cargo", "test", "--quiet", "--no-run", "--message-format=json", "--lib", "--tests", *flags, "-p", crate]
    built = subprocess.run(build, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode:
        raise ValueError(f"{name}: the tests cannot be built")
    targets = []
    for line in built.stdout.splitlines():
        made = json.loads(line)
        if not made.get("executable"):
            continue
        command = [made["executable"], *([part] if part else [])]
        folder = Path(made["manifest_path"]).parent
        listed = subprocess.run([*command, "--list"], cwd=folder, capture_output=True, text=True, check=True).stdout
        if ": test" in listed:
            targets.append(Target(f"{name} ({made['target']['name']})", command, folder, takes_seed=False))
    if not targets:
        raise ValueError(f"{name}: {crate} has no such test: `cargo test -p {crate} -- --list` has their names")
    return targets


def touched(root: Path, since: str | None) -> list[str]:
    """Return the timing-dependent tests that a change touches, changed test files first."""
    changed = changed_files(root, since)
    imports = Imports(root)
    helpers = [file for file in changed if file.startswith("tests/helpers/")]
    near = sorted(file for helper in helpers for file in imports.importers[helper] if is_test(file))
    waits = {file for file, source in imports.sources.items() if WAITS.search(source)}
    targets = [
        file for file in dict.fromkeys([*filter(is_test, changed), *near]) if waits & {file, *helpers_of(imports, file)}
    ]
    for crate in crates_of(changed):
        sources = sorted((root / "rust" / crate).rglob("*.rs"))
        texts = [source.read_text(encoding="utf-8") for source in sources]
        if any("#[test]" in text for text in texts) and any(WAITS.search(text) for text in texts):
            targets.append(f"rust:{crate}")
    return targets


def helpers_of(imports: Imports, file: str) -> set[str]:
    return {one for one in imports.imported[file] if one.startswith("tests/helpers/")}


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """End a test and its process group."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def run_round(target: Target, kind: Kind, seed: int, limit_s: float, output: Path) -> str:
    """Run a target once. Return the failure, or an empty text."""
    env = {**os.environ, "PYTHONHASHSEED": str(seed), "PROPTEST_RNG_SEED": str(seed)}
    env.pop("TEST_PATIENCE", None)  # measured again on the machine as it is now
    env.setdefault("RUST_BACKTRACE", "1")
    argv = [*kind.prefix, *target.argv(seed)]
    with output.open("w", encoding="utf-8") as file, busy(kind.neighbours):
        file.write(f"{kind.name} round of {target.name}, seed {seed}: {' '.join(argv)}\n")
        file.flush()
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            argv, cwd=target.folder, env=env, stdin=quiet, stdout=file, stderr=file, process_group=0
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            interrupt(process)
            return f"it took more than {limit_s:.0f} s"
        except BaseException:
            interrupt(process)
            raise
    if status == NO_TESTS and target.takes_seed:
        target.has_no_tests = True
        return ""
    return f"exit status {status}" if status else ""


@dataclass
class Shaking:
    """All rounds of all targets. `begins`: start in seconds of the monotonic clock; `budget_s`: `None` for no limit."""

    targets: list[Target]
    times: int
    seed: int
    folder: Path
    budget_s: float | None = None
    limit_s: float = 1800.0
    begins: float = field(default_factory=time.monotonic)

    def has_time(self, target: Target, kind: Kind) -> bool:
        spent = time.monotonic() - self.begins
        return self.budget_s is None or spent + target.expected_s(kind) < self.budget_s

    def run(self) -> None:
        """Run the first round of every target before the second of any, so that a budget is spread over all of them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        both = kinds()
        for number in range(self.times):
            kind = both[number % SLOW_EVERY == 1]
            for target in self.targets:
                if not target.has_no_tests and self.has_time(target, kind):
                    self.shake(target, kind, number)

    def shake(self, target: Target, kind: Kind, number: int) -> None:
        seed = (self.seed + number) % 2**32  # the range of PYTHONHASHSEED
        name = re.sub(r"[^\w.-]+", "-", target.name).strip("-")
        output = self.folder / f"{name[:150]}-{number + 1}.txt"
        begin = time.monotonic()
        wrong = run_round(target, kind, seed, self.limit_s, output)
        took_s = time.monotonic() - begin
        target.rounds += not target.has_no_tests
        target.seconds += took_s
        target.longest_s = max(target.longest_s, took_s / kind.slower)
        if not wrong:
            output.unlink()
            return
        kept = os.path.relpath(output)
        said = f"{target.name}: round {number + 1} ({kind.name}), seed {seed}: {wrong} after {took_s:.1f} s: {kept}"
        target.failures.append(said)
        print(f"shake: FAILED: {said}", flush=True)
        for line in output.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]:
            print(f"  | {line}", flush=True)

    def report(self) -> int:
        """Print the table of results. Return the exit status."""
        print("shake:  rounds  failures  seconds  test")
        for one in self.targets:
            print(f"shake: {one.rounds:7} {len(one.failures):9} {one.seconds:8.1f}  {one.name}")
        failures = [said for one in self.targets for said in one.failures]
        for one in self.targets:
            if one.has_no_tests:
                print(f"shake: not run: {one.name}: pytest chose none of its tests")
            elif one.rounds < self.times:
                print(f"shake: left for lack of time: {one.name}: {self.times - one.rounds} of {self.times} rounds")
        for said in failures:
            print(f"shake: FAILED: {said}")
        return 1 if failures else 0


def parsed(args: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="shake", description="Run tests many times on a busy machine.")
    parser.add_argument("tests", nargs="*", help="pytest files or ids, rust:CRATE or rust:CRATE::PART")
    parser.add_argument("--times", type=int, default=20, help="rounds of each test (default: 20)")
    parser.add_argument("--since", metavar="REV", help="also run the tests that changes since this revision touch")
    parser.add_argument("--changed", action="store_true", help="also run the tests that changes since main touch")
    parser.add_argument("--seconds", type=float, help="start no round that would end after so many seconds")
    parser.add_argument("--limit", type=float, default=1800.0, help="timeout of a round in seconds (default: 1800)")
    parser.add_argument("--seed", type=int, help="seed of the first round; each round adds 1 (default: random)")
    found = parser.parse_args(args)
    if not (found.tests or found.since or found.changed):
        parser.error("name a test, as in TESTS=tests/test_pages.py, or a revision, as in SINCE=main")
    return found


def _terminated(*_: object) -> None:
    raise KeyboardInterrupt


def main(args: list[str], root: Path = ROOT) -> int:
    asked = parsed(args)
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started it in the background ignores it
    if shutil.which("taskset") is None:
        print("shake: taskset is missing, which holds a test to a core: it is in util-linux", file=sys.stderr)
        return 2
    seed = random.SystemRandom().randrange(2**31) if asked.seed is None else asked.seed
    record = root / "tests" / "seconds.json"
    recorded: dict[str, float] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    shaking = Shaking([], asked.times, seed, root / "target" / "shake", asked.seconds, asked.limit)
    try:
        names = list(asked.tests)
        if asked.since or asked.changed:
            names += [name for name in touched(root, asked.since) if name not in names]
        for name in names:
            found = rust_targets(root, name) if name.startswith("rust:") else [python_target(root, name, recorded)]
            shaking.targets += found
        print(f"shake: {len(shaking.targets)} tests, {asked.times} rounds, seed {seed}", flush=True)
        shaking.run()
    except (ValueError, subprocess.CalledProcessError) as problem:
        print(f"shake: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        shaking.report()
        return 130
    code = shaking.report()
    empty = [one.name for one in shaking.targets if one.has_no_tests and one.name in asked.tests]
    return code or (2 if empty else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
