"""The engine process: `python -m minisgl.runner.process`, started by `runner.launch`.

It reads a `ProcessConfig` as one JSON line from stdin, loads, and runs the step loop until a `Shutdown` comes or stdin
closes, which means that the parent is gone.

Keeps true: exit code 0 only after `Shutdown`; any other end sends `EngineFailed` with the reason first.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from minisgl.config import ConfigError
from minisgl.engine.api import Engine
from minisgl.heartbeat import Activity, HeartbeatThread
from minisgl.message import (
    Codec,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    Heartbeat,
    LoadProgress,
    MeasuredCodec,
    Narration,
    RankUsage,
    ToEngine,
    encode,
)
from minisgl.metrics.meters import GcWatch, cpu_seconds, resident_bytes
from minisgl.metrics.steps import step_timers
from minisgl.runner.build import build_engine, build_fallback, choose_control_plane
from minisgl.runner.loop import StepLoop
from minisgl.runner.process_config import ProcessConfig
from minisgl.scheduler.backend import Chosen

STATS_INTERVAL_S = 0.1
LINGER_MS = 1000
LAST_WORDS_MS = 20_000  # of a process that could not start: the HTTP process may still be starting
# Steps that may be on their way to the HTTP process. If it cannot follow, the engine waits: a queue would only grow,
# and the first token of a new request would stand at its end.
MAX_QUEUED_FRAMES = 2
SEND_BUFFER_BYTES = 4096
CONNECT_MS = 5  # between two attempts: the HTTP process may bind its sockets later


@contextlib.contextmanager
def heartbeat_sender(context: zmq.Context[zmq.Socket[bytes]], address: str) -> Iterator[Callable[[Heartbeat], None]]:
    with context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        yield lambda beat: socket.send(encode([beat]))


class ParentGone(Exception):
    """stdin was closed."""


class Link:
    """The two sockets to the HTTP process, and its lifeline (stdin)."""

    def __init__(self, config: ProcessConfig) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.setsockopt(zmq.RECONNECT_IVL, CONNECT_MS)
        self._inbox.connect(config.to_engine)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
        self._outbox.setsockopt(zmq.SNDBUF, SEND_BUFFER_BYTES)
        self._outbox.setsockopt(zmq.RECONNECT_IVL, CONNECT_MS)
        self._outbox.connect(config.from_engine)
        self.timers = step_timers(config.engine.debug.profile_steps, lambda text: self.send([LoadProgress(text)]))
        self._codec = Codec()
        if config.engine.debug.transport_stats:
            meters = self.timers.meters
            self._codec = MeasuredCodec(meters["encode"], meters["decode"], meters["queue"])
        self.activity = Activity()
        self._heartbeat = HeartbeatThread(self.activity.heartbeat, heartbeat_sender(self._context, config.from_engine))
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self._full = zmq.Poller()
        self._full.register(self._outbox, zmq.POLLOUT)
        self._full.register(sys.stdin.fileno(), zmq.POLLIN)

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Waits while the HTTP process cannot follow. Raises `ParentGone`."""
        frame = self._codec.encode(messages)
        while True:
            try:
                self._outbox.send(frame, zmq.NOBLOCK)
                return
            except zmq.Again:
                ready = dict(self._full.poll())
                self._check_parent(ready)

    def narrate(self, lines: Sequence[str]) -> None:
        self.send([Narration(tuple(lines))])

    def _check_parent(self, ready: Mapping[Any, int]) -> None:
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
            raise ParentGone

    def receive(self, *, block: bool) -> list[ToEngine]:
        """Every message that is there; with `block`, wait for the first. Raises `ParentGone`."""
        timers = self.timers
        if block:
            self.activity.enter("idle")
            timers.rest()
        ready = dict(self._poller.poll(None if block else 0))
        if block:
            timers.awake(timers.idle)
        self.activity.enter("working")
        self._check_parent(ready)
        messages: list[ToEngine] = []
        while True:
            try:
                messages.extend(self._codec.decode_to_engine(self._inbox.recv(zmq.NOBLOCK)))
            except zmq.Again:
                timers.lap(timers.receive)
                return messages

    def close(self, linger_ms: int) -> None:
        """Wait so long for what is not sent yet."""
        self._outbox.setsockopt(zmq.LINGER, linger_ms)
        self._heartbeat.close()
        self._inbox.close()
        self._outbox.close()
        self._context.term()


