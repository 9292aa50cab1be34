"""Rank 0's side of tensor parallelism: the processes of the other ranks, and the engine that sends them steps.

Each rank above 0 is a `runner.worker` process. It ends when its stdin is closed. On its stdout it writes a `RankReady`,
heartbeats and the reason of its end; the end of its stdout is the end of the process.

Invariants: every rank gets every step, in order, before rank 0 runs it; a ring entry is overwritten only when all ranks
have launched its step; a rank that ends unexpectedly, or hangs, ends all others and makes every later call raise
`RankDied`; no rank outlives `close`, or this process.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from minisgl.config import EngineConfig, Limits
from minisgl.distributed import Group, GroupError
from minisgl.engine.adapters import Adapts
from minisgl.engine.api import Engine, EngineInfo, EngineStepError, SlotAssignment, StepHandle, StepResult
from minisgl.message import EngineFailed, Heartbeat, RankUsage
from minisgl.message.heartbeat import Watchdog, poll_interval_s
from minisgl.runner.launch import RankDied
from minisgl.runner.rank_messages import (
    FromRank,
    NewBuffers,
    RankAdapter,
    RankConfig,
    Stop,
    encode,
    pack,
    sizes_of,
)
from minisgl.step import StepBuffers, StepPlan

OnDeath = Callable[[str], None]
STOP_TIMEOUT_S = 5.0
REASON_TIMEOUT_S = 2.0  # a broken collective shows before the end of the rank that caused it
CHECK_INTERVAL_MS = 100
LINGER_MS = 1000


class Ranks:
    """The processes of the ranks above 0. `on_death` is called once, in a thread of its own, with the reason why a rank
    ended unexpectedly or made no progress for `step_timeout` seconds.

    `folder`, for sockets and the rendezvous file, belongs to the caller. `None` makes a temporary one, which `close`
    removes: a rank that is ready may still be connecting, and CUDA groups read the file all the time.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: Path | None = None,
        on_death: OnDeath | None = None,
        step_timeout: float = Limits().step_timeout,
    ) -> None:
        self._own_folder = Path(tempfile.mkdtemp(prefix="minisgl-ranks-")) if folder is None else None
        folder = folder or self._own_folder
        assert folder is not None
        self.rendezvous = folder / "ranks"
        self._on_death = on_death
        self._group: Group | None = None
        self._step_timeout = step_timeout
        self._watchdog = Watchdog(range(1, config.num_ranks), ranks_named)
        self._changed = threading.Condition()
        self._num_ready = 0
        self._closing = False
        self._failure = ""
        self._context = zmq.Context()
        self._acks = self._context.socket(zmq.PULL)
        self._acks.bind(f"ipc://{folder / 'acks'}")
        self._outboxes: list[zmq.Socket[bytes]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, config.num_ranks):
            address = f"ipc://{folder / f'steps-{rank}'}"
            outbox = self._context.socket(zmq.PUSH)
            outbox.setsockopt(zmq.SNDHWM, 0)
            outbox.setsockopt(zmq.LINGER, LINGER_MS)
            outbox.bind(address)
            self._outboxes.append(outbox)
            self._start(
                RankConfig(
                    engine=config,
                    rank=rank,
                    steps=address,
                    acks=f"ipc://{folder / 'acks'}",
                    rendezvous=str(self.rendezvous),
                )
            )

    def _start(self, config: RankConfig) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "minisgl.runner.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_listen` notices its end
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            process.stdin.flush()
        threading.Thread(target=self._listen, args=(config.rank, process), name="rank-listen", daemon=True).start()

    def _listen(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Handle a rank's messages until its process ends, which is a failure unless it is closing."""
        assert process.stdout is not None
        why = ""
        for line in process.stdout:
            if not line.endswith(b"\n"):  # killed while writing
                break
            message = msgspec.json.decode(line, type=FromRank)
            if isinstance(message, Heartbeat):
                self._watchdog.on_heartbeat(rank, message)
            elif isinstance(message, EngineFailed):
                why = f": {message.text}"
            else:
                with self._changed:
                    self._num_ready += 1
                    self._changed.notify_all()
        code = process.wait()
        if not why:
            why = f" was ended by signal {-code}" if code < 0 else f" ended with exit code {code}"
        self._fail(f"tensor-parallel rank {rank}{why}")

    def _look(self) -> None:
        """Poll the watchdog until a rank makes no progress or the ranks end."""
        while True:
            with self._changed:
                interval_s = poll_interval_s(self._step_timeout)
                if self._changed.wait_for(lambda: self._closing or self._failure, interval_s):
                    return
            if reason := self._watchdog.poll(self._step_timeout):
                self._fail(reason)

    def _fail(self, reason: str) -> None:
        """Kill all ranks and report `reason`. Only the first call counts."""
        with self._changed:
            if self._closing or self._failure:
                return
            self._failure = reason
            self._changed.notify_all()
        self.kill()
        if self._group is not None:
            self._group.abort()
        if self._on_death is not None:
            self._on_death(reason)

    # -------------------------------------------------------------------------------------------------------- use

    def joined(self, group: Group) -> None:
        """Set the group whose collectives are aborted when a rank fails."""
        self._group = group

    def wait_ready(self) -> None:
        """Block until every rank has loaded, then start the watchdog. Raises `RankDied`."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._num_ready == len(self.processes))
        self.check()
        threading.Thread(target=self._look, name="rank-look", daemon=True).start()

    def usage(self) -> list[RankUsage]:
        beats = self._watchdog.beats().items()
        return [RankUsage(rank, beat.cpu_s, beat.resident_bytes) for rank, beat in beats]

    def check(self) -> None:
        """Raise `RankDied` if a rank has failed."""
        if self._failure:
            raise RankDied(self._failure)

    def explain(self, error: GroupError) -> RankDied:
        """Return the error for a broken collective. Waits shortly for the failed rank's own reason."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure, REASON_TIMEOUT_S)
        return RankDied(self._failure or str(error))

    def send(self, frame: bytes) -> None:
        """Send a frame to every rank. Raises `RankDied`."""
        for outbox in self._outboxes:
            while not outbox.poll(CHECK_INTERVAL_MS, zmq.POLLOUT):
                self.check()
            outbox.send(frame, zmq.NOBLOCK)

    def receive_ack(self, *, block: bool) -> int | None:
        """Return the number of a step that a rank has launched; `None` if there is none now. Raises `RankDied`."""
        while not self._acks.poll(CHECK_INTERVAL_MS if block else 0):
            if not block:
                return None
            self.check()
        return int.from_bytes(self._acks.recv(zmq.NOBLOCK), "little")

    def kill(self) -> None:
        """Kill every rank and wait for their ends."""
        with self._changed:
            self._closing = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        """Stop the ranks, and kill those that do not end in time. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._context.closed:
            return
        for outbox in self._outboxes:
            if outbox.poll(0, zmq.POLLOUT):
                outbox.send(encode(Stop()), zmq.NOBLOCK)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S if self._num_ready == len(self.processes) and not self._failure else 0)
        self.kill()
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        self._context.destroy(0)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)


def ranks_named(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"tensor-parallel rank {names}" if len(ranks) == 1 else f"tensor-parallel ranks {names}"


@contextlib.contextmanager
def _all_or_none(ranks: Ranks) -> Iterator[None]:
    """Kill all ranks if the body raises an error that only rank 0 has, because the others would wait for it."""
    try:
        yield
    except EngineStepError:  # all ranks have the same error
        raise
    except GroupError as error:
        raise ranks.explain(error) from error
    except BaseException:  # the others would wait for this rank forever, or one has failed
        ranks.check()
        ranks.kill()
        raise


class _Handle:
    def __init__(self, handle: StepHandle, ranks: Ranks, waited: Callable[[], None]) -> None:
        self._handle = handle
        self._ranks = ranks
        self._waited = waited

    def wait(self) -> StepResult:
        self._waited()
        with _all_or_none(self._ranks):
            result = self._handle.wait()
            self._ranks.check()  # an aborted collective looks like a finished one
            return result

    def done(self) -> bool:
        return self._handle.done()

    def span(self) -> tuple[float, float]:
        return self._handle.span()


class RankEngine:
    """Engine that runs every step on `engine`, rank 0 of `group`, and on the other ranks."""

    def __init__(self, engine: Engine, group: Group, ranks: Ranks) -> None:
        self.engine = engine
        self._group = group
        self._ranks = ranks
        self._buffers: StepBuffers | None = None
        self._sent: list[int | None] = []  # step in each ring entry
        self._unacked: dict[int, int] = {}  # number of ranks that have not launched a step
        self._in_flight: set[int] = set()  # launched steps that were not waited for

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        """Send the step to all ranks and launch it on this one. Raises `RankDied`."""
        self._ranks.check()
        if buffers is not self._buffers:
            self._begin(sizes_of(buffers))
            self._buffers = buffers
        self._make_room(plan)
        assigned, step = list(assignments), plan.step
        self._ranks.send(encode(pack(plan, buffers, assigned, len(self._in_flight))))
        self._sent[plan.ring_index] = step
        self._unacked[step] = len(self._ranks.processes)
        self._in_flight.add(step)
        with _all_or_none(self._ranks):
            handle = self.engine.launch(plan, buffers, assigned)
        return _Handle(handle, self._ranks, lambda: self._in_flight.discard(step))

    def read_adapter(self, folder: str) -> tuple[str, Any]:
        """Read and check the adapter for rank 0; the others read it in `add_adapter`."""
        assert isinstance(self.engine, Adapts)
        return folder, self.engine.read_adapter(folder)

    def add_adapter(self, number: int, adapter: tuple[str, Any]) -> None:
        """Add an adapter on all ranks. Raises `RankDied`."""
        assert isinstance(self.engine, Adapts)
        folder, own = adapter
        self._ranks.send(encode(RankAdapter(number, folder)))
        self.engine.add_adapter(number, own)

    def remove_adapter(self, number: int) -> None:
        """Remove an adapter from all ranks. Raises `RankDied`."""
        assert isinstance(self.engine, Adapts)
        self._ranks.send(encode(RankAdapter(number, None)))
        self.engine.remove_adapter(number)

    def usage(self) -> list[RankUsage]:
        """Return the resource usage in the last heartbeats of the ranks above 0."""
        return self._ranks.usage()

    def _begin(self, sizes: NewBuffers) -> None:
        self._sent = [None] * sizes.ring_len
        self._ranks.send(encode(sizes))

    def _make_room(self, plan: StepPlan) -> None:
        """Wait until all ranks have launched the step that occupies the plan's ring entry."""
        before = self._sent[plan.ring_index]
        while True:
            step = self._ranks.receive_ack(block=before in self._unacked)
            if step is None:
                return
            self._unacked[step] -= 1
            if not self._unacked[step]:
                del self._unacked[step]

    def close(self) -> None:
        self.engine.close()
        self._ranks.close()
        self._group.close()
