"""An engine process of a rank above 0: `python -m minisgl.runner.worker`, started by `runner.ranks`.

It reads a `RankConfig` as one JSON line from stdin, loads its shard, and runs the steps that rank 0 sends until it is
told to stop or stdin closes, which means that rank 0 is gone. It schedules nothing and samples nothing.

Keeps true: steps run in the order they came; an entry of the ring is written only when the step that lay there is done
(rank 0 sends it no sooner); exit code 0 only after `Stop`; any other end says why on stdout first, if it still can.
Doesn't know: requests, the control plane, HTTP.
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
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from minisgl.config import ConfigError
from minisgl.distributed import GroupError
from minisgl.engine.api import Engine, EngineStepError, SlotBinding
from minisgl.runner.build import build_rank, join_group
from minisgl.runner.rank_messages import NewBuffers, RankConfig, RankNews, RankStep, decode, make_buffers, unpack
from minisgl.step import StepBuffers, StepPlan

GRACE_S = 10.0
Job = tuple[StepPlan, StepBuffers, list[SlotBinding]]


def run(config: RankConfig, tell: Callable[[RankNews], None]) -> None:
    """Returns after `Stop`. Raises what loading or a dead engine raises."""
    group = join_group(config.engine, config.rank, Path(config.meeting))
    engine = build_rank(config.engine, group, lambda *report: None)
    context = zmq.Context()
    inbox, acks = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        inbox.setsockopt(zmq.RCVHWM, 0)
        inbox.connect(config.steps)
        acks.connect(config.acks)
        jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        threading.Thread(target=_receive, args=(inbox, jobs), name="rank-receive", daemon=True).start()
        tell(RankNews())
        _work(engine, jobs, acks)
    finally:  # the sockets go with the process: the receiving thread may still use one
        engine.close()
        group.close()


def _work(engine: Engine, jobs: queue.SimpleQueue[Job | None], acks: zmq.Socket[bytes]) -> None:
    while (job := jobs.get()) is not None:
        plan, buffers, bindings = job
        with contextlib.suppress(EngineStepError):  # every rank has it, rank 0 reports it
            engine.launch(plan, buffers, bindings).wait()
        acks.send(plan.step.to_bytes(8, "little"))


def _receive(inbox: zmq.Socket[bytes], jobs: queue.SimpleQueue[Job | None]) -> None:
    """Decode steps while the one before them runs."""
    buffers: StepBuffers | None = None
    try:
        while True:
            message = decode(inbox.recv())
            if isinstance(message, NewBuffers):
                buffers = make_buffers(message)
            elif isinstance(message, RankStep):
                assert buffers is not None
                plan, bindings = unpack(message, buffers)
                jobs.put((plan, buffers, bindings))
            else:
                break
    except BaseException:  # a thread that dies alone would leave all ranks waiting
        traceback.print_exc()
        os._exit(1)
    jobs.put(None)


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0's parent decides
    news = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whoever else prints must not speak for this rank
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        config = msgspec.json.decode(stdin.readline(), type=RankConfig)
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()

    def tell(what: RankNews) -> None:
        os.write(news, msgspec.json.encode(what) + b"\n")

    try:
        run(config, tell)
    except GroupError as error:
        time.sleep(GRACE_S)  # a peer has ended: rank 0 says which, and ends this one
        tell(RankNews(str(error)))
        return 1
    except BaseException as error:  # the last words of a process that ends either way
        expected = isinstance(error, ConfigError)
        if not expected:
            traceback.print_exc()
        tell(RankNews(str(error) if expected else f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's own exit handlers may wait for threads that nobody needs any more
