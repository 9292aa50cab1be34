"""The process of a tensor-parallel rank above 0: `python -m minisgl.runner.worker`, started by `runner.ranks`. It reads
a `RankConfig` as one JSON line from stdin, loads its shard, and runs the steps that rank 0 sends until a `Stop` arrives
or stdin closes, which means that rank 0 has ended. It neither schedules nor samples.

Invariants: steps are launched in order, each when no more are in flight than on rank 0, so that a ring entry is not
written while it is read, and a reset comes at the same point as on rank 0; a failed step is noticed even if no other
follows; exit code 0 only after `Stop`; any other end first writes the reason to stdout, if it can.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from minisgl.config import ConfigError
from minisgl.distributed import GroupError
from minisgl.engine.adapters import Adapts
from minisgl.engine.api import Engine, EngineStepError, StepHandle
from minisgl.message import EngineFailed, Heartbeat
from minisgl.message.heartbeat import Activity, HeartbeatThread
from minisgl.metrics.meters import cpu_seconds, resident_bytes
from minisgl.runner.build import build_rank, join_group
from minisgl.runner.launch import end_with
from minisgl.runner.rank_messages import (
    FromRank,
    RankAdapter,
    RankConfig,
    RankReady,
    RankStep,
    Stop,
    ToRank,
    decode,
    make_buffers,
    unpack,
)
from minisgl.step import StepBuffers

GRACE_S = 10.0
LOOK_EVERY_S = 0.05  # interval of checks of the step in flight, while no other arrives
Jobs = queue.SimpleQueue[ToRank]


def run(config: RankConfig, send: Callable[[FromRank], None]) -> None:
    """Load the rank and run steps until `Stop`. Raises the error of loading or of a dead engine."""
    group = join_group(config.engine, config.rank, Path(config.rendezvous))
    engine = build_rank(config.engine, group, lambda *report: None)
    context = zmq.Context()
    inbox, acks = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.setsockopt(zmq.RCVHWM, 0)
    inbox.connect(config.steps)
    acks.connect(config.acks)
    jobs: Jobs = queue.SimpleQueue()
    activity = Activity()
    threading.Thread(target=_receive, args=(inbox, jobs), name="rank-receive", daemon=True).start()
    HeartbeatThread(lambda: heartbeat(activity), contextlib.nullcontext(send))
    send(RankReady())
    work(engine, jobs, lambda step: acks.send(step.to_bytes(8, "little")), activity)
    engine.close()
    group.close()


def work(engine: Engine, jobs: Jobs, launched: Callable[[int], None], activity: Activity) -> None:
    """Run jobs until `Stop`. Calls `launched` with each step whose ring entry is free. Raises a dead engine's error."""
    buffers: StepBuffers | None = None
    in_flight: deque[tuple[int, StepHandle]] = deque()

    def finish() -> None:
        with contextlib.suppress(EngineStepError):  # all ranks have it; rank 0 reports it
            in_flight[0][1].wait()
        in_flight.popleft()
        if in_flight:
            activity.enter("forward", in_flight[0][0])
        else:
            activity.enter("idle")

    while True:
        try:
            job = jobs.get(timeout=LOOK_EVERY_S if in_flight else None)
        except queue.Empty:
            job = None
        if isinstance(job, RankStep):
            while len(in_flight) > job.in_flight:
                finish()
            if not in_flight:
                activity.enter("forward", job.step)
            assert buffers is not None
            plan, assignments = unpack(job, buffers)
            in_flight.append((job.step, engine.launch(plan, buffers, assignments)))
            launched(plan.step)
        elif isinstance(job, RankAdapter):
            _change_adapter(engine, job)
        elif isinstance(job, Stop):
            break
        elif job is not None:
            buffers = make_buffers(job)
        while in_flight and in_flight[0][1].done():
            finish()
    while in_flight:
        finish()


def _change_adapter(engine: Engine, job: RankAdapter) -> None:
    """Load or unload an adapter. Rank 0 has just read it from the same folder, so it is valid."""
    assert isinstance(engine, Adapts)
    if job.folder is None:
        engine.remove_adapter(job.number)
    else:
        engine.add_adapter(job.number, engine.read_adapter(job.folder))


def _receive(inbox: zmq.Socket[bytes], jobs: Jobs) -> None:
    """Receive and decode jobs while the previous step runs. Ends the process on any error."""
    try:
        while True:
            jobs.put(decode(inbox.recv()))
    except BaseException:  # without this thread all ranks would wait forever
        traceback.print_exc()
        os._exit(1)


def heartbeat(activity: Activity) -> Heartbeat:
    return msgspec.structs.replace(activity.heartbeat(), cpu_s=cpu_seconds(), resident_bytes=resident_bytes())


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0's parent decides
    stdout = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not reach rank 0 as a message
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        config = msgspec.json.decode(stdin.readline(), type=RankConfig)
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    one_at_a_time = threading.Lock()

    def send(message: FromRank) -> None:
        with one_at_a_time:
            os.write(stdout, msgspec.json.encode(message) + b"\n")

    try:
        run(config, send)
    except GroupError as error:
        time.sleep(GRACE_S)  # a peer has ended: rank 0 reports it and ends this process
        send(EngineFailed(str(error)))
        return 1
    except BaseException as error:  # the process ends anyway: report the reason
        expected = isinstance(error, ConfigError)
        if not expected:
            traceback.print_exc()
        send(EngineFailed(str(error) if expected else f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    end_with(main)  # skips torch's exit handlers, which may wait for unneeded threads
