"""Several engine processes behind a pool (`minisgl._rust.EnginePool`): divides the machine among them (on a CPU threads
and memory, else CUDA devices, in order), starts them, restarts one that has died, and ends them all. Front ends connect
to the pool as if it were one engine process.

Invariants: a single engine gets the configuration unchanged; no device belongs to two engines; no child outlives its
parent, `stop` or the `with` block; no files are left; an engine that dies is restarted as long as another runs, after a
delay that doubles with each successive death; the death of the last one is final.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from minisgl import envs
from minisgl.config import ConfigError, EngineConfig, ServerConfig, most_of
from minisgl.engine.choice import may_use_cuda
from minisgl.extension import NEEDS, _rust, why_missing
from minisgl.message.heartbeat import TIMES
from minisgl.runner.front_end import RULES
from minisgl.runner.launch import AT_ONCE_S, SOCKET, STOP_TIMEOUT_S, EngineProcess, LastWords

if TYPE_CHECKING:  # the extension may be missing
    from minisgl._rust import EnginePool

DEV = Path("/dev")
TOOL = "nvidia-smi"
TOOL_TIMEOUT_S = 20.0


def num_cuda_devices() -> int:
    """Return the number of CUDA devices, by CUDA_VISIBLE_DEVICES, else by `nvidia-smi`, else by device files."""
    if (visible := envs.cuda_visible_devices()) is not None:
        names = [name.strip() for name in visible.split(",")]
        return next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))
    if (tool := shutil.which(TOOL)) is not None:
        try:
            done = subprocess.run([tool, "-L"], check=False, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
            if done.returncode == 0:
                return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
        except (OSError, subprocess.TimeoutExpired):
            pass
    return len(list(DEV.glob("nvidia[0-9]*")))


def _devices(config: EngineConfig) -> int:
    """Return the number of CUDA devices for engines; 0 if they compute on a CPU."""
    if config.engine not in ("auto", "torch") or config.device not in ("auto", "cuda") or any(config.of_cpu_only()):
        return 0
    num_devices = num_cuda_devices()
    return 0 if config.device == "auto" and num_devices < config.num_ranks else num_devices


def with_number(config: ServerConfig) -> ServerConfig:
    """Return the configuration with `dp` as an integer; "auto" becomes the number of engines that the devices allow."""
    if config.dp != "auto":
        return config
    return msgspec.structs.replace(config, dp=max(1, _devices(config.engine) // config.engine.num_ranks))


def shares(config: EngineConfig, number: int) -> tuple[Sequence[EngineConfig], str]:
    """Return the configuration of each of `number` engines, and a log line. Raises `ConfigError`."""
    if number == 1:
        return [config], ""
    if config.engine in ("echo", "sim"):
        return [config] * number, f"{number} engines"
    if devices := _devices(config):
        tp = config.num_ranks
        if number * tp > devices:
            raise ConfigError(
                f"--dp {number}: needs {number * tp} CUDA devices ({tp} each), there are {devices}: "
                f"choose at most --dp {devices // tp}, or --device cpu"
            )
        firsts = range(0, number * tp, tp)
        dealt = [msgspec.structs.replace(config, device=f"cuda:{first}") for first in firsts]
        return dealt, f"{number} engines, from {', '.join(one.device for one in dealt)} on, {tp} devices each"
    from minisgl.engine.pool_size import MEMORY_RATIO

    threads = config.num_threads or len(os.sched_getaffinity(0))
    ratio = MEMORY_RATIO if config.memory_ratio is None else config.memory_ratio
    one = msgspec.structs.replace(config, num_threads=max(1, threads // number), memory_ratio=ratio / number)
    pool = f"{ratio / number:.3g} of the free memory" if config.num_pages is None else f"{config.num_pages} pages"
    if config.memory is not None:
        one = msgspec.structs.replace(one, memory=config.memory // number, memory_ratio=config.memory_ratio)
        pool = f"{one.memory} bytes"
    return [one] * number, f"{number} engines, {one.num_threads} of {threads} threads and {pool} for each"


FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 10.0
NEED = "--dp, --max-inflight, --api-key-file"
LEAST_ROWS = 8
"""Rows below which no row is reserved for other keys."""
STEADY_S = 30.0  # readiness after which the delay is reset


def pool_class() -> Callable[[str], EnginePool]:
    """Return the extension's `EnginePool` class. Raises `ConfigError` if it is missing."""
    if why := why_missing():
        raise ConfigError(f"{NEED}: the pool of engines {NEEDS}: {why}")
    pool: Callable[[str], EnginePool] | None = getattr(_rust, "EnginePool", None)
    if pool is None:
        raise ConfigError(f"{NEED}: the extension was built without the engine pool: rebuild it")
    return pool


