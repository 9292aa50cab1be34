"""The engine process: `python -m minisgl.runner.process`, started by `runner.launch`. It reads a `ProcessConfig` as one
JSON line from stdin, loads, and runs the step loop until a `Shutdown` arrives or stdin closes, which means that the
parent has ended.

Invariants: exit code 0 only after `Shutdown`; any other end first sends `EngineFailed` with the reason.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path

import msgspec

from minisgl.config import ConfigError
from minisgl.engine.api import Engine, EngineInfo, Sees, Stores
from minisgl.message import (
    SHADOW_RESULTS,
    EngineReady,
    EngineStats,
    Heartbeat,
    LoadProgress,
    Narration,
    RankUsage,
    ToEngine,
)
from minisgl.message.codec import Codec, MeasuredCodec
from minisgl.message.heartbeat import Activity, HeartbeatThread
from minisgl.metrics.meters import GcWatch, cpu_seconds, resident_bytes
from minisgl.metrics.steps import step_timers
from minisgl.runner.build import (
    build_compiler,
    build_engines,
    build_fallback,
    build_step_time,
    choose_control_plane,
)
from minisgl.runner.front_ends import FrontEnds, ParentGone
from minisgl.runner.intake import Beside, LoopSettings
from minisgl.runner.launch import LastWords, ProcessConfig, RankDied, end_with, last_words_file
from minisgl.runner.loop import StepLoop, Timing
from minisgl.scheduler.api import Stats, backend_of, part_failures
from minisgl.scheduler.backend import ChosenScheduler

STATS_INTERVAL_S = 0.1
LINGER_MS = 1000
LAST_WORDS_MS = 20_000  # wait for the HTTP process, which may still be starting
_OF_ENGINE = frozenset(EngineReady.__struct_fields__) & {one.name for one in fields(EngineInfo)}
_OF_SCHEDULER = frozenset(EngineStats.__struct_fields__) & {one.name for one in fields(Stats)}


class Link:
    """Connection to the front ends, with the loop's timers and heartbeats."""

    def __init__(self, config: ProcessConfig) -> None:
        self.timers = step_timers(config.engine.debug.profile_steps, lambda text: self.send([LoadProgress(text)]))
        codec = Codec()
        if config.engine.debug.transport_stats:
            meters = self.timers.meters
            codec = MeasuredCodec(meters["encode"].add, meters["decode"].add, meters["queue"].add)
        self.activity = Activity()
        self._front_ends = FrontEnds(config.socket_path, codec, sys.stdin.fileno(), self.activity)
        self.send = self._front_ends.send
        self.wake = self._front_ends.wake
        self.last_words = self._front_ends.last_words
        self.has_news: Callable[[], bool] = lambda: False  # whether store counters changed; called in another thread
        self._heartbeat = HeartbeatThread(self._beat, contextlib.nullcontext(self._front_ends.beat))

    def _beat(self) -> Heartbeat:
        if self.has_news():
            self.wake()  # an idle loop sends its statistics again
        return self.activity.heartbeat()

    def narrate(self, lines: Sequence[str]) -> None:
        self.send([Narration(tuple(lines))])

    def receive(self, *, block: bool) -> list[ToEngine]:
        """Receive messages, and measure the time spent idle: see `FrontEnds.receive`."""
        timers = self.timers
        if block:
            self.activity.enter("idle")
            timers.rest()
        messages = self._front_ends.receive(block=block)
        if block:
            timers.awake(timers.idle)
        self.activity.enter("working")
        timers.lap(timers.receive)
        return messages

    def rest(self, seconds: float) -> None:
        """Sleep on purpose (for tests with slow steps), counted as idle time."""
        self.activity.enter("idle")
        self.timers.rest()
        time.sleep(seconds)
        self.timers.awake(self.timers.idle)
        self.activity.enter("working")

    def close(self) -> None:
        self._front_ends.flush(LINGER_MS)
        self._heartbeat.close()
        self._front_ends.close()


