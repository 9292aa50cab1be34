"""Data parallelism: the processes of several engines behind one real server, many streams at once, and random kills."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import httpx
import psutil

from minisgl.tokenizer import Tokenizer
from tests.helpers.e2e import until
from tests.helpers.forking import FORKED
from tests.helpers.seconds import WAIT_S
from tests.helpers.server import data_of
from tests.helpers.several import expected

PATH = "/v1/completions"


class HasPid(Protocol):
    @property
    def pid(self) -> int: ...


class Pool(Protocol):
    """Server with several engines, such as `ServerProcess`."""

    @property
    def url(self) -> str: ...
    @property
    def lines(self) -> list[str]: ...
    @property
    def process(self) -> HasPid: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """Completion request. To the echo engine, greedy and sampled requests differ in the seed only."""

    prompt: str
    seed: int
    max_tokens: int
    states: bool = False  # of the model
    known: tuple[str, int] | None = None  # the text that another model says, and the tokens of the prompt
    model: str | None = None

    def body(self, **more: object) -> dict[str, Any]:
        fixed = {"prompt": self.prompt, "seed": self.seed, "max_tokens": self.max_tokens, "ignore_eos": True}
        named = {} if self.model is None else {"model": self.model}
        return {**fixed, **named, "temperature": float(self.seed % 2), **more}

    def text(self) -> str:
        """Return the text that an undisturbed server generates."""
        if self.known is not None:
            return self.known[0]
        return _expected(self.prompt, self.max_tokens, self.seed, to_the_end=True, states=self.states)

    def num_prompt(self) -> int:
        return len(Tokenizer.echo().encode(self.prompt)) if self.known is None else self.known[1]


_expected = lru_cache(4096)(expected)


def random_ask(rng: random.Random, max_tokens: int, states: bool = False) -> Ask:
    """Return a random request; some share the beginning of their prompts."""
    shared = f"prefix {rng.randrange(8)} " * rng.randrange(12)
    return Ask(f"{shared}prompt {rng.randrange(10**6)}", rng.randrange(50), rng.randrange(20, max_tokens), states)


async def answer(http: httpx.AsyncClient, ask: Ask) -> None:
    """Stream a request and assert that the output is an undisturbed server's: nothing lost, repeated or changed."""
    text, events, last = "", 0, None
    body = ask.body(stream=True, stream_options={"include_usage": True})
    async with http.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if (data := data_of(line)) == "[DONE]":
                last = "done"
            elif data:
                assert last != "done"
                event = json.loads(data)
                assert "error" not in event, event
                if event["choices"]:
                    text += event["choices"][0]["text"]
                    events += 1
                else:
                    usage = event["usage"]
    assert last == "done" and events
    assert text == ask.text(), f"{ask}: {text!r} is not {ask.text()!r}"
    assert usage["completion_tokens"] == ask.max_tokens
    assert usage["prompt_tokens"] == ask.num_prompt()


ENGINES = {"minisgl.runner.process", "minisgl.supervisor.child", FORKED}
"""Words in the command lines of engine processes, started or forked."""


def engine_processes(server: Pool) -> list[psutil.Process]:
    """Return the engine processes that run, in the order of their start."""
    engines = []
    for child in psutil.Process(server.process.pid).children():
        try:
            if ENGINES.intersection(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                engines.append(child)
        except psutil.NoSuchProcess:
            pass
    return engines


def states(server: Pool) -> list[str]:
    engines = httpx.get(f"{server.url}/health", timeout=WAIT_S).json()["engines"]
    return [one["state"] for one in engines]


def pool(server: Pool) -> dict[str, Any]:
    stats: dict[str, Any] = httpx.get(f"{server.url}/stats", timeout=WAIT_S).json()["pool"]
    return stats


def until_all_ready(server: Pool, num_engines: int) -> None:
    def done() -> bool:
        return len(engine_processes(server)) == num_engines and set(pool(server)["states"]) == {"ready"}

    until(done, "an engine does not come back: " + "\n".join(server.lines[-20:]), WAIT_S)


def ask_all(server: Pool, asks: Sequence[Ask], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Send all requests at once and check their output; `meanwhile` runs in a thread once they have started."""

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, limits=limits) as http:
            tasks = [asyncio.create_task(answer(http, ask)) for ask in asks]
            await asyncio.to_thread(meanwhile)
            await asyncio.gather(*tasks)

    asyncio.run(run())


class Chaos:
    """Kills engines at random moments under `num_streams` streams, and checks that each stream is as if nothing had
    happened. `url`: where requests are sent, if not to the engines' server."""

    def __init__(
        self,
        server: Pool,
        num_engines: int,
        seed: int,
        make: Callable[[random.Random, int], Ask] = random_ask,
        num_streams: int = 64,
        url: str | None = None,
    ) -> None:
        self._url = server.url if url is None else url
        self._make = make
        self._server = server
        self._num_engines = num_engines
        self._rng = random.Random(seed)
        self._num_streams = num_streams
        self.num_kills = 0
        self.num_answers = 0

    def run(self, num_kills: int, max_tokens: int = 400) -> None:
        asyncio.run(self._run(num_kills, max_tokens))

    async def _run(self, num_kills: int, max_tokens: int) -> None:
        limits = httpx.Limits(max_connections=None)
        ended = asyncio.Event()
        seeds = [self._rng.random() for _ in range(self._num_streams)]
        async with httpx.AsyncClient(base_url=self._url, timeout=WAIT_S, limits=limits) as http:
            clients = [
                asyncio.create_task(self._client(http, random.Random(seed), max_tokens, ended)) for seed in seeds
            ]
            killer = asyncio.create_task(asyncio.to_thread(self._kill, num_kills))
            done, _ = await asyncio.wait([killer, *clients], return_when=asyncio.FIRST_COMPLETED)
            ended.set()
            for one in done:
                one.result()
            await killer
            await asyncio.gather(*clients)

    async def _client(self, http: httpx.AsyncClient, rng: random.Random, max_tokens: int, ended: asyncio.Event) -> None:
        while not ended.is_set():
            await answer(http, self._make(rng, max_tokens))
            self.num_answers += 1

    def _kill(self, num_kills: int) -> None:
        rng = self._rng
        while self.num_kills < num_kills:
            until_all_ready(self._server, self._num_engines)
            running = engine_processes(self._server)
            # never all: the last one's death is the server's
            victims = rng.sample(running, min(rng.randrange(1, self._num_engines), num_kills - self.num_kills))
            for victim in victims:
                signal_ = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))  # the second: memory is short
                victim.send_signal(signal_)
                self.num_kills += 1
            if rng.random() < 0.3 and self.num_kills < num_kills:
                self._kill_a_successor(running, rng)
            psutil.wait_procs(victims, timeout=WAIT_S)

    def _kill_a_successor(self, before: Sequence[psutil.Process], rng: random.Random) -> None:
        """Kill a process that replaces a killed engine, at some moment of its start."""

        def new() -> list[psutil.Process]:
            return [one for one in engine_processes(self._server) if one not in before]

        until(lambda: bool(new()), "a killed engine is not started again", WAIT_S)
        rng.choice(new()).kill()
        self.num_kills += 1
