"""What the group over NCCL asks of torch, as far as it shows without a GPU: names, options, and how it ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minisgl.config import ConfigError, EngineConfig
from minisgl.distributed import GroupError, torch_group
from minisgl.distributed.torch_group import TorchGroup
from minisgl.engine import loading
from minisgl.engine.loading import device_of
from tests.helpers.seconds import WAIT_S

CUDA = torch.device("cuda", 0)


class Pretended:
    """A process group of one on a device that is none."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.aborted = threading.Event()
        self.hangs = hangs
        self.released = threading.Event()

    def _call(self, name: str, options: Any) -> None:
        """asyncOp False: on the caller's stream, and there is no work to wait for."""
        self.calls.append((name, options.asyncOp))

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self._call("allreduce", options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        self._call("broadcast", options)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> None:
        self._call("gather", options)
        outputs[0][0].copy_(inputs[0])

    def abort(self) -> None:
        self.aborted.set()
        if self.hangs:
            self.released.wait(WAIT_S)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """Tensors stay on the CPU, whatever device is asked for."""
    made = Pretended()
    real = torch.tensor
    monkeypatch.setattr(torch_group, "_make", lambda *args: made)
    monkeypatch.setattr(torch, "tensor", lambda data, device=None: real(data))
    monkeypatch.setattr(torch_group, "CLOSE_TIMEOUT_S", 0.2)
    return made


def test_collectives_stay_on_the_callers_stream(pretended: Pretended, tmp_path: Path) -> None:
    group = TorchGroup(tmp_path / "rendezvous", 0, 1, CUDA)
    assert pretended.calls == [("allreduce", False)]  # the communicator exists when the group does
    mine = torch.arange(3)
    assert group.all_reduce(mine) is mine and group.broadcast(mine) is mine
    assert torch.equal(group.gather(mine)[0], mine)
    assert group.all_reduce_min(4) == 4
    assert not any(asynchronous for _, asynchronous in pretended.calls)
    group.close()


def test_results_after_an_abort_are_refused(pretended: Pretended, tmp_path: Path) -> None:
    group = TorchGroup(tmp_path / "rendezvous", 0, 2, CUDA)
    group.abort()
    assert pretended.aborted.wait(WAIT_S)
    for use in (lambda: group.all_reduce(torch.zeros(1)), lambda: group.all_reduce_min(3)):
        with pytest.raises(GroupError, match="rank 0 of 2: a peer has exited"):
            use()
    group.close()


def test_an_abort_during_a_wait_is_no_result(
    pretended: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collective ends, with any value."""
    group = TorchGroup(tmp_path / "rendezvous", 0, 2, CUDA)
    monkeypatch.setattr(pretended, "allreduce", lambda *args: group.abort())
    with pytest.raises(GroupError, match="a peer has exited"):
        group.all_reduce_min(3)
    group.close()


@pytest.mark.parametrize("hangs", [False, True])
def test_closing_aborts_and_never_hangs(
    hangs: bool, pretended: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended.hangs = hangs
    monkeypatch.setattr(torch_group, "CLOSE_TIMEOUT_S", 0.2 if hangs else WAIT_S)
    group = TorchGroup(tmp_path / "rendezvous", 0, 1, CUDA)
    group.close()
    group.close()
    assert pretended.aborted.wait(WAIT_S)
    assert any(thread.name == "nccl-close" for thread in threading.enumerate()) == hangs
    pretended.released.set()
    with pytest.raises(GroupError, match="closed"):
        group.broadcast(torch.zeros(1))


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="this torch has no NCCL")
def test_torch_has_what_is_used() -> None:
    nccl = dist.ProcessGroupNCCL
    for name in ("allreduce", "broadcast", "gather", "abort"):
        assert callable(getattr(nccl, name))
    options = nccl.Options()
    options._timeout = torch_group.COLLECTIVE_TIMEOUT
    for kind in (dist.AllreduceOptions, dist.BroadcastOptions, dist.GatherOptions):
        assert torch_group._on_this_stream(kind()).asyncOp is False


# ------------------------------------------------------------------------------------------------ a device for a rank


@pytest.fixture
def three_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


def config(device: str, tp: int, **settings: Any) -> EngineConfig:
    return EngineConfig(model="none", device=device, tp=tp, **settings)


@pytest.mark.parametrize(
    ("device", "tp", "places"),
    [
        ("cuda", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda:1", 2, ["cuda:1", "cuda:2"]),
        ("auto", 2, ["cuda:0", "cuda:1"]),
        ("auto", 4, ["cpu"] * 4),
        ("cpu", 2, ["cpu"] * 2),
    ],
)
def test_each_rank_has_its_device(device: str, tp: int, places: list[str], three_devices: None) -> None:
    assert [str(device_of(config(device, tp), rank)) for rank in range(tp)] == places


def test_why_auto_leaves_devices_idle_is_said(three_devices: None) -> None:
    said: list[str] = []
    device_of(config("auto", 4), say=lambda text, done=0, total=0: said.append(text))
    assert said == ["device: cpu: --tp 4 needs as many CUDA devices, there are 3"]


@pytest.mark.parametrize(
    ("device", "tp", "says"),
    [
        ("cuda", 4, r"--tp 4: needs 4 CUDA devices from cuda:0 on, there are 3: choose at most --tp 3"),
        ("cuda:2", 2, r"--tp 2: needs 2 CUDA devices from cuda:2 on, there are 1: choose at most --tp 1"),
        ("cuda:3", 1, r"--device cuda:3: must be from cuda:0 to cuda:2"),
    ],
)
def test_missing_devices_are_refused(device: str, tp: int, says: str, three_devices: None) -> None:
    with pytest.raises(ConfigError, match=says):
        device_of(config(device, tp))


def test_an_apple_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device mps: must be auto, cpu, cuda or cuda:N"):
        config("mps", 1).check()


def test_the_compiler_is_refused_with_ranks(three_devices: None) -> None:
    with pytest.raises(ConfigError, match="--torch-compile: not supported with --tp 2"):
        device_of(config("cuda", 2, torch_compile=True))
    assert loading.device_of(config("cuda", 1, torch_compile=True)) == torch.device("cuda", 0)
