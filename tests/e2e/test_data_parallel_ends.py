"""How a server of several engines begins and ends, and what the modes of routing do: real processes, echo engines."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.test_operations import Stream, alone, body
from tests.helpers.data_parallel import Ask, ask_all, engine_processes, pool
from tests.helpers.e2e import Brake, ServerProcess, refused, serving, until
from tests.helpers.seconds import WAIT_S

ECHO = ("--engine", "echo", "--page-size", "16", "--num-pages", "1024", "--dp", "2")


@pytest.fixture
def brake(tmp_path: Path) -> Brake:
    return Brake(tmp_path, 20)


@pytest.fixture
def server(brake: Brake) -> Iterator[ServerProcess]:
    with ServerProcess((*ECHO, "--drain-timeout", str(WAIT_S)), brake.env) as running:
        yield running


def admitted(server: ServerProcess) -> list[int]:
    """Prompt tokens by engine."""
    engines = httpx.get(f"{server.url}/stats", timeout=WAIT_S).json()["engines"]
    return [one["stats"]["num_prompt_tokens_total"] if one["stats"] else 0 for one in engines]


def ask_alone(server: ServerProcess, prompt: str) -> int:
    """One request with nothing beside it: the engine that got it."""
    before = admitted(server)
    answer = httpx.post(f"{server.url}/v1/completions", json=body(prompt, 2), timeout=WAIT_S).json()
    assert answer["choices"][0]["text"] == alone(prompt, 2)
    until(lambda: admitted(server) != before, "no engine says that it had it")
    return next(at for at, (a, b) in enumerate(zip(before, admitted(server), strict=True)) if a != b)


@pytest.mark.parametrize(
    "mode", ["cache_aware", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("rr", "fsfs", "random"))]
)
def test_every_routing_mode_serves_and_uses_all_engines(mode: str) -> None:
    with serving(*ECHO, "--routing", mode) as server:
        if mode == "rr":
            assert [ask_alone(server, f"{number}") for number in range(4)] in ([0, 1, 0, 1], [1, 0, 1, 0])
        if mode == "cache_aware":
            chat = "the beginning of a conversation, which is longer than a page"
            first = ask_alone(server, chat)
            assert [ask_alone(server, f"{chat} and its {number}th turn") for number in range(3)] == [first] * 3
        ask_all(server, [Ask(f"{number} with {mode}", number, 40) for number in range(16)])
        until(lambda: min(admitted(server)) > 0, "an engine got nothing of sixteen at once")


def test_max_inflight_queues_further_requests(brake: Brake) -> None:
    with serving("--engine", "echo", "--max-inflight", "3", "--num-pages", "1024", env=brake.env) as server:
        most: set[int] = set()

        def look() -> None:
            until(lambda: pool(server)["num_waiting"] > 0, "nobody waits")
            most.update(pool(server)["loads"])
            brake.release()

        ask_all(server, [Ask(f"{number} waits", number, 400) for number in range(12)], look)
        assert most and max(most) <= 3
        (engine,) = httpx.get(f"{server.url}/health").json()["engines"]
        assert engine["state"] == "ready"


def test_sigterm_completes_streams_before_the_exit(server: ServerProcess, brake: Brake) -> None:
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as http, Stream(http, "drain me", 3000) as stream:
        server.process.send_signal(signal.SIGTERM)
        until(lambda: any("draining" in line for line in server.lines), "it does not say that it drains")
        assert http.get("/health").json()["status"] == "draining"
        engine_processes(server)[0].kill()  # a death while it drains costs nothing either
        brake.release()
        stream.read_all()
        assert stream.done and stream.error is None and stream.text == alone("drain me", 3000)
    assert server.process.wait(WAIT_S) == 0
    server.check_no_files()


def test_the_last_engine_s_death_ends_the_server(server: ServerProcess) -> None:
    processes = engine_processes(server)
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as http, Stream(http, "to the end", 8000) as stream:
        for process in processes:
            process.kill()
        stream.read_all()
        assert stream.error is not None and "engine" in stream.error["message"]
    assert server.ended() == 1
    assert any("no engine is left" in line for line in server.lines), server.lines
    server.check_no_files()


def test_a_killed_server_leaves_nothing(server: ServerProcess) -> None:
    children = server.children()
    assert len(engine_processes(server)) == 2
    server.process.kill()
    assert not psutil.wait_procs(children, timeout=WAIT_S)[1]
    until(lambda: not list(Path(server.folder).iterdir()), "files are left")


def test_an_engine_that_cannot_start_is_the_end_of_the_start(tmp_path: Path) -> None:
    said = refused("--engine", "cpu", "--model", str(tmp_path / "none"), "--dp", "2")
    assert f"minisgl serve: --model {tmp_path / 'none'}" in said


def test_an_engine_that_is_killed_while_it_loads_is_the_end_of_the_start() -> None:
    with ServerProcess(ECHO, wait=False, forked=False) as server:  # it has an interpreter's start to kill them in
        until(lambda: len(engine_processes(server)) == 2, "no engines")
        children = server.children()
        engine_processes(server)[1].kill()
        assert server.ended() == 1 and "did not start" in "\n".join(server.lines)
        assert not psutil.wait_procs(children, timeout=WAIT_S)[1]
        server.check_no_files()
