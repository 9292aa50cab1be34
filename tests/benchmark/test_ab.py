"""`benchmark.ab`: pairs in alternating order, fresh servers, and what an interval says."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from benchmark import ab
from benchmark.ab import Variant, compare, main, parse_env, sources, verdict
from minisgl.bench.server_process import Launch, ServerFailed, ServerProcess
from minisgl.bench.stats import paired_difference
from minisgl.config import ConfigError

A, B = Variant("A", ("--cpu-backend", "python")), Variant("B", ("--cpu-backend", "rust_hotpath"), (("X", "1"),))
ROOT = Path(__file__).resolve().parents[2]


class Pretended(ServerProcess):
    """A server that is only written down."""

    started: ClassVar[list[Launch]] = []
    left: Sequence[str] = ()

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        self.launched = launch

    def start(self) -> ServerProcess:
        self.started.append(self.launched)
        self.start_s = 1.0
        return self

    def stop(self) -> int:
        self.exit_code, self.stop_s, self.left_behind = 0, 0.5, list(self.left)
        return 0


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[Pretended]:
    monkeypatch.setattr(ab, "ServerProcess", Pretended)
    monkeypatch.setattr(Pretended, "started", [])
    return Pretended


def test_order_alternates_and_every_run_has_its_own_server(pretended: type[Pretended]) -> None:
    stopped, runs = compare((A, B), ("--engine", "echo"), 3, lambda server: {"output_tok_s": 1.0})
    assert "".join("A" if "python" in launch.flags else "B" for launch in pretended.started) == "ABBAAB"
    assert pretended.started[1].flags == ("--engine", "echo", "--cpu-backend", "rust_hotpath")
    assert dict(pretended.started[1].env) == {"X": "1"} and not pretended.started[0].env
    assert stopped is None and {name: len(found) for name, found in runs.items()} == {"A": 3, "B": 3}
    assert runs["A"][0]["start_s"] == 1.0 and runs["A"][0]["stop_s"] == 0.5


@pytest.mark.parametrize(("name", "said"), [("output_tok_s", "worse"), ("ttft_p99_ms", "better"), ("stop_s", "better")])
def test_less_is_better_but_for_throughput(name: str, said: str) -> None:
    assert verdict(name, paired_difference([2.0, 2.1, 2.0], [1.0, 1.1, 1.0])) == said


def test_the_verdict_is_that_of_the_interval_shown() -> None:
    """Ratios agree where differences scatter: the second pair ran on a machine ten times as fast."""
    found = paired_difference([10.0, 100.0, 11.0], [12.0, 121.0, 13.1])
    assert found.ratio is not None and found.ratio.excludes_zero and not found.difference.excludes_zero
    assert verdict("output_tok_s", found) == "better"
    assert verdict("steps", found) == "differs"


def test_a_server_that_leaves_something_is_no_result(
    pretended: type[Pretended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretended, "left", ["file socket"])
    with pytest.raises(ConfigError, match="file socket"):
        compare((A, B), (), 1, lambda server: {"output_tok_s": 1.0})


def test_a_server_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"variant A: .*none-such") as caught:
        compare((Variant("A", ("--engine", "none-such")), B), (), 1, lambda server: {"output_tok_s": 1.0})
    assert isinstance(caught.value.__cause__, ServerFailed)


@pytest.mark.slow
def test_two_real_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--a-name", "python", "--a-flags=--cpu-backend python"]
    flags += ["--b-env", "MINISGL_CPU_BACKEND=rust_hotpath"]
    load = ["--pairs", "2", "--load", "--concurrency 2 --num-requests 4 --input-len 8 8 --output-len 8 8"]
    assert main(["--json", *flags, *load, "--out", str(tmp_path / "run"), "--", "--engine", "echo"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["pairs"] == 2
    expected = {"output_tok_s", "ttft_p99_ms", "scheduler_us_per_step", "engine_cpu_us_per_token", "start_s", "stop_s"}
    assert expected <= set(result["metrics"])
    raw = json.loads((tmp_path / "run" / "raw.json").read_text())
    assert len(raw["runs"]["python"]) == len(raw["runs"]["B"]) == 2
    report = (tmp_path / "run" / "README.md").read_text()
    assert "--engine echo" in report and "| output_tok_s |" in report


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--pairs", "0"], "--pairs 0"), (["--b-name", "A"], "--b-name A"), (["--a-env", "X"], "NAME=VALUE"),
     (["--confidence", "1"], "--confidence"), (["--a-revision", "no-such-revision"], "git rev-parse"),
     (["--b-load", "--seed 2", "--b-env", "X=1"], "--b-load")],
)  # fmt: skip
def test_what_cannot_be_is_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags]) == 2
    assert said in capsys.readouterr().err


def test_environments() -> None:
    assert parse_env(["A=b=c", "D="]) == (("A", "b=c"), ("D", ""))


def worktrees() -> set[str]:
    """Those that a comparison makes; others come and go."""
    listing = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listing.splitlines() if "minisgl-revisions-" in line}


def test_a_revision_is_a_checkout_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is what runs; at the end it is gone. The extension is not built here: that takes minutes."""
    built: list[Path] = []
    monkeypatch.setattr(ab, "_build", lambda tree, target: built.append(tree))
    before = worktrees()
    with sources([Variant("now"), Variant("then", revision="HEAD"), Variant("again", revision="HEAD")]) as found:
        assert found["now"] is None and found["then"] is not None
        assert found["then"] == found["again"] and len(built) == 1
        main_file = found["then"] / "minisgl" / "__main__.py"
        main_file.write_text("import sys\nsys.exit('the code of the revision')\n")
        with pytest.raises(ServerFailed, match="the code of the revision"):
            ServerProcess(Launch(source=found["then"])).start()
    assert not built[0].exists() and worktrees() == before


def test_a_build_that_fails_is_said_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = worktrees()
    monkeypatch.setattr(ab, "CARGO", ("git", "no-such-subcommand"))
    with pytest.raises(ConfigError, match="no-such-subcommand"), sources([Variant("then", revision="HEAD")]):
        pass
    assert worktrees() == before


SMALL = ["--concurrency", "2", "--num-requests", "4", "--input-len", "8", "8", "--output-len", "6", "6"]


def test_two_loads_have_one_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Launch] = []

    class Counted(ServerProcess):
        def __init__(self, launch: Launch) -> None:
            super().__init__(launch)
            started.append(launch)

    monkeypatch.setattr(ab, "ServerProcess", Counted)
    load = shlex.join([*SMALL, "--extra-body", '{"receipt": true}'])
    assert (
        main(["--json", "--pairs", "2", "--load", load, "--b-load", "--output-len 24 24", "--", "--engine", "echo"])
        == 0
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [launch.flags for launch in started] == [("--engine", "echo")]
    assert found["b"] == "load --output-len 24 24"
    assert found["metrics"]["steps"]["median_b"] > found["metrics"]["steps"]["median_a"]


def test_what_scatters_around_nothing_is_no_difference() -> None:
    assert verdict("output_tok_s", paired_difference([1.0, 1.1, 1.0], [1.1, 1.0, 1.0])) == "no difference seen"
