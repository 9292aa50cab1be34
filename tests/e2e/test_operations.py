"""A whole server under signals, failures and stops: real processes, the echo engine, real clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.helpers.e2e import Brake, ServerProcess, serving, until
from tests.helpers.seconds import WAIT_S
from tests.helpers.server import data_of
from tests.helpers.several import expected

ECHO = ("--engine", "echo", "--page-size", "16", "--num-pages", "2048")
TEXT = "/v1/completions"
# `minisgl` that would wait for an hour for an engine which does not stop: it is seen whether it waits at all.
PATIENT = (
    "-c",
    "import sys; from minisgl import cli; from minisgl.runner import launch\n"
    "launch.STOP_TIMEOUT_S = 3600.0; sys.exit(cli.main())",
)


def alone(prompt: str, max_tokens: int, states: bool = False) -> str:
    return expected(prompt, max_tokens, to_the_end=True, states=states)


def body(prompt: str, max_tokens: int, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": max_tokens, "seed": 0, "ignore_eos": True, **more}


class Stream:
    """One streamed completion, read piece by piece."""

    def __init__(self, http: httpx.Client, prompt: str, max_tokens: int) -> None:
        self._context = http.stream("POST", TEXT, json=body(prompt, max_tokens, stream=True))
        self._lines: Iterator[str] = iter(())
        self.text = ""
        self.error: dict[str, str] | None = None
        self.done = False

    def __enter__(self) -> Stream:
        response = self._context.__enter__()
        assert response.status_code == 200
        self._lines = response.iter_lines()
        self.read_one()
        return self

    def __exit__(self, *args: object) -> None:
        self._context.__exit__(None, None, None)

    def read_one(self) -> bool:
        for line in self._lines:
            if (said := data_of(line)) == "[DONE]":
                self.done = True
            elif said:
                data = json.loads(said)
                if "error" in data:
                    self.error = data["error"]
                else:
                    self.text += data["choices"][0]["text"]
                return True
        return False

    def read_all(self) -> None:
        while self.read_one():
            pass


@pytest.fixture
def brake(tmp_path: Path) -> Brake:
    return Brake(tmp_path, 20)


@pytest.fixture
def server(brake: Brake) -> Iterator[ServerProcess]:
    with ServerProcess((*ECHO, "--drain-timeout", str(WAIT_S)), brake.env) as running:
        yield running


def test_sigterm_drains(server: ServerProcess, brake: Brake) -> None:
    """Open streams end as they would have, new requests are sent away, the exit code is 0."""
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as http, Stream(http, "drain me", 4000) as stream:
        server.process.send_signal(signal.SIGTERM)
        until(lambda: any("draining" in line for line in server.lines), "it does not say that it drains")
        refused = http.post(TEXT, json=body("new", 1))
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) >= 1
        assert http.get("/readyz").status_code == 503
        assert http.get("/livez").status_code == 200
        assert http.get("/health").json()["status"] == "draining"
        brake.release()
        stream.read_all()
        assert stream.done and stream.error is None and stream.text == alone("drain me", 4000)
    assert server.process.wait(WAIT_S) == 0
    server.check_no_files()


def test_requests_that_outlast_the_drain_end_with_an_error(brake: Brake) -> None:
    with ServerProcess((*ECHO, "--drain-timeout", "0.2"), brake.env) as server:
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as http, Stream(http, "too long", 8000) as stream:
            server.process.send_signal(signal.SIGTERM)
            stream.read_all()
            assert stream.error is not None and "shutting down" in stream.error["message"] and stream.done
            assert alone("too long", 8000).startswith(stream.text)
        assert server.process.wait(WAIT_S) == 0
        server.check_no_files()


def test_livez_fails_while_the_engine_is_stopped(server: ServerProcess, brake: Brake) -> None:
    """SIGSTOP: /livez says no; after SIGCONT all is well again and the stream goes on."""
    engine = server.engine()
    with httpx.Client(base_url=server.url, timeout=WAIT_S) as http, Stream(http, "frozen", 3000) as stream:
        for path in ("/livez", "/readyz"):
            until(lambda path=path: http.get(path).status_code == 200, f"{path} says no")  # type: ignore[misc]
        engine.suspend()
        until(lambda: http.get("/livez").status_code == 503, "a stopped engine counts as alive")
        assert "heartbeat" in http.get("/livez").json()["error"]["message"]
        assert http.get("/readyz").status_code == 503 and http.get("/health").json()["status"] == "failed"
        engine.resume()
        until(lambda: http.get("/livez").status_code == 200, "a resumed engine does not count as alive")
        brake.release()
        stream.read_all()
        assert stream.text == alone("frozen", 3000)
    assert server.stop() == 0


async def test_livez_and_readyz_pass_under_full_load(server: ServerProcess, brake: Brake) -> None:
    brake.release()

    async def load() -> list[int]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:

            async def one(index: int) -> int:
                stream = await client.completions.create(
                    model="smollm2",
                    prompt=f"{index} " * 40,
                    max_tokens=100,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                return sum([1 async for _ in stream])

            return await asyncio.gather(*(one(i) for i in range(200)))

    running = asyncio.create_task(load())
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as http:
        while not running.done():
            for path in ("/livez", "/readyz"):
                answer = await http.get(path)
                assert answer.status_code == 200, answer.text
            await asyncio.sleep(0.05)
    assert min(await running) > 1
    assert server.stop() == 0


def test_a_failed_forward_ends_its_step_only() -> None:
    """Of two streams the one with a row in the failed step ends with an error; the one that arrives while it is dealt
    with, and all that come later, are exact: the cache was emptied."""
    with (
        serving(*ECHO, env={"MINISGL_ECHO_FAIL_STEPS": "40,300"}) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as http,
    ):
        failed = 0
        for index in range(60):
            prompt = "the same beginning of every prompt, in the cache " + str(index % 3)
            answer = http.post(TEXT, json=body(prompt, 12))
            if answer.status_code == 500:
                failed += 1
                assert answer.json()["error"]["code"] == "engine_error" and "fails on purpose" in answer.text
            else:
                assert answer.json()["choices"][0]["text"] == alone(prompt, 12)
        assert failed == 2
        counted = 'minisgl:requests_finished_total{reason="error"} 2.0'
        until(lambda: counted in http.get("/metrics").text, "the two are not counted")


@pytest.mark.parametrize(
    ("order", "states"), [("schedule:60:after", False), ("commit:90:before", False), ("commit:90:before", True)]
)
def test_a_broken_scheduler_is_replaced_and_streams_stay_exact(order: str, states: bool) -> None:
    """Streams are exact across the failover, those of a model with states, too; /health, /metrics and the log say what
    happened."""
    env = {"MINISGL_CPU_BACKEND": "rust_hotpath", "MINISGL_FAULTY_CONTROL_PLANE": order}
    if states:
        env["MINISGL_ECHO_STATES"] = "8"
    with (
        serving(*ECHO, env=env) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as http,
    ):
        assert http.get("/health").json()["cpu_backend"] == "rust_hotpath"
        with Stream(http, "first", 400) as first, Stream(http, "second", 300) as second:
            second.read_all()
            first.read_all()
        assert (first.text, second.text) == (alone("first", 400, states), alone("second", 300, states))
        until(lambda: http.get("/health").json()["stats"]["num_failovers_total"] == 1, "no failover is told of")
        assert http.get("/health").json()["cpu_backend"] == "python"
        assert "on order" in http.get("/health").json()["stats"]["failover_reason"]
        metrics = http.get("/metrics").text
        assert "minisgl:control_plane_failovers_total 1.0" in metrics and 'cpu_backend="python"' in metrics
        saved = re.search(r"^minisgl:states_saved_total (\S+)", metrics, re.MULTILINE)
        assert saved is not None and (float(saved[1]) > 0) == states
        assert any("python serves from now on" in line for line in server.lines)


def test_json_logs_are_one_object_a_line() -> None:
    with ServerProcess((*ECHO, "--log-format", "json")) as server:
        httpx.post(server.url + TEXT, json=body("a secret", 3), headers={"x-request-id": "logged"})
        until(lambda: any("logged" in line for line in server.lines), "no access line")
        assert server.stop() == 0
        found = [json.loads(line) for line in server.lines]
        assert all({"time", "level", "logger", "event"} <= set(line) for line in found)
        line = next(line for line in found if line.get("request_id") == "logged")
        assert (line["status"], line["generated_tokens"], line["finish_reason"]) == (200, 3, "length")
        assert not any("secret" in line for line in server.lines)


def test_a_killed_engine_ends_every_kind_of_request(brake: Brake) -> None:
    """Streams, whole answers and waiting ones: each gets its error, nothing hangs, nothing stays."""
    with ServerProcess((*ECHO, "--max-running-requests", "8"), brake.env) as server:
        engine = server.engine()
        ended = asyncio.run(_killed_under(server, engine))
        assert server.process.wait(WAIT_S) == 1
        until(lambda: any("engine process died" in line for line in server.lines), "it does not say why")
        server.check_no_files()
    streams, wholes = ended[::2], ended[1::2]
    assert len(streams) == len(wholes) == 30
    for status, text in wholes:
        assert status == 503 and json.loads(text)["error"]["code"] == "engine_unavailable"
    for status, text in streams:
        assert status in (200, 503) and "engine process died" in text and '"engine_unavailable"' in text
        assert status == 503 or text.endswith("data: [DONE]\n\n")
    assert {status for status, _ in streams} == {200, 503}  # those with a token, and those that waited for one


async def _killed_under(server: ServerProcess, engine: psutil.Process) -> list[tuple[int, str]]:
    """Status and text of 60 requests, every other one a stream; the engine is killed while 8 of them run."""
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, limits=limits) as http:

        async def one(index: int) -> tuple[int, str]:
            answer = await http.post(TEXT, json=body(f"{index} doomed", 8000, stream=index % 2 == 0))
            return answer.status_code, answer.text

        async def health() -> dict[str, int]:
            found: dict[str, int] = (await http.get("/health")).json()
            return found

        async def arrive() -> None:
            """Requests that find the engine dead, until the server is gone too."""
            with contextlib.suppress(httpx.TransportError):
                while True:
                    await http.post(TEXT, json=body("late", 1))

        async def until_open(count: int) -> None:
            while (await health())["requests_open"] < count:
                await asyncio.sleep(0.02)

        running = [asyncio.create_task(one(index)) for index in range(8)]
        await until_open(8)
        while (await health())["requests_queued"] or "minisgl:ttft_seconds_count 8.0" not in (
            await http.get("/metrics")
        ).text:
            await asyncio.sleep(0.02)
        running += [asyncio.create_task(one(index)) for index in range(8, 60)]
        await until_open(60)
        engine.kill()
        late = [asyncio.create_task(arrive()) for _ in range(4)]
        ended = await asyncio.gather(*running)
        await asyncio.gather(*late)
        return ended


def test_a_signal_while_the_engine_loads_ends_the_server() -> None:
    """The engine hears nothing while it loads (here: it is stopped); nobody waits for it."""
    with ServerProcess(ECHO, minisgl=PATIENT, wait=False, forked=False) as server:
        server.engine().suspend()
        assert server.stop(signal.SIGTERM) == 0


def test_a_second_signal_does_not_wait_for_a_hung_engine(brake: Brake) -> None:
    with ServerProcess((*ECHO, "--drain-timeout", "3600"), brake.env, minisgl=PATIENT) as server:
        engine = server.engine()
        with httpx.Client(base_url=server.url, timeout=WAIT_S) as http, Stream(http, "stuck", 8000):
            engine.suspend()
            server.process.send_signal(signal.SIGTERM)
            until(lambda: any("draining" in line for line in server.lines), "it does not say that it drains")
            assert server.stop(signal.SIGTERM) == 0
