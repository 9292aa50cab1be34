"""The registry decides which models are loaded: it gives leases of loaded models, and queues leases of others.

A request has a *lease* of its model from the moment the model is chosen to the last byte of its response. Models whose
leases wait for memory are in one queue, the longest waiting first; none passes another. Idle models are unloaded to
free memory. A busy model that the queue needs gone takes no more leases after `patience_s`, until it is unloaded or the
queue has moved on.
Invariants: a model with a lease is not unloaded; the needs of all models that are loaded, loading or unloading never
exceed the budget, except when a model is measured to take more than expected; each waiting lease gets its model, or an
error that says why not.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable
from typing import Any

from minisgl.config import ConfigError, Limits
from minisgl.registry.entries import Entry
from minisgl.registry.model import Lease, Model
from minisgl.registry.needs import Needs
from minisgl.registry.room import Move, Room, make_room, move, never_fits, retry_after_s, victims
from minisgl.registry.server import Fetch, ModelServer, NotLoaded, Start, fetch
from minisgl.registry.servers import Servers
from minisgl.server.core.context import LATEST
from minisgl.server.core.errors import NO_MODEL, ApiError, draining, model_not_loaded, queue_full, wrong
from minisgl.server.core.log import say, warn

MEASURE_S = 1.0
QUIET_S = 60.0  # seconds without a request before a batch may unload a model


class Registry:
    """The registry of all models. `budget` is the memory of all in bytes, `load_timeout_s` the time that a lease may
    wait. `start` starts a server, `fetch` downloads a model, and `needs` has measured memory of earlier runs."""

    def __init__(
        self,
        entries: Iterable[Entry],
        budget: int,
        limits: Limits,
        load_timeout_s: float,
        start: Start,
        fetch: Fetch = fetch,
        needs: Needs | None = None,
    ) -> None:
        self.models = {entry.name: Model(entry) for entry in entries}
        self._servers = Servers(start, fetch, needs or Needs(None))
        for model in self.models.values():
            self._servers.recall(model)
        self.budget = budget
        self.load_timeout_s = load_timeout_s
        self._most_waiting = limits.max_queued_requests
        self._names = {
            name: model
            for model in self.models.values()
            for name in (model.name, *model.entry.aliases, *model.entry.adapters)
        }
        self._needs = dict[str, int]()  # reserved bytes by model
        self._queue = list[Model]()
        self._leaving = set[str]()
        self._count = itertools.count(1)
        self._tasks = set[asyncio.Task[None]]()
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = self._is_closed = False
        self._num_preloading = 0
        self.num_loads = dict.fromkeys(self.models, 0)
        self.num_unloads = dict.fromkeys(self.models, 0)
        self.used_by_gone = Counter[int]()  # tokens by key index, of servers that have ended

    # -------------------------------------------------------------------------------------------------- what is asked

    def find(self, name: str) -> Model | None:
        """Return the model of a name, or None. The exact name wins over one that differs in case or in Ollama's tag."""
        if (found := self._names.get(name) or self._names.get(name.removesuffix(LATEST))) is not None:
            return found
        plain = name.casefold().removesuffix(LATEST)
        return next((model for known, model in self._names.items() if known.casefold() == plain), None)

    def named(self, name: str) -> Model:
        """Return the model of a name that a request gave. Raises `ApiError` 404."""
        if (model := self.find(name)) is not None:
            return model
        raise wrong("model", f"{name[:80]!r} does not exist here: there are {', '.join(self.models)}", *NO_MODEL)

    def find_exactly(self, name: str) -> Model | None:
        return self._names.get(name)

    def name_adapter(self, model: Model, name: str) -> None:
        """Give a free name to an adapter of `model` that is being loaded over HTTP."""
        self._names[name] = model
        model.adapters[name] = ""

    def forget_adapter(self, model: Model, name: str) -> None:
        if model.adapters.pop(name, None) is not None:
            del self._names[name]

    @property
    def first(self) -> Model:
        """The model for requests that name none: the first that is loaded, else the first one."""
        return next((one for one in self.models.values() if one.state == "loaded"), next(iter(self.models.values())))

    @property
    def num_waiting(self) -> int:
        return sum(len(model.waiting) for model in self.models.values())

    @property
    def is_ready(self) -> bool:
        """True if all models to preload are loaded or have failed."""
        return not self._num_preloading

    @property
    def set_aside(self) -> int:
        """Bytes of the budget that loaded, loading and unloading models have reserved."""
        return sum(self._needs.values())

    def place(self, model: Model) -> int:
        """Return how many models are to be loaded before `model`."""
        return self._queue.index(model) if model in self._queue else 0

    def lease(self, model: Model) -> Lease:
        """Return a lease, which may wait. Raises `ApiError` if the model never fits or failed, or too many wait."""
        if self._is_closed:
            raise draining()
        lease = Lease(self.end, model)
        model.use.last = next(self._count)
        if model.state == "loaded" and model.name not in self._leaving:
            self._grant(lease)
            return lease
        self._check_can_be(model)
        if (waiting := self.num_waiting) >= self._most_waiting:
            raise queue_full(f"{waiting} requests wait for models, the limit (--max-queued-requests)")
        model.waiting.append(lease)
        if model.state != "loading" and model not in self._queue:
            model.use.queued_since = time.monotonic()
            self._queue.append(model)
        self._decide_soon()
        return lease

    def lease_in_background(self, model: Model) -> Lease | None:
        """Lease a model for one batch line, or return None if no capacity is free now. Other requests go first: they
        may unload a model that has such leases only. Raises `ApiError` if the model never fits or has just failed."""
        if self._is_closed:
            raise draining()
        if model.state == "loaded" and model.name not in self._leaving:
            assert model.server is not None
            lease = Lease(self.end, model, in_background=True)
            model.use.num_lines += 1
            lease.ready.set_result(model.server)
            return lease
        self._check_can_be(model)
        if model.state == "unloaded" and not self._queue and not self._is_fetched_first(model):
            quiet = time.monotonic() - QUIET_S
            in_use = [one.name for one in self.models.values() if one.use.num_lines or one.use.asked_at > quiet]
            need = self._need(model)
            self._carry_out(model, need, make_room(self._room(in_use), need))
        return None

    def end(self, lease: Lease) -> None:
        model, use = lease.model, lease.model.use
        use.idle_since = time.monotonic()
        if lease.in_background:
            use.num_lines -= 1
            self._decide_soon()
            return
        use.last, use.asked_at = next(self._count), use.idle_since
        if lease in model.waiting:
            model.waiting.remove(lease)
        elif lease.ready.done() and not lease.ready.cancelled() and lease.ready.exception() is None:
            use.num_serving -= 1
        lease.ready.cancel()
        self._decide_soon()

    async def unload(self, model: Model) -> None:
        """Unload a model and wait until it is unloaded. Raises `ApiError` 409 if it is in use."""
        num_serving = model.use.num_serving + model.use.num_lines
        if num_serving or model.waiting or model.state == "loading":
            what = "being loaded" if model.state == "loading" else f"used by {num_serving} requests"
            raise ApiError(409, f"{model.name}: cannot be unloaded while it is {what}: wait", code="model_busy")
        if model.state == "loaded":
            self._unload(model, "as asked")
        while model.state == "unloading":
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def preload(self) -> None:
        """Begin to load the models that must be loaded from the start. Failures are logged."""
        for model in self.models.values():
            if model.entry.preload or model.entry.pin:
                self._num_preloading += 1
                self._spawn(self._preload(model))

    async def measure_forever(self) -> None:
        while True:
            await asyncio.sleep(MEASURE_S)
            for model in self.models.values():
                await self.measure(model)

    async def close(self) -> None:
        """Refuse all waiting leases and stop all servers."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for model in self.models.values():
            self._refuse(model, draining())
        for task in list(self._tasks):
            if not task.get_name().startswith("unload"):
                task.cancel()
        for model in self.models.values():
            if model.state == "loaded":
                self._unload(model, "the server ends")
        while self._tasks:
            await asyncio.wait(self._tasks)
        for model in self.models.values():
            model.state = "unloaded"  # a task canceled before it began did not reset it

    # ------------------------------------------------------------------------------------------------------ decisions

    def _check_can_be(self, model: Model) -> None:
        if model.failure.reason and (wait_s := model.failure.retry_at - time.monotonic()) > 0:
            raise not_loaded(model, math.ceil(wait_s))
        try:
            need = model.need() or 0
        except ConfigError as error:
            model.failure.reason = str(error)
            raise not_loaded(model) from error
        others = [one.tenant(one.need() or 0) for one in self._pinned() if one is not model]
        if never_fits(self.budget, others, need):
            reason = f"needs {_mib(need)}, and all models may take {_mib(self.budget)} (--memory)"
            beside = f", of which {_mib(sum(one.need for one in others))} are pinned" if others else ""
            raise wrong("model", f"{model.name}: {reason}{beside}", "model_too_large")

    def _pinned(self) -> list[Model]:
        return [model for model in self.models.values() if model.entry.pin]

    def _decide_soon(self) -> None:
        if not self._is_due and not self._is_closed:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        """Make all decisions that are possible now. Call it after anything that may change a decision."""
        self._is_due = False
        if self._is_closed:
            return
        now = time.monotonic()
        self._leaving.clear()
        due = [self._serve_queue(now), self._end_idle(now)]
        for model in self.models.values():
            if model.state != "loaded":
                continue
            if model.name not in self._leaving:
                self._admit(model)
            elif not model.use.num_serving:
                self._unload(model, "its room is needed")
        if self._timer is not None:
            self._timer.cancel()
        if (wait_s := min(due)) < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), self._decide)

    def _serve_queue(self, now: float) -> float:
        """Load queued models that fit. Return the seconds until time alone changes a decision, or infinity."""
        while self._queue:
            head = self._queue[0]
            if not head.waiting or head.state == "loaded":
                self._queue.pop(0)
                continue
            if head.state != "unloaded":
                break
            if not self._check_now(head):
                continue
            if self._is_fetched_first(head):
                self._queue.pop(0)
                continue
            need, waited_s = self._need(head), now - head.use.queued_since
            load_s = {name: model.seen.load_s for name, model in self.models.items()}
            decision = move(self._room(), need, waited_s, load_s)
            self._carry_out(head, need, decision)
            if head.state != "unloaded":
                self._queue.pop(0)
                continue
            if decision.again_s < math.inf:
                return decision.again_s
            break  # until models have been unloaded
        self._make_room_for_growth()
        return math.inf

    def _is_fetched_first(self, model: Model) -> bool:
        """Begin to download a model whose need is unknown, and return True; False if its need is known."""
        if model.need() is not None or model.seen.was_fetched:
            return False
        model.state = "loading"
        self._spawn(self._download(model))
        return True

    def _need(self, model: Model) -> int:
        """Return the bytes that a model needs; if unknown, all that pinned models leave of the budget."""
        need = model.need()
        return self.budget - sum(one.need() or 0 for one in self._pinned()) if need is None else need

    def _carry_out(self, model: Model, need: int, decision: Move | None) -> None:
        """Carry out a decision for a model that needs `need` bytes."""
        if decision is None:
            return
        for name in decision.unload:
            self._unload(self.models[name], f"{model.name} needs its room")
        self._leaving.update(name for name in decision.leave if self.models[name].state == "loaded")
        if decision.load:
            self._needs[model.name] = need
            model.state = "loading"
            self._spawn(self._load(model, need, model.entry.need() or need))

    def _check_now(self, head: Model) -> bool:
        """Return True if the first model of the queue can be loaded; else refuse its leases."""
        try:
            self._check_can_be(head)
        except ApiError as error:
            self._refuse(head, error)
            return False
        return True

    def _room(self, in_use: Collection[str] = ()) -> Room:
        """Return the memory with the models that stay, as far as is known now."""
        staying = [name for name in self._needs if self.models[name].state != "unloading"]
        tenants = [self.models[name].tenant(self._needs[name], is_in_use=name in in_use) for name in staying]
        return Room(self.budget, self.set_aside, tenants)

    def _make_room_for_growth(self) -> None:
        """Unload models if others take more memory than expected."""
        for name in victims(self.budget, self._room().tenants, 0) or ():
            self._unload(self.models[name], "more memory is used than was thought")

    def _end_idle(self, now: float) -> float:
        """Unload models whose `ttl_s` has passed; return the seconds until the next one is due, or infinity."""
        wait_s = math.inf
        for model in self.models.values():
            ttl_s = model.entry.ttl_s
            if ttl_s is None or not model.is_free:
                continue
            if (left_s := model.use.idle_since + ttl_s - now) <= 0:
                self._unload(model, f"no request for {ttl_s:g} s")
            else:
                wait_s = min(wait_s, left_s)
        return wait_s

    # ------------------------------------------------------------------------------------------------------ their ends

    def _grant(self, lease: Lease) -> None:
        assert lease.model.server is not None
        lease.model.use.num_serving += 1
        lease.ready.set_result(lease.model.server)

    def _admit(self, model: Model) -> None:
        waiting, model.waiting = model.waiting, []
        for lease in waiting:
            self._grant(lease)

    def _refuse(self, model: Model, error: ApiError) -> None:
        waiting, model.waiting = model.waiting, []
        for lease in waiting:
            lease.ready.set_exception(error)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str | None = None) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _preload(self, model: Model) -> None:
        try:
            with self.lease(model) as lease:
                await lease.ready
        except ApiError as error:
            warn(f"{model.name}: not loaded at the start: {error}")
        finally:
            self._num_preloading -= 1

    async def _download(self, model: Model) -> None:
        """Download the model's files, after which its need is known, and put it first in the queue."""
        try:
            await self._servers.fetch(model)
        except (NotLoaded, OSError) as error:
            self._failed(model, str(error))
        else:
            self._queue.insert(0, model)
        finally:
            model.state = "unloaded"
            self._decide_soon()

    async def _load(self, model: Model, need: int, given: int) -> None:
        """Start the model's server, within `given` of the `need` bytes that are reserved for it."""
        model.failure.reason = ""
        say(f"{model.name}: loading: {_mib(need)} of {_mib(self.budget)} are set aside for it")
        server: ModelServer | None = None
        try:
            server = await self._servers.start(model, given, lambda name: self.forget_adapter(model, name))
        except (NotLoaded, OSError) as error:
            self._failed(model, str(error))
            for name in list(model.adapters):  # they may be the reason of the failure
                warn(f"{model.name}: its adapter {name} is not known any more")
                self.forget_adapter(model, name)
        finally:
            if server is None:
                model.state = "unloaded"
                self._needs.pop(model.name, None)
                self._decide_soon()
        if server is None:
            return
        model.server, model.state, model.failure.count = server, "loaded", 0
        model.use.idle_since = time.monotonic()
        self.num_loads[model.name] += 1
        server.ended.add_done_callback(lambda _: self._ended(model, server))
        self._admit(model)  # before anything may unload it again
        say(f"{model.name}: loaded after {model.seen.load_s:.2f} s, for {model.use.num_serving} requests")
        await self.measure(model)
        await self._servers.keep(model)
        self._decide_soon()

    def _failed(self, model: Model, reason: str) -> None:
        failure = model.failure
        failure.reason, failure.count = reason, failure.count + 1
        wait_s = retry_after_s(failure.count)
        failure.retry_at = time.monotonic() + wait_s
        warn(f"{model.name}: not loaded: {reason}")
        self._refuse(model, not_loaded(model, math.ceil(wait_s)))

    def _ended(self, model: Model, server: ModelServer) -> None:
        """Unload a model whose server has ended without being asked to."""
        if model.server is server and model.state == "loaded":
            warn(f"{model.name}: its server ended with code {server.ended.result()}: {model.seen.doing}")
            self._unload(model, "its server ended")

    def _unload(self, model: Model, why: str) -> None:
        model.state = "unloading"
        say(f"{model.name}: unloading: {why} ({model.use.num_serving} requests)")
        self._spawn(self._stop(model), f"unload {model.name}")

    async def _stop(self, model: Model) -> None:
        began = time.monotonic()
        assert model.server is not None
        await model.server.stop()
        for number, (_, tokens) in enumerate(model.server.use):
            self.used_by_gone[number] += tokens
        model.server, model.state, model.seen.used_bytes = None, "unloaded", 0
        self._needs.pop(model.name, None)
        self.num_unloads[model.name] += 1
        say(f"{model.name}: unloaded after {time.monotonic() - began:.2f} s")
        self._decide_soon()
        await self._servers.keep(model)

    async def measure(self, model: Model) -> None:
        """Measure the memory of the model's server, and reserve more if it takes more than expected."""
        used = await self._servers.measure(model)
        if used > self._needs.get(model.name, used):
            self._needs[model.name] = used
            self._decide_soon()


def not_loaded(model: Model, retry_after_s: int = 1) -> ApiError:
    return model_not_loaded(f"{model.name}: not loaded: {model.failure.reason}", retry_after_s)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
