"""GET /stats/stream: live statistics, scheduler steps and radix trees for watching clients.

Invariants: without a watcher nothing is measured, requested or sent; all watchers share the engines' messages; a slow
watcher misses events and delays no other; a stream ends with its client, the engine or the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.message import StepView, TreeView, Watched
from minisgl.metrics.live import LiveFigures
from minisgl.server.core.context import ServerContext
from minisgl.server.core.errors import ApiError, bad_value, engine_gone
from minisgl.server.core.http import CONNECTION, Connection
from minisgl.server.core.request import REQUEST
from minisgl.server.core.routes import Routes
from minisgl.server.core.streams import sse
from minisgl.server.core.waiting import has_room
from minisgl.step import FinishReason

STREAM = "/stats/stream"
MAX_WATCHERS = 32
TICK_S = 0.1
EVERY_S = 1.0
MAX_STEPS = 64  # per event
OPTIONS = ("steps", "tree")
AGAIN_MS = 500.0  # an engine takes longer than this to restart


class Watcher:
    """Unsent events of one client, bounded however slow it is."""

    def __init__(self, *, steps: bool, tree: bool) -> None:
        self.steps = steps
        self.tree = tree
        self.paused = False
        self._stats: dict[str, Any] | None = None
        self._stats_left_out = 0
        self._steps: dict[int, deque[StepView]] = {}
        self._next: dict[int, int] = {}  # by engine: number of steps received
        self._left_out: dict[int, int] = {}
        self._begun: dict[int, StepView] = {}  # by engine: the last step passed to `begin`
        self._trees: dict[int, TreeView] = {}

    def set_stats(self, stats: dict[str, Any]) -> None:
        self._stats_left_out += self._stats is not None
        self._stats = stats

    def begin(self, engine: int, recent: Sequence[StepView]) -> None:
        """Add recent scheduler steps of an engine from before this client connected."""
        if recent and self.steps:
            self._steps.setdefault(engine, deque(maxlen=MAX_STEPS)).extend(recent)
            self._begun[engine] = recent[-1]
            self._left_out[engine] = 0

    def watched(self, engine: int, message: Watched) -> None:
        if message.tree is not None and self.tree:
            self._trees[engine] = message.tree
        begun = self._begun.get(engine)
        steps = [one for one in message.steps if _is_new(one, begun)]  # an engine repeats its recent ones
        if not steps or not self.steps:
            return
        kept = self._steps.setdefault(engine, deque(maxlen=MAX_STEPS))
        expected = self._next.get(engine, message.at)
        missed = max(0, message.at - expected)  # a restarted engine counts from 0
        missed += max(0, len(kept) + len(steps) - MAX_STEPS)
        self._left_out[engine] = self._left_out.get(engine, 0) + missed
        self._next[engine] = message.at + len(message.steps)
        kept.extend(steps)

    def events(self, text: Callable[[list[int]], str] | None) -> Iterator[bytes]:
        """Yield the unsent events and clear them. `text`: decodes token ids, where texts may be shown."""
        if (stats := self._stats) is not None:
            yield sse({**stats, "left_out": self._stats_left_out}, "stats")
            self._stats, self._stats_left_out = None, 0
        for engine, steps in self._steps.items():
            if steps:
                shown = [_step(one) for one in steps]
                yield sse({"engine": engine, "left_out": self._left_out[engine], "steps": shown}, "steps")
                self._left_out[engine] = 0
                steps.clear()
        for engine, tree in self._trees.items():
            yield sse({"engine": engine, **_tree(tree, text)}, "tree")
        self._trees.clear()


class Live:
    """All watchers of one server, and the task that collects events for them."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._figures = LiveFigures(context.metrics, lambda: context.client.stats)
        self._watchers: dict[Watcher, int] = {}  # with the indices of their API keys
        self._task: asyncio.Task[None] | None = None
        self._last: dict[str, Any] | None = None
        self._recent: dict[int, deque[StepView]] = {}  # by engine

    @contextlib.contextmanager
    def watching(self, watcher: Watcher, key: int) -> Iterator[None]:
        """Register `watcher` of key `key` inside the block. Raises `ApiError` 429 if there are too many."""
        count, own = len(self._watchers), list(self._watchers.values()).count(key)
        if not has_room(MAX_WATCHERS, self._context.keys.num_owners, own, count, 1):
            raise ApiError(429, f"{STREAM}: {count} clients are watching: close one", code="too_many_watchers")
        for engine, steps in self._recent.items():
            watcher.begin(engine, steps)
        self._watchers[watcher] = key
        client = self._context.client
        try:
            if self._task is None:
                client.on_watched = self._watched
                self._task = asyncio.create_task(self._poll_forever())
            else:
                if self._last is not None:
                    watcher.set_stats(self._last)
                client.watch(steps=watcher.steps, tree=watcher.tree)
            yield
        finally:
            self._watchers.pop(watcher, None)
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = self._last = None
                self._figures.forget()
                client.on_watched = None

    def check(self) -> None:
        """Raise the exception that ended the task which collects live events, if it has ended."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def _poll_forever(self) -> None:
        """Each second compute statistics and renew the engines' subscription, which otherwise expires."""
        client = self._context.client
        while client.failure is None:
            steps, tree = (any(getattr(one, name) for one in self._watchers) for name in OPTIONS)
            client.watch(steps=steps, tree=tree)
            self._last = self._figures.look(general_stats(self._context))
            for watcher in self._watchers:
                watcher.set_stats(self._last)
            await asyncio.sleep(EVERY_S)

    def _watched(self, engine: int, message: Watched) -> None:
        recent = self._recent.setdefault(engine, deque(maxlen=MAX_STEPS))
        last = recent[-1] if recent else None
        recent.extend([one for one in message.steps if _is_new(one, last)])
        for watcher in self._watchers:
            watcher.watched(engine, message)