def serve(config: ProcessConfig, link: Link) -> None:
    engine, guesses = build_engines(
        config.engine,
        lambda *report: link.send([LoadProgress(*report)]),
        folder=_ranks_folder(config),
        on_rank_death=lambda reason: _end_at_once(config, link, reason),
        step_timeout=config.step_timeout,
    )
    compiler = build_compiler(engine.info, link.wake)
    try:
        chosen = choose_control_plane(
            config.engine, engine.info, lambda line: link.send([LoadProgress(line)]), link.narrate
        )
        if chosen.fallback:
            link.send([LoadProgress(f"scheduler: python serves instead of rust_hotpath: {chosen.fallback}")])
        link.activity.enter("working")
        link.send([_ready(engine, chosen)])
        gc.collect()
        gc.freeze()  # garbage collections need not visit the loaded objects, which stay
        loop = StepLoop(
            chosen.control_plane,
            engine,
            link.send,
            LoopSettings.of(config.engine),
            timing=Timing(link.activity, link.timers, build_step_time(config.engine, engine.info, serves=True)),
            beside=Beside(compiler, link.wake, guesses),
            fallback=lambda: build_fallback(config.engine, engine.info, link.narrate),
        )
        collections = GcWatch(link.timers.meters["gc"])
        collections.start()
        _run(config, loop, chosen, engine, link)
        collections.stop()
        loop.close()
        if chosen.shadow is not None:  # the front ends have disconnected: print it here
            print(chosen.shadow.line(), file=sys.stderr, flush=True)
    finally:
        link.timers.close()
        if compiler is not None:
            compiler.close()
        if guesses is not None:
            guesses.close()
        engine.close()


def _ranks_folder(config: ProcessConfig) -> Path:
    """Return an empty folder for the ranks: files of a killed earlier process are removed."""
    folder = config.ranks_folder
    if folder != config.folder and config.engine.num_ranks > 1:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    return folder


def _run(config: ProcessConfig, loop: StepLoop, chosen: ChosenScheduler, engine: Engine, link: Link) -> None:
    last_sent, last_stats = 0.0, _stats(loop, chosen, engine)
    link.has_news = lambda: any(getattr(last_stats, name) != now for name, now in _store_counts(engine).items())
    delay = None if config.engine.debug.step_delay_file is None else Path(config.engine.debug.step_delay_file)
    loop.timers.begin()
    while not loop.shutdown:
        if idle := loop.is_resting:
            link.send([last_stats := _stats(loop, chosen, engine)])
        failovers = loop.num_failovers
        loop.step(link.receive(block=idle))
        if loop.num_failovers > failovers:
            backend, why = backend_of(loop.control_plane), failover_reason(loop)
            link.send([LoadProgress(f"warning: scheduler: {backend} serves from now on: {why}")])
        if delay is not None and loop.timers.last_rows:
            link.rest(_milliseconds(delay) / 1000)
        now = time.monotonic()
        if now - last_sent >= STATS_INTERVAL_S:
            last_sent = now
            link.send([last_stats := _stats(loop, chosen, engine)])
    link.has_news = lambda: False
    loop.drain()


