"""Which models are loaded, and for whom: leases of those that are, a queue for those that are not.

A request has a *lease* of its model from the moment that it is chosen to the last byte of its answer. Models whose
leases wait for room stand in one queue, the longest waiting first; none passes another. Room is made of what is idle. A
model that is always busy would keep the queue waiting for ever: after `patience_s` it takes no more leases until it had
to go or the queue has moved on.

Invariants: a model with a lease is not unloaded; the needs of all that is loaded, being loaded and being unloaded are
never more than the budget, but for what is measured to take more than was thought; each lease that waits is
given its model, or an error that says why not.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable
from types import TracebackType
from typing import Any, Literal

import msgspec

from minisgl.config import ConfigError, Limits
from minisgl.registry.entries import PROCESSES_BYTES, Entry
from minisgl.registry.needs import Needs
from minisgl.registry.room import Tenant, never_fits, victims
from minisgl.registry.server import Fetch, ModelServer, NotLoaded, Start, fetch
from minisgl.server.core.context import LATEST
from minisgl.server.core.errors import NO_MODEL, ApiError, draining, model_not_loaded, queue_full, wrong
from minisgl.server.core.log import say, warn

State = Literal["unloaded", "loading", "loaded", "unloading"]
MEASURE_S = 1.0
PATIENCE_S = 1.0  # at least: else as long as it took to load the model that is to go
QUIET_S = 60.0  # so long a model was not asked for before a batch has it unloaded
FIRST_WAIT_S = 1.0  # after a load that failed; then twice as long each time
LONGEST_WAIT_S = 60.0


class Model:
    """An entry and what it is now."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.state: State = "unloaded"
        self.server: ModelServer | None = None
        self.waiting: list[Lease] = []
        self.num_serving = 0  # leases
        self.num_lines = 0  # of batches, that it answers in the background
        self.asked_at = -math.inf  # when the last lease of somebody who waits ended
        self.used = 0  # its last lease's place among all
        self.idle_since = 0.0
        self.queued_since = 0.0
        self.measured = 0  # bytes, the most that were seen, now or by a server before this one; 0: never
        self.used_bytes = 0  # of the last look
        self.max_model_len: int | None = None  # known once it was loaded
        self.load_s = 0.0
        self.doing = ""  # what its server said last
        self.was_fetched = False
        self.adapters = dict[str, str]()  # loaded over HTTP, and their folders; "": it is being loaded
        self.failure = ""
        self.num_failures = 0  # in succession
        self.retry_at = 0.0

    @property
    def name(self) -> str:
        return self.entry.name

    def need(self) -> int | None:
        """Raises `ConfigError` if its files are gone."""
        found = self.entry.need()
        return max(found or 0, self.measured) or found

    def use_of(self, number: int) -> tuple[int, int]:
        """Requests of a key that wait at its server, and tokens that the key used there."""
        use = () if self.server is None else self.server.use
        return use[number] if number < len(use) else (0, 0)

    def tenant(self, need: int, *, is_in_use: bool = False) -> Tenant:
        """Lines of batches keep it from nobody who waits."""
        busy = self.state != "loaded" or bool(self.num_serving) or is_in_use
        return Tenant(self.name, need, self.used, self.entry.pin, busy)


class Lease:
    """Use `with`; `server` may be used once `ready` is done."""

    def __init__(self, registry: Registry, model: Model, *, in_background: bool = False) -> None:
        self.model = model
        self.in_background = in_background
        self.ready: asyncio.Future[ModelServer] = asyncio.get_running_loop().create_future()
        self._registry = registry

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._registry.end(self)