EVERY_POOL = {"watch": TIMES, "front_ends": RULES}
"""Fields of the pool's configuration that are always the same."""


def pool_config(config: ServerConfig, listen: str, engines: Iterable[str]) -> str:
    """Return the pool's configuration as JSON. `router` has the fields of `routing.api.RouterConfig`."""
    sockets = list(engines)
    router = {
        "policy": config.routing,
        "num_engines": len(sockets),
        "page_size": config.engine.page_size,
        "max_inflight": config.max_inflight or 0,
        "max_inflight_per_engine": _inflight_per_engine(config),
        "keys": [
            {"share": key.share, "max_inflight": key.max_inflight or _inflight_per_key(config, len(sockets))}
            for key in config.api_keys
        ],
    }
    settings = {"listen": listen, "engines": sockets, "router": router, "step_timeout": config.limits.step_timeout}
    return msgspec.json.encode({**settings, **EVERY_POOL}).decode()


def _inflight_per_engine(config: ServerConfig) -> int:
    """Return the limit of requests per engine, 0 for none. API keys need one: shares concern waiting requests."""
    if config.max_inflight_per_engine is not None or not config.api_keys:
        return config.max_inflight_per_engine or 0
    return 2 * _rows(config)


def _inflight_per_key(config: ServerConfig, num_engines: int) -> int:
    """Return the default limit of running requests per API key: all rows but a sixteenth, which stays free for other
    keys, since an engine never takes a row back. 0 (no limit) if there is no other key, or too few rows."""
    rows = min(_rows(config) * num_engines, config.max_inflight or sys.maxsize)
    num_owners = len(config.api_keys) + (config.api_key is not None)
    return 0 if num_owners < 2 or rows < LEAST_ROWS else most_of(rows)


def _rows(config: ServerConfig) -> int:
    return config.engine.rows_on("cuda" if may_use_cuda(config.engine) else "cpu")


@dataclass(slots=True)
class Backoff:
    """Delay before an engine is restarted. It doubles with each death, and is reset after `STEADY_S` of readiness."""

    wait_s: float = FIRST_WAIT_S
    ready_since: float | None = None

    def after_death(self, now: float) -> float:
        if self.ready_since is not None and now - self.ready_since >= STEADY_S:
            self.wait_s = FIRST_WAIT_S
        self.ready_since = None
        wait_s, self.wait_s = self.wait_s, min(2 * self.wait_s, LONGEST_WAIT_S)
        return wait_s


