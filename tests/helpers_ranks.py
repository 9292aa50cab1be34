"""Several ranks in one process: a real gloo group each, on a thread of its own, and one engine made of theirs.

Keeps true: what the ranks above 0 get of a step passed through the messages that real ones get, into buffers of their
own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from minisgl.distributed.torch_group import TorchGroup
from minisgl.engine.api import Engine, EngineInfo, EngineStepError, SlotBinding, StepHandle
from minisgl.runner.rank_messages import RankStep, decode, encode, make_buffers, pack, sizes_of, unpack
from minisgl.step import StepBuffers, StepPlan

T = TypeVar("T")
CPU = torch.device("cpu")


def on_ranks(size: int, folder: Path, work: Callable[[TorchGroup], T]) -> list[T]:
    """What `work` returns on each rank. A rank that raises ends the test."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            group = TorchGroup(folder / "meeting", rank, size, CPU)
            try:
                results[rank] = work(group)
                group.least(0)  # nobody leaves early
            finally:
                group.close()
        except BaseException as error:  # shown below
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (folder / "meeting").unlink(missing_ok=True)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "the ranks wait for each other"
    return results


class ThreadRanks:
    """`build(group)` on each of `size` ranks, used as one engine. `tamper(rank, step, plan, entry)` may spoil what a
    rank above 0 received."""

    def __init__(
        self,
        size: int,
        folder: Path,
        build: Callable[[TorchGroup], Engine],
        tamper: Callable[[int, StepPlan, StepBuffers], None] | None = None,
    ) -> None:
        self._meeting, self._size, self._build, self._tamper = folder / "meeting", size, build, tamper
        self._inboxes: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in range(size - 1)]
        self._buffers: StepBuffers | None = None
        self.errors: list[BaseException] = []
        self.failed_steps: list[list[int]] = [[] for _ in range(size - 1)]
        self._threads = [threading.Thread(target=self._work, args=(rank,), daemon=True) for rank in range(1, size)]
        for thread in self._threads:
            thread.start()
        self._group = TorchGroup(self._meeting, 0, size, CPU)
        self._engine = build(self._group)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def launch(self, plan: StepPlan, buffers: StepBuffers, bindings: Sequence[SlotBinding]) -> StepHandle:
        frames = [] if buffers is self._buffers else [encode(sizes_of(buffers))]
        self._buffers = buffers
        frames.append(encode(pack(plan, buffers, list(bindings))))
        for inbox in self._inboxes:
            for frame in frames:
                inbox.put(frame)
        return self._engine.launch(plan, buffers, bindings)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        self._engine.close()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        self._group.close()

    def _work(self, rank: int) -> None:
        try:
            group = TorchGroup(self._meeting, rank, self._size, CPU)
            engine = self._build(group)
            while (frame := self._inboxes[rank - 1].get()) is not None:
                message = decode(frame)
                if not isinstance(message, RankStep):
                    buffers = make_buffers(message)  # type: ignore[arg-type]
                    continue
                plan, bindings = unpack(message, buffers)
                if self._tamper is not None:
                    self._tamper(rank, plan, buffers)
                try:
                    engine.launch(plan, buffers, bindings).wait()
                except EngineStepError:
                    self.failed_steps[rank - 1].append(plan.step)
            engine.close()
            group.close()
        except BaseException as error:  # rank 0 then finds its peer gone
            self.errors.append(error)
            raise
