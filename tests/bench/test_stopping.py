"""Each comparison, stopped by each signal: it ends what it started, shows the table of what was measured, and says how
far it came."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmark import ab as paired
from minisgl import cli
from minisgl.bench import ab, compare, compare_variants
from minisgl.bench.compare_variants import Answer, Child, Setup, Times
from minisgl.bench.server_process import ServerProcess

FIGURES = {"output_tok_s": 5.0, "stop_s": 1.0}
SMALL = ("--concurrency", "1", "--agreement-prompts", "0", "--repeats", "3")


class Measured:
    """Sends `number` to this process when it is asked the `last` time; `children` are of what was started."""

    def __init__(self, number: int, last: int) -> None:
        self.number, self.left = number, last
        self.children: list[Child] = []

    def ask(self) -> None:
        self.left -= 1
        if not self.left:
            signal.raise_signal(self.number)

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        with Child((sys.executable, "-c", "import time; time.sleep(600)"), talks=False) as child:
            self.children.append(child)
            yield


def run_compare(one: Measured, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    class Variant:
        version, pid, max_sequences = "1", None, None

        def ask(self, prompts: list[str], num_out: int) -> Times:
            one.ask()
            return Times(1.0, (0.5,) * len(prompts), 6, num_out, (0.25,))

        def answer(self, prompt: str, max_out: int) -> Answer:
            return Answer(prompt, 6)

    @contextlib.contextmanager
    def make(name: str, setup: Setup) -> Iterator[Variant]:
        with one.start():
            yield Variant()

    for module in (compare, compare_variants):
        monkeypatch.setattr(module, "VARIANTS", {"a": make, "b": make})
    return cli.main(["bench", "compare", *SMALL, "--variants", "a", "b", *more])


def run_ab(one: Measured, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    def run_job(_: object) -> dict[str, object]:
        one.ask()
        return {"output_tok_s": 5.0, "step_us": {"schedule": dict.fromkeys(ab.PERCENTILES, 1.0)}}

    monkeypatch.setattr(ab, "run_job", run_job)
    monkeypatch.setattr(ab, "ServerProcess", lambda *_: pytest.fail("the second part is begun"))
    return cli.main(["bench", "ab", "--pairs", "3", *more])


def run_paired(one: Measured, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    class Server(ServerProcess):
        def start(self) -> ServerProcess:
            self.within = contextlib.ExitStack()
            self.within.enter_context(one.start())
            return self

        def stop(self) -> int:
            self.within.close()
            self.exit_code = 0
            return 0

    def measure(*_: object) -> dict[str, float]:
        one.ask()
        return dict(FIGURES)

    monkeypatch.setattr(paired, "ServerProcess", Server)
    monkeypatch.setattr(paired, "measure_point", measure)
    return paired.main(["--pairs", "3", *more])


Run = Callable[..., int]
# how often each asks in a round of both, and before the first one that counts
COMMANDS: dict[str, tuple[Run, int, int]] = {
    "bench compare": (run_compare, 4, 4),
    "bench ab": (run_ab, 2, 0),
    "benchmark.ab": (run_paired, 2, 0),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("command", COMMANDS)
def test_measurements_before_a_stop_are_kept(
    command: str,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    run, each, before = COMMANDS[command]
    one = Measured(number, before + 2 * each + 1)
    handlers = [signal.getsignal(other) for other in (signal.SIGINT, signal.SIGTERM)]
    assert run(one, monkeypatch, "--out", str(tmp_path / "out")) == 128 + number
    said = capsys.readouterr()
    assert "stopped after 2 of 3" in said.err + said.out
    assert said.out.rstrip().splitlines()[-1][:1] != "{" and "| " in said.out
    assert (tmp_path / "out" / "raw.json").exists()
    assert all(child.process.poll() is not None for child in one.children)
    assert [signal.getsignal(other) for other in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_was_measured(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _, before = COMMANDS[command]
    one = Measured(signal.SIGTERM, before + 1)
    assert run(one, monkeypatch) == 128 + signal.SIGTERM
    assert "|" not in capsys.readouterr().out
    assert all(child.process.poll() is not None for child in one.children)


@pytest.mark.parametrize("command", COMMANDS)
def test_progress_and_a_table_at_the_end(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(pytest.fail.Exception):
        COMMANDS[command][0](Measured(0, -1), monkeypatch)
    said = capsys.readouterr()
    assert len(said.err.splitlines()) >= 3 * 2
    assert not any(line.startswith("{") for line in said.out.splitlines())
