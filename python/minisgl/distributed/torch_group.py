"""A group over torch's process groups: gloo on the CPU, over loopback; NCCL on CUDA.

Keeps true: no process-wide state of torch.distributed is used, so several groups may live in one process; ranks find
each other through a file, no port is opened for that.
Doesn't know: who starts the ranks, what happens when one is gone.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minisgl.distributed.group import GroupError

MEET_TIMEOUT = timedelta(minutes=5)  # ranks import torch at their own pace
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # whoever started the ranks watches them


class TorchGroup:
    """Waits until all `size` ranks have come to the file `meeting`. Raises `GroupError`."""

    def __init__(self, meeting: Path, rank: int, size: int, device: torch.device) -> None:
        self._rank, self._size, self._device = rank, size, device
        try:
            store = torch._C._distributed_c10d.FileStore(str(meeting), size)
            store.set_timeout(MEET_TIMEOUT)
            self._group: Any = _make(store, rank, size, device)
        except RuntimeError as error:
            raise GroupError(f"rank {rank} of {size} found no group: {error}") from error
        self._sum = dist.AllreduceOptions()
        self._sum.reduceOp = dist.ReduceOp.SUM
        self._least = dist.AllreduceOptions()
        self._least.reduceOp = dist.ReduceOp.MIN
        self._from_zero = dist.BroadcastOptions()
        self._from_zero.rootRank = 0
        self._from_zero.rootTensor = 0
        self._to_zero = dist.GatherOptions()
        self._to_zero.rootRank = 0
        self.least(0)  # a rank that left now would look like one that crashed to those still connecting

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
        found = [torch.empty_like(tensor) for _ in range(self._size)] if self._rank == 0 else []
        self._run("gather", [found] if found else [], [tensor], self._to_zero)
        return found

    def least(self, value: int) -> int:
        tensor = torch.tensor([value], device=self._device)
        self._run("allreduce", [tensor], self._least)
        return int(tensor.item())

    def close(self) -> None:
        """The sockets, or the communicator, go with the object."""
        self._group = None

    def _run(self, name: str, *args: Any) -> None:
        if self._group is None:
            raise GroupError("the group is closed")
        try:
            getattr(self._group, name)(*args).wait()
        except RuntimeError as error:
            raise GroupError(f"{name} on rank {self._rank} of {self._size}: {error}") from error


def _make(store: Any, rank: int, size: int, device: torch.device) -> Any:
    if device.type == "cuda":
        return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs do not know its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = COLLECTIVE_TIMEOUT
    return gloo(store, rank, size, options)