class Registry:
    """`budget`: bytes for all models. `load_timeout_s`: that a lease may wait. `start` starts a server, `fetch`
    fetches a model. `needs`: what was seen before."""

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
        self._known = needs or Needs(None)
        for model in self.models.values():
            model.measured = self._known.of(model.entry)
        self.budget = budget
        self.load_timeout_s = load_timeout_s
        self._start, self._fetch = start, fetch
        self._most_waiting = limits.max_queued_requests
        self._names = {
            name: model
            for model in self.models.values()
            for name in (model.name, *model.entry.aliases, *model.entry.adapters)
        }
        self._needs = dict[str, int]()  # of models that take room
        self._queue = list[Model]()
        self._leaving = set[str]()
        self._count = itertools.count(1)
        self._tasks = set[asyncio.Task[None]]()
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = self._is_closed = False
        self._num_preloading = 0
        self.num_loads = dict.fromkeys(self.models, 0)
        self.num_unloads = dict.fromkeys(self.models, 0)
        self.used_by_gone = Counter[int]()  # tokens of keys, by their numbers, at servers that have ended

    # -------------------------------------------------------------------------------------------------- what is asked

    def find(self, name: str) -> Model | None:
        """The exact name first, then one without Ollama's tag and in any case."""
        if (found := self._names.get(name) or self._names.get(name.removesuffix(LATEST))) is not None:
            return found
        plain = name.casefold().removesuffix(LATEST)
        return next((model for known, model in self._names.items() if known.casefold() == plain), None)

    def named(self, name: str) -> Model:
        """Raises `ApiError` 404."""
        if (model := self.find(name)) is not None:
            return model
        raise wrong("model", f"{name[:80]!r} does not exist here: there are {', '.join(self.models)}", *NO_MODEL)

    def find_exactly(self, name: str) -> Model | None:
        return self._names.get(name)

    def name_adapter(self, model: Model, name: str) -> None:
        """One that is loaded over HTTP; nobody has the name."""
        self._names[name] = model
        model.adapters[name] = ""

    def forget_adapter(self, model: Model, name: str) -> None:
        if model.adapters.pop(name, None) is not None:
            del self._names[name]

    @property
    def first(self) -> Model:
        """For requests that name none."""
        return next((one for one in self.models.values() if one.state == "loaded"), next(iter(self.models.values())))

    @property
    def num_waiting(self) -> int:
        return sum(len(model.waiting) for model in self.models.values())

    @property
    def is_ready(self) -> bool:
        """Whether what is to be there from the start has been loaded, or could not be."""
        return not self._num_preloading

    @property
    def set_aside(self) -> int:
        """Bytes of the budget."""
        return sum(self._needs.values())

    def place(self, model: Model) -> int:
        """How many models are to be loaded before it."""
        return self._queue.index(model) if model in self._queue else 0

    def lease(self, model: Model) -> Lease:
        """Raises `ApiError`: it never fits, it failed just now, too many wait."""
        if self._is_closed:
            raise draining()
        lease = Lease(self, model)
        model.used = next(self._count)
        if model.state == "loaded" and model.name not in self._leaving:
            self._give(lease)
            return lease
        self._check_can_be(model)
        if (waiting := self.num_waiting) >= self._most_waiting:
            raise queue_full(f"{waiting} requests wait for models already (--max-queued-requests)")
        model.waiting.append(lease)
        if model.state != "loading" and model not in self._queue:
            model.queued_since = time.monotonic()
            self._queue.append(model)
        self._turn_soon()
        return lease

    def lease_in_background(self, model: Model) -> Lease | None:
        """For a line of a batch; None: not now. Who waits for a model goes first: it takes the room of one that only
        has such leases. Raises `ApiError`: it never fits, it failed just now."""
        if self._is_closed:
            raise draining()
        if model.state == "loaded" and model.name not in self._leaving:
            assert model.server is not None
            lease = Lease(self, model, in_background=True)
            model.num_lines += 1
            lease.ready.set_result(model.server)
            return lease
        self._check_can_be(model)
        if model.state == "unloaded" and not self._queue and not self._is_fetched_first(model):
            quiet = time.monotonic() - QUIET_S
            in_use = [one.name for one in self.models.values() if one.num_lines or one.asked_at > quiet]
            self._take_room(model, self._tenants(in_use))
        return None

    def end(self, lease: Lease) -> None:
        model = lease.model
        model.idle_since = time.monotonic()
        if lease.in_background:
            model.num_lines -= 1
            self._turn_soon()
            return
        model.used, model.asked_at = next(self._count), model.idle_since
        if lease in model.waiting:
            model.waiting.remove(lease)
        elif lease.ready.done() and not lease.ready.cancelled() and lease.ready.exception() is None:
            model.num_serving -= 1
        lease.ready.cancel()
        self._turn_soon()

    async def unload(self, model: Model) -> None:
        """Raises `ApiError` 409: it is in use."""
        num_serving = model.num_serving + model.num_lines
        if num_serving or model.waiting or model.state == "loading":
            what = "being loaded" if model.state == "loading" else f"used by {num_serving} requests"
            raise ApiError(409, f"{model.name}: not unloaded: it is {what}", code="model_busy")
        if model.state == "loaded":
            self._unload(model, "as asked")
        while model.state == "unloading":
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def preload(self) -> None:
        """Load what is to be there from the start; what cannot be is told in the log."""
        for model in self.models.values():
            if model.entry.preload or model.entry.pin:
                self._num_preloading += 1
                self._spawn(self._preload(model))

    async def measure_forever(self) -> None:
        while True:
            await asyncio.sleep(MEASURE_S)
            for model in self.models.values():
                await self._measure(model)

    async def close(self) -> None:
        """End all servers."""
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
            model.state = "unloaded"  # a task that was cancelled before it began has left it as it was

    # ------------------------------------------------------------------------------------------------------ decisions

    def _check_can_be(self, model: Model) -> None:
        if model.failure and (wait_s := model.retry_at - time.monotonic()) > 0:
            raise not_loaded(model, math.ceil(wait_s))
        try:
            need = model.need() or 0
        except ConfigError as error:
            model.failure = str(error)
            raise not_loaded(model) from error
        others = [one.tenant(one.need() or 0) for one in self._pinned() if one is not model]
        if never_fits(self.budget, others, need):
            reason = f"needs {_mib(need)}, and all models may take {_mib(self.budget)} (--memory)"
            beside = f", of which {_mib(sum(one.need for one in others))} are pinned" if others else ""
            raise wrong("model", f"{model.name}: {reason}{beside}", "model_too_large")

    def _pinned(self) -> list[Model]:
        return [model for model in self.models.values() if model.entry.pin]

    def _turn_soon(self) -> None:
        if not self._is_due and not self._is_closed:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Decide what can be decided now. Called after whatever may change a decision."""
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
            elif not model.num_serving:
                self._unload(model, "its room is needed")
        if self._timer is not None:
            self._timer.cancel()
        if (wait_s := min(due)) < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), self._turn)

    def _serve_queue(self, now: float) -> float:
        """Returns after how many seconds it has to be looked at again."""
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
            tenants = self._tenants()
            if self._take_room(head, tenants):
                if head.state == "unloaded":
                    break  # until those that are being unloaded are gone
                self._queue.pop(0)
                continue
            wanted = victims(self.budget, tenants, self._need(head), even_busy=True) or []
            patience_s = max(PATIENCE_S, *(self.models[name].load_s for name in wanted), 0.0)
            if (left_s := head.queued_since + patience_s - now) > 0:
                return left_s
            self._leaving.update(name for name in wanted if self.models[name].state == "loaded")
            break
        self._make_room_for_growth()
        return math.inf

    def _is_fetched_first(self, model: Model) -> bool:
        """Then it is known what it needs."""
        if model.need() is not None or model.was_fetched:
            return False
        model.state = "loading"
        self._spawn(self._get(model))
        return True

    def _need(self, model: Model) -> int:
        """If nobody knows, as much as there can be."""
        need = model.need()
        return self.budget - sum(one.need() or 0 for one in self._pinned()) if need is None else need

    def _take_room(self, model: Model, tenants: list[Tenant]) -> bool:
        """Load it, or unload those in its place. False: they are busy."""
        need = self._need(model)
        if (going := victims(self.budget, tenants, need)) is None:
            return False
        for name in going:
            self._unload(self.models[name], f"{model.name} needs its room")
        if not going and self.set_aside + need <= self.budget:
            self._needs[model.name] = need
            model.state = "loading"
            self._spawn(self._load(model, need, model.entry.need() or need))
        return True

    def _check_now(self, head: Model) -> bool:
        """Whether it can be loaded, now that it is its turn; else those who wait for it know."""
        try:
            self._check_can_be(head)
        except ApiError as error:
            self._refuse(head, error)
            return False
        return True

    def _tenants(self, in_use: Collection[str] = ()) -> list[Tenant]:
        """Those that stay, as far as is known now."""
        staying = [name for name in self._needs if self.models[name].state != "unloading"]
        return [self.models[name].tenant(self._needs[name], is_in_use=name in in_use) for name in staying]

    def _make_room_for_growth(self) -> None:
        """Unload models where others take more than was thought."""
        for name in victims(self.budget, self._tenants(), 0) or ():
            self._unload(self.models[name], "more memory is used than was thought")

    def _end_idle(self, now: float) -> float:
        wait_s = math.inf
        for model in self.models.values():
            ttl_s = model.entry.ttl_s
            if ttl_s is None or model.state != "loaded" or model.num_serving or model.num_lines or model.waiting:
                continue
            if (left_s := model.idle_since + ttl_s - now) <= 0:
                self._unload(model, f"no request for {ttl_s:g} s")
            else:
                wait_s = min(wait_s, left_s)
        return wait_s

    # ------------------------------------------------------------------------------------------------------ their ends

    def _give(self, lease: Lease) -> None:
        assert lease.model.server is not None
        lease.model.num_serving += 1
        lease.ready.set_result(lease.model.server)

    def _admit(self, model: Model) -> None:
        waiting, model.waiting = model.waiting, []
        for lease in waiting:
            self._give(lease)

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

    async def _get(self, model: Model) -> None:
        """Fetch it: then it is known what it needs, and it waits for that first of all."""
        say(f"{model.name}: fetching {model.entry.config.engine.model}")
        model.doing = "fetching"
        try:
            await self._fetch(model.entry.config, lambda line: setattr(model, "doing", line))
        except (NotLoaded, OSError) as error:
            self._failed(model, str(error))
        else:
            model.was_fetched = True
            model.measured = max(model.measured, self._known.of(model.entry))
            self._queue.insert(0, model)
        finally:
            model.state = "unloaded"
            self._turn_soon()

    async def _load(self, model: Model, need: int, given: int) -> None:
        """`given`: its engine's and its processes' share, which does not grow with what was measured."""
        began = time.monotonic()
        model.doing, model.failure = "starting", ""
        config = model.entry.config
        engine = msgspec.structs.replace(
            config.engine,
            memory=max(1, given - PROCESSES_BYTES // 2),
            lora=(*config.engine.lora, *self._adapters_of(model)),
        )
        say(f"{model.name}: loading: {_mib(need)} of {_mib(self.budget)} are set aside for it")
        server: ModelServer | None = None
        try:
            server = await self._start(
                msgspec.structs.replace(config, engine=engine), lambda line: setattr(model, "doing", line)
            )
        except (NotLoaded, OSError) as error:
            self._failed(model, str(error))
            for name in list(model.adapters):  # it must not be kept away by what it is no part of
                warn(f"{model.name}: its adapter {name} is not known any more")
                self.forget_adapter(model, name)
        finally:
            if server is None:
                model.state = "unloaded"
                self._needs.pop(model.name, None)
                self._turn_soon()
        if server is None:
            return
        model.server, model.state, model.num_failures = server, "loaded", 0
        model.load_s, model.max_model_len = time.monotonic() - began, server.max_model_len
        model.idle_since = time.monotonic()
        self.num_loads[model.name] += 1
        server.ended.add_done_callback(lambda _: self._ended(model, server))
        self._admit(model)  # before anything may unload it again
        say(f"{model.name}: loaded after {model.load_s:.2f} s, for {model.num_serving} requests")
        await self._measure(model)
        await asyncio.to_thread(self._known.keep, model.entry, model.measured)
        self._turn_soon()

    def _adapters_of(self, model: Model) -> list[tuple[str, str]]:
        """Those that it had."""
        had = [(name, folder) for name, folder in model.adapters.items() if folder]
        for name, folder in had:
            if not os.path.isdir(folder):
                warn(f"{model.name}: its adapter {name} is not known any more: its folder is gone")
                self.forget_adapter(model, name)
        return [(name, folder) for name, folder in had if name in model.adapters]

    def _failed(self, model: Model, reason: str) -> None:
        model.failure, model.num_failures = reason, model.num_failures + 1
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (model.num_failures - 1))
        model.retry_at = time.monotonic() + wait_s
        warn(f"{model.name}: not loaded: {reason}")
        self._refuse(model, not_loaded(model, math.ceil(wait_s)))

    def _ended(self, model: Model, server: ModelServer) -> None:
        """Its server is gone, asked or not."""
        if model.server is server and model.state == "loaded":
            warn(f"{model.name}: its server ended with code {server.ended.result()}: {model.doing}")
            self._unload(model, "its server ended")

    def _unload(self, model: Model, why: str) -> None:
        model.state = "unloading"
        say(f"{model.name}: unloading: {why} ({model.num_serving} requests)")
        self._spawn(self._stop(model), f"unload {model.name}")

    async def _stop(self, model: Model) -> None:
        began = time.monotonic()
        assert model.server is not None
        await model.server.stop()
        for number, (_, tokens) in enumerate(model.server.use):
            self.used_by_gone[number] += tokens
        model.server, model.state, model.used_bytes = None, "unloaded", 0
        self._needs.pop(model.name, None)
        self.num_unloads[model.name] += 1
        say(f"{model.name}: unloaded after {time.monotonic() - began:.2f} s")
        self._turn_soon()
        await asyncio.to_thread(self._known.keep, model.entry, model.measured)

    async def _measure(self, model: Model) -> None:
        if model.server is None or model.state != "loaded":
            return
        found = await asyncio.to_thread(model.server.used_bytes)
        model.used_bytes, model.measured = found, max(model.measured, found)
        if found > self._needs.get(model.name, found):
            self._needs[model.name] = found
            self._turn_soon()


def not_loaded(model: Model, retry_after_s: int = 1) -> ApiError:
    return model_not_loaded(f"{model.name}: not loaded: {model.failure}", retry_after_s)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
