"""What `make shake` finds, and what it leaves behind: nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.repository import committed, write
from tests.helpers.seconds import WAIT_S
from tools import shake
from tools.changes import ROOT
from tools.shake import Shaking, Target, busy, kinds, main, touched

pytestmark = pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset is missing: it is in util-linux")

EVERY_SECOND_TIME = """
import json, os, pathlib, psutil

def test_one(request):
    told = pathlib.Path("told.json")
    rounds = json.loads(told.read_text()) if told.exists() else []
    above = psutil.Process(os.getppid())
    rounds.append({
        "seed": request.config.getoption("--hypothesis-seed"),
        "seeds": [os.environ[name] for name in ("PYTHONHASHSEED", "PROPTEST_RNG_SEED")],
        "patience": os.environ.get("TEST_PATIENCE"),
        "cores": len(os.sched_getaffinity(0)),
        "beside": [(one.pid, one.cpu_affinity()) for one in above.children() if "-IS" in one.cmdline()],
    })
    told.write_text(json.dumps(rounds))
    assert len(rounds) % 2 == 0, "an odd round"
"""
WAITS_FOR_EVER = """
import pathlib, time

def test_one():
    pathlib.Path("begun").touch()
    time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def _few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are quick to start."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "_hypothesis_pytestplugin")
    monkeypatch.setenv("TEST_PATIENCE", "1.5")
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process, which goes on


def test_a_test_that_fails_every_second_time_is_reported_with_its_seeds_and_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"test_sample.py": EVERY_SECOND_TIME})
    assert main(["test_sample.py", "--times", "3", "--seed", "70"], tmp_path) == 1
    said = capsys.readouterr().out
    rounds = json.loads((tmp_path / "told.json").read_text())
    assert [one["seed"] for one in rounds] == ["70", "71", "72"]
    assert [one["seeds"] for one in rounds] == [[one["seed"]] * 2 for one in rounds]
    assert {one["patience"] for one in rounds} == {None}
    failures = [line for line in said.splitlines() if line.startswith("shake: FAILED:")]
    assert ["seed 70" in line for line in failures] == [True, False, True, False]  # at once, and again after the table
    assert "round 1 (busy)" in failures[0] and "round 3 (busy), seed 72" in failures[1]
    kept = sorted((tmp_path / "target" / "shake").iterdir())
    assert [file.name for file in kept] == ["test_sample.py-1.txt", "test_sample.py-3.txt"]
    text = kept[0].read_text()
    assert text.startswith("busy round of test_sample.py, seed 70: ") and "an odd round" in text
    (row,) = [line.split() for line in said.splitlines() if line.endswith("  test_sample.py")]
    assert row[1:3] == ["3", "2"]

    cores = sorted(os.sched_getaffinity(0))
    quick, slow, *_ = rounds
    assert quick["cores"] == len(cores) and [on for _, on in quick["beside"]] == [[core] for core in cores]
    assert slow["cores"] == 1 and len(slow["beside"]) >= 2 and {on[0] for _, on in slow["beside"]} == {cores[-1]}
    assert not [pid for one in rounds for pid, _ in one["beside"] if psutil.pid_exists(pid)]


def test_a_slow_round_leaves_a_fifth_of_a_core() -> None:
    """By the weights of nice: one step is a fourth more."""
    _, slow = kinds()
    steps = int(slow.prefix[-1])
    assert steps <= 19 - os.nice(0), "nobody is nicer than 19"
    weight = 1.25**-steps
    assert weight / (weight + len(slow.neighbours)) == pytest.approx(0.2, abs=0.02)


def test_neighbours_compute_until_the_block_ends() -> None:
    core = max(os.sched_getaffinity(0))
    with pytest.raises(KeyError), busy([core, core]) as pids:
        spent = [psutil.Process(pid).cpu_times().user for pid in pids]
        deadline = time.monotonic() + WAIT_S
        while any(psutil.Process(pid).cpu_times().user <= was for pid, was in zip(pids, spent, strict=True)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise KeyError
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_test_and_the_neighbours(tmp_path: Path, number: signal.Signals) -> None:
    write(tmp_path, {"test_sample.py": WAITS_FOR_EVER})
    program = (
        "import pathlib, sys; from tools.shake import main; sys.exit(main(sys.argv[1:2], pathlib.Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, "test_sample.py", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    below: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + WAIT_S
        while not (tmp_path / "begun").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        below = psutil.Process(process.pid).children(recursive=True)
        neighbours = [one for one in below if shake.NEIGHBOUR in one.cmdline()]
        assert len(neighbours) == len(os.sched_getaffinity(0))
        process.send_signal(number)
        said, _ = process.communicate(timeout=WAIT_S)
        if number == signal.SIGKILL:  # nothing can end the test then; a neighbour sees it
            _, alive = psutil.wait_procs(neighbours, timeout=WAIT_S)
        else:
            assert process.returncode == 130 and "test_sample.py" in said
            alive = [one for one in below if one.is_running()]
        assert alive == []
    finally:
        for one in [process, *below]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def test_a_round_that_hangs_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"test_sample.py": WAITS_FOR_EVER})
    assert main(["test_sample.py", "--times", "1", "--limit", "3"], tmp_path) == 1
    assert "it took more than 3 s" in capsys.readouterr().out