class _Stream(Response):
    """Response of GET /stats/stream; runs until its client disconnects."""

    def __init__(self, context: ServerContext, live: Live, watcher: Watcher) -> None:
        super().__init__()
        self._context = context
        self._live = live
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        start = {
            "type": "http.response.start",
            "status": 200,
            "headers": [*headers, (b"content-type", b"text/event-stream; charset=utf-8")],
        }
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        with self._live.watching(self._watcher, scope[REQUEST].key):
            await send(start)
            end = await self._write_events(scope[CONNECTION])
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _write_events(self, connection: Connection) -> bytes:
        """Write events until the client disconnects or the engine fails; return the stream's last bytes."""
        client, watcher = self._context.client, self._watcher
        text = self._text if self._context.config.log_prompts else None
        with connection.stream(lambda: self._pause(True), lambda: self._pause(False)):
            while not connection.is_lost:
                if client.failure is not None:
                    return sse(engine_gone(client.failure).body, "error")
                self._live.check()
                if not watcher.paused:
                    for event in watcher.events(text):
                        connection.write(event)
                await asyncio.sleep(TICK_S)
        return b""

    def _pause(self, paused: bool) -> None:
        self._watcher.paused = paused

    def _text(self, ids: list[int]) -> str:
        return self._context.tokenizer.decode(ids, False)


def add_live(app: Routes, context: ServerContext) -> Live:
    live = Live(context)

    @app.on(STREAM, "GET")
    async def stream(request: Request) -> Response:
        return _Stream(context, live, _watcher(request))

    return live


def general_stats(context: ServerContext) -> dict[str, Any]:
    """Return the fields of /stats that are no metrics."""
    info = context.client.info
    return {
        "model": context.served.name,
        "simulated": (info.simulated or None) if info is not None else None,
        "schedule_policy": context.config.engine.schedule_policy,
    }


def _watcher(request: Request) -> Watcher:
    given: dict[str, bool] = {}
    for name, value in request.query_params.multi_items():
        if name not in OPTIONS:
            raise bad_value(name, value, f"unknown: the options of {STREAM} are {' and '.join(OPTIONS)}")
        if name in given:
            raise bad_value(name, value, "must be given once only")
        if value not in ("0", "1"):
            raise bad_value(name, value, "must be 0 or 1")
        given[name] = value == "1"
    return Watcher(steps=given.get("steps", False), tree=given.get("tree", False))


def _is_new(one: StepView, last: StepView | None) -> bool:
    """Return true if a step is newer than `last`: it has a higher index, or its engine has restarted."""
    return last is None or one.step > last.step or one.at_ms > last.at_ms + AGAIN_MS


def _step(view: StepView) -> dict[str, Any]:
    return {
        "step": view.step,
        "at_ms": view.at_ms,
        "phases": view.phases,
        "rows": [
            (request, "decode" if decodes else "prefill", new, cached, length)
            for request, decodes, new, cached, length in view.rows
        ],
        "admitted": view.admitted,
        "finished": [(request, FinishReason(reason).name.lower()) for request, reason in view.finished],
        "num_retracted": view.num_retracted,
        "retracted": view.retracted,
        "waiting": view.num_waiting,
        "free": view.num_free_pages,
        "rows_left_out": view.num_rows_left_out,
    }


def _tree(tree: TreeView, text: Callable[[list[int]], str] | None) -> dict[str, Any]:
    names = ("id", "parent", "tokens", "depth", "locks", "age", "children", "pinned", "saved")
    nodes = []
    for *numbers, begins in tree.nodes:
        node: dict[str, Any] = dict(zip(names, numbers, strict=True))
        if text is not None:
            node["text"] = text(begins)
        nodes.append(node)
    left_out = tree.num_nodes - len(nodes)
    return {"num_nodes": tree.num_nodes, "num_tokens": tree.num_tokens, "left_out": left_out, "nodes": nodes}
