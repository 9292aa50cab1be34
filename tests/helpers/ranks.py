"""Several ranks in one process: a real gloo group each, on a thread of its own, combined into one engine.

Rank 0 is the real `RankEngine`, the others run the real workers' loop; steps pass through the real messages.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from minisgl.distributed import GroupError
from minisgl.distributed.torch_group import TorchGroup
from minisgl.engine.api import Engine, EngineInfo, EngineStepError, SlotAssignment, StepHandle, StepResult
from minisgl.message.heartbeat import Activity
from minisgl.runner.rank_messages import Stop, decode, encode
from minisgl.runner.ranks import RankDied, RankEngine
from minisgl.runner.worker import Jobs, work
from minisgl.step import StepBuffers, StepPlan
from tests.helpers.seconds import WAIT_S

T = TypeVar("T")
Tamper = Callable[[int, StepPlan, StepBuffers], None]
CPU = torch.device("cpu")


def on_ranks(size: int, folder: Path, work: Callable[[TorchGroup], T]) -> list[T]:
    """Run `work` on each rank and return the results. Raises the first rank's error."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            group = TorchGroup(folder / "rendezvous", rank, size, CPU)
            try:
                results[rank] = work(group)
                group.all_reduce_min(0)  # a barrier: no rank leaves early
            finally:
                group.close()
        except BaseException as error:  # shown below
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    (folder / "rendezvous").unlink(missing_ok=True)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "the ranks wait for each other"
    return results


class _Transport:
    """Replacement of `Ranks` for `RankEngine`, over queues."""

    def __init__(self, size: int) -> None:
        self.processes = list(range(1, size))
        self.inboxes: list[Jobs] = [queue.SimpleQueue() for _ in self.processes]
        self.acks: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.errors: list[BaseException] = []
        self.threads: list[threading.Thread] = []
        self.killed = False

    def check(self) -> None:
        if self.errors:
            raise RankDied(repr(self.errors[0]))

    def explain(self, error: GroupError) -> RankDied:
        deadline = time.monotonic() + WAIT_S
        while not self.errors and time.monotonic() < deadline:
            time.sleep(0.01)
        return RankDied(repr(self.errors[0]) if self.errors else str(error))

    def send(self, frame: bytes) -> None:
        for inbox in self.inboxes:
            inbox.put(decode(frame))

    def receive_ack(self, *, block: bool) -> int | None:
        while True:
            try:
                return self.acks.get(timeout=0.1 if block else 0)
            except queue.Empty:
                if not block:
                    return None
                self.check()

    def kill(self) -> None:
        self.killed = True  # threads cannot be: those that wait for this rank hear of it when its group closes

    def close(self) -> None:
        self.send(encode(Stop()))
        for thread in self.threads:
            thread.join(0 if self.killed or self.errors else WAIT_S)
            assert self.killed or self.errors or not thread.is_alive()


class _Step:
    """Step handle that records a failed step, and lets a device run that only runs when polled."""

    def __init__(self, inner: StepHandle, step: int, failed: list[int], device: Any) -> None:
        self._inner, self._step, self._failed, self._device = inner, step, failed, device

    def wait(self) -> StepResult:
        try:
            return self._inner.wait()
        except EngineStepError:
            self._failed.append(self._step)
            raise

    def done(self) -> bool:
        if hasattr(self._device, "run_some"):
            self._device.run_some()
        return self._inner.done()

    def span(self) -> tuple[float, float]:
        return self._inner.span()


class _Worker:
    """Engine of a rank above 0 that records its failed steps."""

    def __init__(self, engine: Engine, rank: int, tamper: Tamper | None, failed: list[int]) -> None:
        self._engine, self._rank, self._tamper, self._failed = engine, rank, tamper, failed

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def launch(self, plan: StepPlan, buffers: StepBuffers, assignments: Sequence[SlotAssignment]) -> StepHandle:
        if self._tamper is not None:
            self._tamper(self._rank, plan, buffers)
        handle = self._engine.launch(plan, buffers, assignments)
        return _Step(handle, plan.step, self._failed, getattr(self._engine, "_device", None))

    def read_adapter(self, folder: str) -> Any:
        return self._engine.read_adapter(folder)  # type: ignore[attr-defined]

    def add_adapter(self, number: int, adapter: Any) -> None:
        self._engine.add_adapter(number, adapter)  # type: ignore[attr-defined]

    def remove_adapter(self, number: int) -> None:
        self._engine.remove_adapter(number)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._engine.close()


class ThreadRanks(RankEngine):
    """Engine made of `build(group)` on `size` ranks. `tamper(rank, step, plan, entry)` may corrupt a received step."""

    def __init__(
        self, size: int, folder: Path, build: Callable[[TorchGroup], Engine], tamper: Tamper | None = None
    ) -> None:
        self.failed_steps: list[list[int]] = [[] for _ in range(size - 1)]
        self.engines: list[Engine | None] = [None] * size
        rendezvous, transport = folder / "rendezvous", _Transport(size)

        def one(rank: int) -> None:
            try:
                group = TorchGroup(rendezvous, rank, size, CPU)
                engine = self.engines[rank] = build(group)
                worker = _Worker(engine, rank, tamper, self.failed_steps[rank - 1])
                work(worker, transport.inboxes[rank - 1], transport.acks.put, Activity())
                engine.close()
            except GroupError:  # a peer has ended, which says why
                pass
            except BaseException as error:
                transport.errors.append(error)
            finally:
                group.close()

        transport.threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(1, size)]
        for thread in transport.threads:
            thread.start()
        group = TorchGroup(rendezvous, 0, size, CPU)
        self.engines[0] = build(group)
        super().__init__(self.engines[0], group, transport)  # type: ignore[arg-type]
        self.errors = transport.errors
        self.killed = lambda: transport.killed