def _milliseconds(file: Path) -> int:
    """Return the integer in `file`; 0 if it cannot be read."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def _ready(engine: Engine, chosen: ChosenScheduler) -> EngineReady:
    info = engine.info
    return EngineReady(
        engine=info.name,
        max_seq_len=chosen.control_plane.buffers.limits.max_seq_len,
        cpu_backend=chosen.name,
        cpu_backend_fallback=chosen.fallback,
        engine_details=info.details,
        **{name: getattr(info, name) for name in _OF_ENGINE},
    )


def failover_reason(loop: StepLoop) -> str:
    """Return the last error of the scheduler, or of a part of it; empty if none failed."""
    of_parts = [f"part {part}: {reason}" for part, reason in part_failures(loop.control_plane).items()]
    return of_parts[-1] if of_parts else loop.failover_reason


def _stats(loop: StepLoop, chosen: ChosenScheduler, engine: Engine) -> EngineStats:
    control_plane = loop.control_plane
    stats = control_plane.stats()
    timers = loop.timers
    usage: Callable[[], Iterable[RankUsage]] = getattr(engine, "usage", tuple)  # defined by `RankEngine` only
    of_scheduler = {name: getattr(stats, name) for name in _OF_SCHEDULER}
    admitted = loop.admitted
    of_admitted = {
        "num_prompt_tokens_total": admitted.num_prompt_tokens,
        "num_cached_tokens_total": admitted.num_cached_tokens,
        "num_hits_total": admitted.num_hits,
        "num_misses_total": admitted.num_misses,
    }
    return EngineStats(
        num_pages=control_plane.buffers.limits.num_pages,
        num_steps_total=loop.num_steps,
        cpu_backend=backend_of(loop.control_plane) if loop.num_failovers else chosen.name,
        num_control_plane_calls_total=2 * loop.num_steps,
        num_failovers_total=loop.num_failovers,
        failover_reason=failover_reason(loop),
        failovers=tuple(loop.failovers),
        num_rows_total=timers.num_rows,
        num_step_tokens_total=timers.num_tokens,
        batch_rows=timers.last_rows,
        cpu_s=cpu_seconds(),
        resident_bytes=resident_bytes(),
        meters=timers.meters.readings(),
        ranks=tuple(usage()),
        **{**of_scheduler, **of_admitted, **_store_counts(engine), **_image_counts(engine), **_shadow_counts(chosen)},
        prefixes=loop.prefixes.states(),
    )


def _shadow_counts(chosen: ChosenScheduler) -> dict[str, int]:
    if chosen.shadow is None:
        return {}
    return {f"num_shadow_{name}_total": getattr(chosen.shadow, f"num_{name}") for name in SHADOW_RESULTS}


def _store_counts(engine: Engine) -> dict[str, int]:
    if not isinstance(engine, Stores) or (counts := engine.store_counts()) is None:
        return {}
    return {
        "store_bytes": counts.num_bytes,
        "num_store_written_total": counts.num_written,
        "num_store_loaded_total": counts.num_loaded,
        "num_store_dropped_total": counts.num_dropped,
        "num_store_failed_total": counts.num_failed,
        "num_store_damaged_total": counts.num_damaged,
        "num_store_written_states_total": counts.num_written_states,
        "num_store_loaded_states_total": counts.num_loaded_states,
    }


def _image_counts(engine: Engine) -> dict[str, int]:
    if not isinstance(engine, Sees):
        return {}
    counts = engine.image_counts()
    return {
        "num_tower_runs_total": counts.num_runs,
        "num_tower_hits_total": counts.num_hits,
        "image_bytes": counts.num_bytes,
    }


def _last_words(config: ProcessConfig, link: Link, reason: str, *, is_setting: bool = False) -> None:
    reason = reason.encode(errors="replace").decode()
    with contextlib.suppress(OSError):
        words = msgspec.json.encode(LastWords(reason, is_setting))
        last_words_file(config.socket_path).write_bytes(words)
    link.last_words(reason, LINGER_MS, LAST_WORDS_MS)


def _end_at_once(config: ProcessConfig, link: Link, reason: str) -> None:
    """Report the reason and exit with code 1. Runs in a thread of its own, because the loop may be stuck."""
    try:
        _last_words(config, link, reason)
    finally:
        os._exit(1)


def import_engine() -> None:
    """Import the CPU engine ahead of time, since most servers use it."""
    from minisgl.engine import cpu_engine  # noqa: F401


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()  # unbuffered: the poller must see what follows the line
    if not line:
        return 1  # the parent has ended
    config = msgspec.json.decode(line, type=ProcessConfig)
    link = Link(config)
    try:
        serve(config, link)
    except ParentGone:  # the parent was killed: remove its files
        shutil.rmtree(config.folder, ignore_errors=True)
        return 1
    except BaseException as error:  # the process ends anyway: report the reason
        if isinstance(error, MemoryError):
            error = ConfigError(f"out of memory: {error}: lower --num-pages, --memory-ratio or --max-seq-len")
        expected = isinstance(error, ConfigError | RankDied)
        if not expected:
            traceback.print_exc()
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        _last_words(config, link, reason, is_setting=isinstance(error, ConfigError))
        return 1
    finally:
        link.close()
    return 0


if __name__ == "__main__":
    end_with(main)  # skips torch's exit handlers, which may wait for unneeded threads