def serve(config: ProcessConfig, link: Link) -> None:
    engine = build_engine(
        config.engine,
        lambda *report: link.send([LoadProgress(*report)]),
        folder=config.folder,
        on_rank_death=lambda reason: _end_at_once(config, reason),
        step_timeout=config.step_timeout,
    )
    try:
        chosen = choose_control_plane(
            config.engine, engine.info, lambda line: link.send([LoadProgress(line)]), link.narrate
        )
        if chosen.fallback:
            link.send([LoadProgress(f"scheduler: python serves instead of rust_hotpath: {chosen.fallback}")])
        link.activity.enter("working")
        link.send([_ready(engine, chosen)])
        gc.collect()
        gc.freeze()  # what is loaded now lives as long as the process: collections need not visit it
        loop = StepLoop(
            chosen.control_plane,
            engine,
            link.send,
            overlap=config.engine.overlap,
            activity=link.activity,
            fallback=lambda: build_fallback(config.engine, engine.info, link.narrate),
            timers=link.timers,
        )
        collections = GcWatch(link.timers.meters["gc"])
        collections.start()
        _run(loop, chosen, engine, link)
        collections.stop()
    finally:
        link.timers.close()
        engine.close()


def _run(loop: StepLoop, chosen: Chosen, engine: Engine, link: Link) -> None:
    last_sent = 0.0
    loop.timers.begin()
    while not loop.shutdown:
        if idle := loop.idle:
            link.send([_stats(loop, chosen, engine)])
        failovers = loop.num_failovers
        loop.step(link.receive(block=idle))
        if loop.num_failovers > failovers:
            link.send([LoadProgress(f"scheduler: python serves from now on: {loop.failover_reason}")])
        now = time.monotonic()
        if now - last_sent >= STATS_INTERVAL_S:
            last_sent = now
            link.send([_stats(loop, chosen, engine)])
    loop.drain()


def _ready(engine: Engine, chosen: Chosen) -> EngineReady:
    info = engine.info
    return EngineReady(
        engine=info.name,
        model_dir=info.model_dir,
        vocab_size=info.vocab_size,
        max_seq_len=chosen.control_plane.buffers.limits.max_seq_len,
        eos_ids=info.eos_ids,
        num_pages=info.num_pages,
        page_size=info.page_size,
        device=info.device,
        dtype=info.dtype,
        cpu_backend=chosen.name,
        cpu_backend_fallback=chosen.fallback,
        simulated=info.simulated,
        engine_details=info.details,
    )


def _stats(loop: StepLoop, chosen: Chosen, engine: Engine) -> EngineStats:
    control_plane = loop.control_plane
    stats = control_plane.stats()
    timers = loop.timers
    usage: Callable[[], Iterable[RankUsage]] = getattr(engine, "usage", tuple)  # of a `RankEngine`
    return EngineStats(
        num_waiting=stats.num_waiting,
        num_running=stats.num_running,
        num_pages=control_plane.buffers.limits.num_pages,
        num_free_pages=stats.num_free_pages,
        num_evictable_pages=stats.num_evictable_pages,
        num_protected_pages=stats.num_protected_pages,
        num_held_pages=stats.num_held_pages,
        num_retracted_total=stats.num_retracted_total,
        num_prompt_tokens_total=stats.num_prompt_tokens_total,
        num_cached_tokens_total=stats.num_cached_tokens_total,
        num_steps_total=loop.num_steps,
        cpu_backend="python" if loop.num_failovers else chosen.name,
        num_control_plane_calls_total=2 * loop.num_steps,
        num_failovers_total=loop.num_failovers,
        failover_reason=loop.failover_reason,
        num_rows_total=timers.num_rows,
        num_step_tokens_total=timers.num_tokens,
        batch_rows=timers.last_rows,
        cpu_s=cpu_seconds(),
        resident_bytes=resident_bytes(),
        meters=timers.meters.readings(),
        ranks=tuple(usage()),
    )


def _end_at_once(config: ProcessConfig, reason: str) -> None:
    """Called in a thread, because the loop may wait for ever."""
    context = zmq.Context()
    outbox = context.socket(zmq.PUSH)
    outbox.connect(config.from_engine)
    outbox.send(encode([EngineFailed(reason)]))
    context.destroy(LINGER_MS)
    os._exit(1)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()  # unbuffered: the poller must see what follows the line
    config = msgspec.json.decode(line, type=ProcessConfig)
    link = Link(config)
    linger_ms = LINGER_MS
    try:
        serve(config, link)
    except ParentGone:
        return 1
    except BaseException as error:  # the last words of a process that ends either way
        expected = isinstance(error, ConfigError)
        if not expected:
            traceback.print_exc()
        link.send([EngineFailed(str(error) if expected else f"{type(error).__name__}: {error}")])
        linger_ms = LAST_WORDS_MS
        return 1
    finally:
        link.close(linger_ms)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's own exit handlers may wait for threads that nobody needs any more