def test_a_budget_begins_no_round_that_would_not_end_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    true = [sys.executable, "-c", ""]
    quick, long = (Target(name, true, tmp_path, s, takes_seed=False) for name, s in (("quick", 0.0), ("long", 400.0)))
    shaking = Shaking([long, quick], 2, 1, tmp_path / "kept", budget_s=1000.0)
    shaking.run()
    assert (long.rounds, quick.rounds) == (1, 2)  # twice as long among busy ones, five times in a slow round
    assert shaking.report() == 0
    assert "left for lack of time: long: 1 of 2 rounds" in capsys.readouterr().out
    assert Shaking([], 1, 1, tmp_path, budget_s=1.0, begins=time.monotonic() - 2).has_time(quick, kinds()[0]) is False


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 2, "name a test"),
        (["test_empty.py"], 2, "pytest chose none of its tests"),
        (["--since", "no-such"], 2, "no-such"),
        (["--since", "main"], 0, "0 tests"),
    ],
)
def test_what_cannot_be_shaken_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, said: str
) -> None:
    committed(tmp_path, {"test_empty.py": ""})
    try:
        assert main([*args, "--times", "1"], tmp_path) == code
    except SystemExit as refused:
        assert refused.code == code
    out = capsys.readouterr()
    assert said in out.out + out.err


def test_a_change_touches_tests_that_wait_and_crates_that_do(tmp_path: Path) -> None:
    plain, waiting = "def test_one(): pass\n", "import subprocess\n"
    served = "from tests.helpers import served\n"
    files = {
        "tests/helpers/served.py": "import socket\n",
        "tests/helpers/pure.py": "",
        "tests/test_other.py": served,
        "tests/test_plain.py": plain,
        "rust/waits/src/lib.rs": "use std::time::Instant;\n#[test]\n",
        "rust/pure/src/lib.rs": "#[test]\n",
        "rust/untested/src/lib.rs": "use std::time::Instant;\n",
    }
    root = committed(tmp_path, files)
    assert touched(root, None) == []
    write(root, {name: f"{text}# changed\n" for name, text in files.items() if name != "tests/test_other.py"})
    write(root, {"tests/a/test_new.py": waiting, "tests/a/test_by_helper.py": served, "tests/a/test_pure.py": plain})
    assert touched(root, None) == [
        "tests/a/test_by_helper.py",
        "tests/a/test_new.py",
        "tests/test_other.py",
        "rust:waits",
    ]


@pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is missing")
def test_a_test_in_rust_has_its_seed_and_is_found_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = '{ assert_ne!(std::env::var("PROPTEST_RNG_SEED").unwrap(), "9", "the ninth"); }'
    write(
        tmp_path,
        {
            "Cargo.toml": '[package]\nname = "sample"\nversion = "0.1.0"\nedition = "2024"\n[workspace]\n',
            "Cargo.lock": 'version = 4\n\n[[package]]\nname = "sample"\nversion = "0.1.0"\n',
            "src/lib.rs": f"#[test]\nfn seeded() {body}\n#[test]\nfn other() {{ panic!() }}\n",
            "tests/all.rs": "#[test]\nfn elsewhere() { panic!() }\n",
        },
    )
    assert main(["rust:sample::seeded", "--times", "2", "--seed", "8"], tmp_path) == 1
    said = capsys.readouterr().out
    assert "rust:sample::seeded (sample): round 2 (slow), seed 9: exit status 101" in said and "the ninth" in said
    assert "1 tests, 2 rounds" in said
    assert main(["rust:sample::none", "--times", "1"], tmp_path) == 2
