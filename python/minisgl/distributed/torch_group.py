"""A group on torch's process groups: gloo on the CPU, over loopback; NCCL on CUDA.

gloo blocks the caller until a collective is done. NCCL's collectives run on the caller's current stream, like any
kernel, and the host continues.

Invariants: no process-wide state of torch.distributed is used, so several groups may live in one process; ranks find
each other through a file, without a port; all collectives of a group go through one communicator, which exists when the
group does, so that they can be captured in a graph.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minisgl.distributed.group import GroupError

MEET_TIMEOUT = timedelta(minutes=5)  # ranks import torch at their own pace
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # the watchdog is faster
STORE_TIMEOUT = timedelta(milliseconds=100)
CLOSE_TIMEOUT_S = 5.0


class TorchGroup:
    """A group of `size` processes. Creation blocks until all have opened the file `rendezvous`. Raises `GroupError`."""

    def __init__(self, rendezvous: Path, rank: int, size: int, device: torch.device) -> None:
        self._rank, self._size, self._device = rank, size, device
        self._aborted = False
        try:
            store = torch._C._distributed_c10d.FileStore(str(rendezvous), size)
            store.set_timeout(MEET_TIMEOUT)
            self._group: Any = _make(store, rank, size, device)
        except RuntimeError as error:
            raise GroupError(f"rank {rank} of {size} could not join its group: {error}") from error
        self._sum = _on_this_stream(dist.AllreduceOptions())
        self._sum.reduceOp = dist.ReduceOp.SUM
        self._min = _on_this_stream(dist.AllreduceOptions())
        self._min.reduceOp = dist.ReduceOp.MIN
        self._from_zero = _on_this_stream(dist.BroadcastOptions())
        self._from_zero.rootRank = 0
        self._from_zero.rootTensor = 0
        self._to_zero = _on_this_stream(dist.GatherOptions())
        self._to_zero.rootRank = 0
        self.all_reduce_min(0)  # a barrier: to ranks that still connect, a rank that left now would look crashed
        if device.type == "cuda":  # a thread of NCCL's group continues to read the file, and `close` waits for it
            store.set_timeout(STORE_TIMEOUT)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._run("allreduce", [tensor], self._sum)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        self._run("broadcast", [tensor], self._from_zero)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        tensors = [torch.empty_like(tensor) for _ in range(self._size)] if self._rank == 0 else []
        self._run("gather", [tensors] if tensors else [], [tensor], self._to_zero)
        return tensors

    def all_reduce_min(self, value: int) -> int:
        tensor = torch.tensor([value], device=self._device)
        self._run("allreduce", [tensor], self._min)
        minimum = int(tensor.item())
        self._check()  # an aborted collective returns any value
        return minimum

    def abort(self) -> None:
        """Abort NCCL's collectives in another thread; gloo's end by themselves when a peer's sockets close."""
        self._aborted = True
        if (group := self._group) is not None and self._device.type == "cuda":
            threading.Thread(target=_abort, args=([group],), name="nccl-abort", daemon=True).start()

    def close(self) -> None:
        """Close the group. gloo's sockets close with the object. NCCL's communicator is aborted, not shut down, which
        would wait for peers; if the abort hangs, it is left behind after `CLOSE_TIMEOUT_S`."""
        group, self._group = [self._group], None
        if group[0] is not None and self._device.type == "cuda":
            ender = threading.Thread(target=_abort, args=(group,), name="nccl-close", daemon=True)
            ender.start()
            ender.join(CLOSE_TIMEOUT_S)

    def _check(self) -> None:
        if self._aborted:
            raise GroupError(f"rank {self._rank} of {self._size}: a peer has exited")

    def _run(self, name: str, *args: Any) -> None:
        if self._group is None:
            raise GroupError("the group is closed")
        self._check()
        try:
            work = getattr(self._group, name)(*args)
            if work is not None:  # None: NCCL, on this stream
                work.wait()
        except RuntimeError as error:
            raise GroupError(f"{name} on rank {self._rank} of {self._size}: {error}") from error


def _make(store: Any, rank: int, size: int, device: torch.device) -> Any:
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = COLLECTIVE_TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = COLLECTIVE_TIMEOUT
    return gloo(store, rank, size, options)


def _on_this_stream(options: Any) -> Any:
    """Return `options` such that NCCL uses the current stream, not one of its own, for which the current one would have
    to wait (torch 2.7 and later; before, `Work.wait` makes it wait)."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _abort(group: list[Any]) -> None:
    """Abort the group and drop it from its list: it is destroyed in this thread, which may wait for its threads."""
    with contextlib.suppress(RuntimeError):  # it was to end anyway
        group.pop().abort()
