"""Pictures of single ideas of the scheduler for docs/scheduler.md and state-layers.md, from real servers: few requests,
in slow motion, on the echo engine, whose tokens are bytes.

Invariants: a scene is made by requests alone, each sent when the previous ones have their first token.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

STEP_MS = 60  # slow enough for the stream to leave no step out
WAIT_S = 60.0  # timeout in seconds; expiry is a failure


@dataclass(frozen=True)
class Ask:
    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Scene:
    """Scene to draw. `rounds`: groups of requests sent together; a group is sent when each request of the previous one
    has its first token, or with `apart` its last. `tree`: the picture shows the prefix tree."""

    name: str
    flags: tuple[str, ...]
    rounds: tuple[tuple[Ask, ...], ...]
    apart: bool = False
    tree: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def words(seed: int, length: int) -> str:
    """Return a text of `length` bytes that differs for each seed."""
    text = " ".join(f"{seed * 7919 + i * i * 31:05d}" for i in range(length // 6 + 1))
    return text[:length]


COMMON = "You are a helpful assistant. Answer in one sentence, and say so when you do not know. " + words(9, 180)
QUESTIONS = ("What is a page?", "What is a radix tree?", "Who evicts?", "When is a step over?", "What is a chunk?")
ECHO = ("--engine", "echo", "--page-size", "16")
ECHO_STATES = {"MINISGL_ECHO_STATES": "16"}
STATES = ("--num-pages", "512", "--checkpoint-interval", "4096", "--max-prefill-length", "64")
VISITORS = tuple((Ask(COMMON + question, 6),) for question in ("Who evicts?", "What is a page?", "Are chunks pages?"))

SCENES = (
    Scene(
        "scheduler-chunks",
        (*ECHO, "--max-prefill-length", "64", "--num-pages", "512"),
        (tuple(Ask(words(seed, 40), 50) for seed in range(3)), (Ask(words(5, 900), 20),)),
    ),
    Scene(
        "scheduler-shared",
        (*ECHO, "--num-pages", "512"),
        ((Ask(COMMON + QUESTIONS[0], 24),), tuple(Ask(COMMON + question, 24) for question in QUESTIONS[1:])),
        apart=True,
    ),
    Scene(
        "scheduler-retraction",
        (*ECHO, "--num-pages", "11"),
        ((Ask(words(0, 28), 62),), (Ask(words(1, 36), 62),)),
    ),
    Scene(
        "scheduler-tree",
        (*ECHO, "--num-pages", "512", "--log-prompts"),
        (tuple(Ask(COMMON + question, 8) for question in QUESTIONS),),
        tree=True,
    ),
    Scene("states-fork", (*ECHO, *STATES), VISITORS, apart=True, env=ECHO_STATES),
    Scene("states-tree", (*ECHO, *STATES, "--log-prompts"), VISITORS, apart=True, tree=True, env=ECHO_STATES),
)


def play(url: str, scene: Scene) -> None:
    """Send the scene's requests, and return when all are complete."""
    threads: list[threading.Thread] = []
    failed: list[Exception] = []
    for requests in scene.rounds:
        begun = [threading.Event() for _ in requests]
        now = [
            threading.Thread(target=_noted, args=(failed, seen, lambda ask=ask, seen=seen: _ask(url, ask, seen.set)))
            for ask, seen in zip(requests, begun, strict=True)
        ]
        for thread in now:
            thread.start()
        threads += now
        for event in begun:
            event.wait(WAIT_S)
        if scene.apart:
            _join(now)
    _join(threads)
    if failed:
        raise failed[0]


def _noted(failed: list[Exception], begun: threading.Event, ask: Callable[[], None]) -> None:
    try:
        ask()
    except (httpx.HTTPError, ValueError) as error:
        failed.append(error)
    finally:
        begun.set()


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(WAIT_S)


def _ask(url: str, ask: Ask, begun: Callable[[], None]) -> None:
    body = {"prompt": ask.prompt, "max_tokens": ask.max_tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            begun()
            if line.startswith("data: {") and "error" in json.loads(line.removeprefix("data: ")):
                raise ValueError(line)