class EngineProcesses:
    """Several engine processes and their pool, with the methods of `EngineProcess` that `serving` uses."""

    def __init__(
        self,
        make: Callable[[int], EngineProcess],
        number: int,
        folder: Path,
        make_pool: Callable[[Iterable[str]], EnginePool],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._make = make
        self._make_pool = make_pool
        self._clock = clock
        self._sleep = sleep
        self._children = [make(engine) for engine in range(number)]
        self._backoffs = [Backoff() for _ in range(number)]
        self._ready = [False] * number
        self._keepers: list[asyncio.Task[None]] = []
        self.pool: EnginePool | None = None
        self.folder = folder
        self.address = f"ipc://{folder / SOCKET}"

    @classmethod
    def create(cls, config: ServerConfig) -> EngineProcesses:
        """Prepare the engines of a server's configuration, without starting them. Raises `ConfigError`."""
        assert config.dp != "auto"
        make_pool = pool_class()
        shared, line = shares(config.engine, config.dp)
        configs = list(shared)
        folder = Path(tempfile.mkdtemp(prefix="minisgl-"))

        def make(engine: int) -> EngineProcess:
            made = _engine(configs[engine], folder, config.limits.step_timeout, engine)
            # a restarted engine already has the files' pages
            configs[engine] = msgspec.structs.replace(configs[engine], warm_prefixes=())
            return made

        processes = cls(
            make,
            config.dp,
            folder,
            lambda sockets: make_pool(pool_config(config, str(folder / SOCKET), sockets)),
        )
        processes.line = f"{line}, routing {config.routing}" if line else ""
        processes.routing = config.routing
        return processes

    line = ""
    """Line for the log at the start."""
    routing = ""
    """The policy by which the pool chooses an engine (`--routing`)."""

    @property
    def socket(self) -> str:
        return str(self.folder / SOCKET)

    def readings(self) -> Mapping[str, Any]:
        """Return the pool's counters and the routing policy."""
        assert self.pool is not None
        return {"routing": self.routing, **self.pool.readings()}

    @property
    def number(self) -> int:
        return len(self._children)

    @property
    def last_words(self) -> LastWords | None:
        """Reason why the first of the engines ended that could write one; `None` if none could."""
        for engine, child in enumerate(self._children):
            if (words := child.last_words) is not None:
                return words if words.is_setting else LastWords(f"engine {engine}: {words.text}")
        return None

    def start(self) -> None:
        for child in self._children:
            child.start()

    def open(self) -> None:
        """Create the pool when a front end is about to connect: a failed engine waits for one to report why."""
        self.pool = self._make_pool(child.socket for child in self._children)

    # ------------------------------------------------------------------------------------------------------ their life

    async def wait(self) -> int:
        """Wait until an engine dies for good; return its exit code. Never returns after `keep`."""
        if self._keepers:
            await asyncio.Event().wait()
        ends = [asyncio.ensure_future(child.wait()) for child in self._children]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(end.result() for end in ends if end in done)
        finally:
            for end in ends:
                end.cancel()

    def heard(self, engine: int, state: str) -> None:
        """Handle an engine's state as reported by the pool (`EngineState`). A "silent" engine is killed."""
        self._ready[engine] = state == "ready"
        if state == "ready":
            self._backoffs[engine].ready_since = self._clock()
            if self.pool is not None and not self._children[engine].has_ended:
                self.pool.restarting(engine, False)
        elif state == "silent":
            self._children[engine].kill()

    def keep(self, say: Callable[[str], None]) -> None:
        """Restart engines that die from now on. Call it once all are ready."""
        now = self._clock()
        for backoff in self._backoffs:
            backoff.ready_since = now
        self._ready = [True] * self.number
        self._keepers = [asyncio.create_task(self._keep(engine, say)) for engine in range(self.number)]

    async def _keep(self, engine: int, say: Callable[[str], None]) -> None:
        while True:
            code = await self._children[engine].wait()
            self._ready[engine] = False
            why = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            assert self.pool is not None
            if all(child.has_ended for child in self._children):
                for each in range(self.number):
                    self.pool.restarting(each, False)
                return
            self.pool.restarting(engine, True)
            wait_s = self._backoffs[engine].after_death(self._clock())
            say(f"engine {engine} {why}: restarting it in {wait_s:g} s")
            await self._sleep(wait_s)
            if all(child.has_ended for child in self._children):
                return
            child = self._make(engine)
            with contextlib.suppress(FileNotFoundError):
                Path(child.socket).unlink()  # left by the dead engine; it would block the new one
            self._children[engine] = child
            child.start()

    def leave(self) -> None:
        """Stop restarting engines. Idempotent."""
        for keeper in self._keepers:
            keeper.cancel()

    async def stop(self, *, at_once: bool = False) -> None:
        """Wait for the children, which have received a `Shutdown` (a short time with `at_once`), then kill them and
        remove the sockets. A child that is still starting is killed at once."""
        self.leave()
        try:
            for engine, child in enumerate(self._children):
                if self._keepers and not self._ready[engine]:
                    child.kill()
            timeout_s = AT_ONCE_S if at_once else STOP_TIMEOUT_S
            await asyncio.gather(*(child.end(timeout_s) for child in self._children))
            if self.pool is not None:
                await asyncio.to_thread(self.pool.stop)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> EngineProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the children and remove the sockets, if `stop` was not called."""
        for child in self._children:
            child.kill()
        if self.pool is not None:
            self.pool.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _engine(config: EngineConfig, folder: Path, step_timeout: float, engine: int) -> EngineProcess:
    return EngineProcess(config, folder, step_timeout, f"{SOCKET}-{engine}")
