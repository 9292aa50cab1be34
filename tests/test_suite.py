"""How this suite runs: parts and shares leave no test out, and a forked server is as one that was started."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import in_slice, slice_of
from tests.helpers import forking, parts
from tests.helpers.seconds import WAIT_S

PROGRAM = """
import os, sys
print(sys.argv[1:], os.environ.get("WHICH"), os.getcwd(), os.getsid(0) == os.getpid(), sys.stdin.read(), flush=True)
print("said", file=sys.stderr)
{end}
"""
STARTS = [subprocess.Popen, forking.Minisgl]


def test_each_pattern_of_a_part_has_a_file() -> None:
    assert list(parts.unmatched()) == []


def test_a_file_is_of_one_part_and_has_a_command() -> None:
    assert parts.part_of(parts.TESTS / "engine" / "test_torch_engine.py") == "torch"
    assert parts.part_of(parts.TESTS / "engine" / "test_cpu_engine.py") == parts.CORE
    assert {parts.command_of(one) for one in ("clients", "ray")} == {"make client-test", "make ray-test"}


def test_each_test_is_in_one_of_the_shares(request: pytest.FixtureRequest) -> None:
    shares = [index for index in range(10) if in_slice(request.node, index, 10)]
    assert len(shares) == 1
    other = next(item for item in request.session.items if item.path == request.node.path and item != request.node)
    assert in_slice(other, shares[0], 10), "a file is in one share"


@pytest.mark.parametrize("wrong", ["3", "10/10", "-1/3", "a/b", "1/"])
def test_an_invalid_share_is_refused(wrong: str) -> None:
    with pytest.raises(Exception, match="must be I/N"):
        slice_of(wrong)


def test_a_share_without_tests_fails_no_run(request: pytest.FixtureRequest) -> None:
    share = next(index for index in range(10) if not in_slice(request.node, index, 10))
    for more, code in (f"--slice {share}/10", 0), ("-k no_such_name", 5):
        command = f"{sys.executable} -m pytest -q -n 1 -p no:cacheprovider -k of_one_part {__file__} {more}"
        assert subprocess.call(shlex.split(command), cwd=parts.TESTS.parent) == code


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), 9)", "raise KeyError('a')", ""])
def test_a_forked_program_is_as_one_that_was_started(end: str, tmp_path: Path) -> None:
    seen = []
    for start in STARTS:
        process = start(
            [sys.executable, "-c", PROGRAM.format(end=end), "a", "b c"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "WHICH": "this one"},
            start_new_session=True,
        )
        out, errors = process.communicate("typed", timeout=WAIT_S)
        seen.append((out, errors.splitlines()[0], "KeyError" in errors, process.returncode))
    assert seen[0] == seen[1]
    assert seen[0][0] == f"['a', 'b c'] this one {tmp_path} True typed\n"


def test_a_signal_ends_a_forked_program_and_its_time_is_counted() -> None:
    before = forking.forked_cpu_s()
    busy = "import time\nwhile time.process_time() < 0.2: pass\nprint('now', flush=True)\ntime.sleep(3600)"
    with forking.Minisgl([sys.executable, "-c", busy], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "now\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == -signal.SIGTERM
    assert forking.forked_cpu_s() >= before + 0.2
