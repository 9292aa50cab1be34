"""Adapters between messages and an engine: what waits, what is refused, and when one goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from minisgl.config import ConfigError
from minisgl.message import (
    AbortRequest,
    AdapterChanged,
    AddRequest,
    FinishRequest,
    FromEngine,
    LoadAdapter,
    ToEngine,
    UnloadAdapter,
)
from minisgl.runner.adapters import EngineAdapters
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.helpers.seconds import WAIT_S

PLAIN = AddRequest(1, b"", SamplingParams())


class Engine:
    """`reading` is held until it is let go."""

    def __init__(self, held: bool = False) -> None:
        self.changes: list[tuple[str, int]] = []
        self._go_on = threading.Event()
        if not held:
            self._go_on.set()

    def let_go(self) -> None:
        self._go_on.set()

    def read_adapter(self, folder: str) -> str:
        assert self._go_on.wait(WAIT_S)
        if folder == "bug":
            raise ZeroDivisionError
        if folder == "bad":
            raise ConfigError("bad: no adapter")
        return folder

    def add_adapter(self, number: int, adapter: str) -> None:
        self.changes.append((adapter, number))

    def remove_adapter(self, number: int) -> None:
        self.changes.append(("removed", number))


class World:
    def __init__(self, engine: Any, threaded: bool = False) -> None:
        self.said: list[FromEngine] = []
        self.ends: list[tuple[int, FinishReason, str]] = []
        self.in_use: set[int] = set()
        self.woken = threading.Semaphore(0)
        wake: Callable[[], None] | None = self.woken.release if threaded else None
        self.adapters = EngineAdapters(engine, self._send, self._end, lambda: self.in_use, wake)

    def _send(self, messages: Sequence[FromEngine]) -> None:
        self.said += messages

    def _end(self, req_id: int, reason: FinishReason, text: str) -> None:
        self.ends.append((req_id, reason, text))

    def take(self, *messages: ToEngine) -> list[ToEngine]:
        return list(self.adapters.intake(messages))


def ask(req_id: int, adapter: int) -> AddRequest:
    return AddRequest(req_id, b"", SamplingParams(adapter=adapter))


def test_without_any_messages_pass_through() -> None:
    world = World(object())
    messages = (PLAIN, AbortRequest(1))
    assert world.adapters.intake(messages) is messages


def test_requests_wait_until_theirs_is_read_and_others_do_not() -> None:
    engine = Engine(held=True)
    world = World(engine, threaded=True)
    assert world.take(LoadAdapter(4, "sql", "a"), ask(1, 4), PLAIN, ask(2, 4), ask(3, 4)) == [PLAIN]
    assert world.take(AbortRequest(2), FinishRequest(3), AbortRequest(9)) == [AbortRequest(9)]
    assert world.ends == [(2, FinishReason.ABORT, ""), (3, FinishReason.STOP, "")]
    assert (world.said, engine.changes) == ([], [])
    engine.let_go()
    assert world.woken.acquire(timeout=WAIT_S)
    assert world.take(ask(5, 4)) == [ask(1, 4), ask(5, 4)]
    assert (world.said, engine.changes) == ([AdapterChanged(4, "loaded")], [("a", 4)])
    world.adapters.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_an_unreadable_adapter_is_refused_with_its_waiting_requests(threaded: bool) -> None:
    world = World(Engine(), threaded)
    found = world.take(LoadAdapter(4, "sql", "bad"), ask(1, 4))
    if threaded:
        assert world.woken.acquire(timeout=WAIT_S)
        found += world.take()
    assert found == []
    assert world.said == [AdapterChanged(4, "refused", "bad: no adapter")]
    assert world.ends == [(1, FinishReason.ERROR, "adapter: bad: no adapter")]
    assert world.take(ask(2, 4), PLAIN) == [PLAIN]
    assert world.ends[1:] == [(2, FinishReason.ERROR, "adapter 4 is not loaded")]


@pytest.mark.parametrize("threaded", [False, True])
def test_a_bug_while_it_is_read_is_a_refusal(threaded: bool) -> None:
    world = World(Engine(), threaded)
    world.take(LoadAdapter(4, "sql", "bug"))
    if threaded:
        assert world.woken.acquire(timeout=WAIT_S)
        world.take()
    assert world.said == [AdapterChanged(4, "refused", "internal error: ZeroDivisionError")]


def test_an_engine_without_adapters_says_so() -> None:
    class Plain:
        class info:
            name = "sim"

    world = World(Plain())
    assert world.take(LoadAdapter(1, "sql", "a")) == []
    assert world.said == [AdapterChanged(1, "refused", "--engine sim does not support adapters")]


def test_loading_an_adapter_twice_reports_it_loaded() -> None:
    """By a pool that has lost its connection for a while."""
    engine = Engine()
    world = World(engine)
    for _ in range(2):
        world.take(LoadAdapter(4, "sql", "a"))
    assert (world.said, engine.changes) == ([AdapterChanged(4, "loaded")] * 2, [("a", 4)])


def test_an_unloaded_adapter_is_removed_when_no_request_names_it() -> None:
    engine = Engine()
    world = World(engine)
    world.take(LoadAdapter(4, "sql", "a"))
    world.in_use = {0, 4}
    assert world.take(UnloadAdapter(4), ask(1, 4)) == [ask(1, 4)], "it was sent before the answer came"
    assert (world.said[-1], engine.changes[1:]) == (AdapterChanged(4, "unloaded"), []) and world.adapters.has_removals
    world.in_use = {0}
    world.take()
    assert (engine.changes[1:], world.adapters.has_removals) == ([("removed", 4)], False)
    assert world.take(UnloadAdapter(7)) == []
    assert world.said[-1] == AdapterChanged(7, "unloaded")


def test_an_adapter_unloaded_while_it_is_read_is_removed_at_once() -> None:
    engine = Engine(held=True)
    world = World(engine, threaded=True)
    world.take(LoadAdapter(4, "sql", "a"), ask(1, 4), UnloadAdapter(4))
    engine.let_go()
    assert world.woken.acquire(timeout=WAIT_S)
    assert world.take() == [ask(1, 4)]
    assert (world.said, engine.changes) == ([AdapterChanged(4, "unloaded")], [("a", 4)])
    world.take()
    assert engine.changes[1:] == [("removed", 4)]
    world.adapters.close()
