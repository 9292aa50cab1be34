"""Tensor parallelism: NCCL with one rank on one device, in graphs too; and real ranks where there are two devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from minisgl.config import ConfigError, EngineConfig
from minisgl.distributed import Group, GroupError
from minisgl.distributed.torch_group import CLOSE_TIMEOUT_S, TorchGroup
from minisgl.engine.building import open_device
from minisgl.engine.graphs import Outputs
from minisgl.engine.loading import load_engine
from minisgl.engine.torch_engine import TorchEngine
from minisgl.runner.build import build_engine
from minisgl.runner.ranks import RankDied, RankEngine
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.helpers.gpu import (
    BFLOAT16_WITHIN,
    DEVICE,
    REHEARSAL,
    SETTINGS,
    WIDE,
    WITHIN,
    Recorded,
    Run,
    Wanted,
    assert_alike,
    checkpoint,
    greedily,
    need_backend,
    only_on_a_gpu,
    prompts,
    run,
    run_without_waits,
)

FIRST = torch.device("cpu") if REHEARSAL else torch.device("cuda", 0)
COUNT = 4 if REHEARSAL else torch.cuda.device_count()
# worker processes have no stand-in for FlashInfer
BACKEND = "torch_sdpa" if REHEARSAL else "auto"
with_devices = pytest.mark.parametrize(
    "tp",
    [pytest.param(n, marks=pytest.mark.skipif(n > COUNT, reason=f"{COUNT} devices, {n} are needed")) for n in (2, 4)],
)
two_devices = pytest.mark.skipif(COUNT < 2, reason=f"{COUNT} devices, 2 are needed")


# ------------------------------------------------------------------------------------------------------ one rank


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[TorchGroup]:
    group = TorchGroup(tmp_path / "rendezvous", 0, 1, FIRST)
    yield group
    group.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64])
def test_collectives_of_one_rank(dtype: torch.dtype, alone: TorchGroup) -> None:
    mine = torch.arange(5, device=FIRST).to(dtype)
    assert alone.all_reduce(mine.clone()).tolist() == [0, 1, 2, 3, 4]
    assert alone.broadcast(mine.clone()).tolist() == [0, 1, 2, 3, 4]
    assert [part.tolist() for part in alone.gather(mine)] == [[0, 1, 2, 3, 4]]
    assert alone.all_reduce_min(-(2**40)) == -(2**40)


@only_on_a_gpu("gloo waits")
def test_collectives_do_not_wait_for_the_device(alone: TorchGroup) -> None:
    mine = torch.ones(1000, device=FIRST)
    for work in (alone.all_reduce, alone.broadcast, alone.gather):
        work(mine)  # what is loaded or connected at first use: loading a kernel waits for the device
    mine.add_(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    mine.add_(1)
    alone.all_reduce(mine)
    alone.broadcast(mine)
    (part,) = alone.gather(mine)
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the host waited"
    torch.cuda.synchronize()
    assert bool((mine == 2).all()) and torch.equal(part, mine)


def test_collectives_within_a_graph(alone: TorchGroup) -> None:
    """Replayed with other numbers, with collectives outside of graphs in between; then the communicator ends."""
    device, capture = open_device(FIRST)
    place = torch.zeros(4, 8, device=FIRST)

    def forward() -> Outputs:
        summed = alone.all_reduce(place * 2)
        said = alone.broadcast(summed + 1)
        return Outputs(torch.cat(alone.gather(summed), 1) + said, summed.isfinite().all().reshape(1))

    with torch.inference_mode():
        graphs = [capture(forward) for _ in range(3)]
        for turn in range(6):
            graph, value = graphs[turn % 3], float(turn - 2)
            device.forward.run("fill", lambda value=value: place.fill_(value))  # type: ignore[misc]
            device.forward.run("graph", graph.replay)
            device.forward.run("eager", lambda: alone.all_reduce(torch.ones(3, device=FIRST)))  # type: ignore[arg-type, return-value]
            device.forward.record_event().synchronize()
            assert bool((graph.outputs.logits == 4 * value + 1).all())
        del graph, graphs, forward
    _closes(alone)


def _closes(group: Group) -> None:
    began = time.monotonic()
    group.close()
    assert time.monotonic() - began < CLOSE_TIMEOUT_S
    assert not any(thread.name == "nccl-close" for thread in threading.enumerate()), "the communicator hangs"
    with pytest.raises(GroupError, match="closed"):
        group.all_reduce(torch.zeros(1, device=FIRST))


class Half(TorchGroup):
    """One rank that takes itself for the first of two: it computes half a model, and calls all collectives for it."""

    @property
    def size(self) -> int:
        return 2


def _half(folder: Path, rendezvous: Path, wanted: Wanted, **settings: Any) -> tuple[Run, TorchEngine]:
    group = Half(rendezvous, 0, 1, FIRST)
    config = EngineConfig(model=str(folder), **{"device": DEVICE, **SETTINGS, **settings})
    engine = load_engine(config, print, group)
    assert isinstance(engine, TorchEngine)
    recorded = Recorded(engine)
    collector = Run(recorded, config)
    collector.run(wanted)
    graphs = len(engine.graphs)
    engine.close()
    _closes(group)
    collector.logits = recorded.logits()
    assert graphs == len(engine.info.graph_sizes)
    return collector, engine


@pytest.mark.parametrize("overlap", [True, False])
def test_the_engine_with_collectives_in_its_graphs(overlap: bool, tmp_path: Path) -> None:
    """Graphs against eager steps of the same half of a model. That half says nothing sensible, and the same."""
    need_backend("flashinfer")
    folder, _ = checkpoint("qwen3-tied", tmp_path / "model", **{**WIDE, "num_key_value_heads": 4})
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=30)
    wanted = {i: (prompt, params) for i, prompt in enumerate(prompts())}
    settings = {"dtype": "bfloat16", "attention_backend": "flashinfer", "overlap": overlap}
    graph, with_graphs = _half(folder, tmp_path / "a", wanted, cuda_graph_max_bs=4, **settings)
    eager, without = _half(folder, tmp_path / "b", wanted, cuda_graph_max_bs=0, **settings)
    assert with_graphs.info.graph_sizes and not without.info.graph_sizes
    assert_alike(graph, eager, BFLOAT16_WITHIN, at_least=0.3)


@only_on_a_gpu("gloo waits")
def test_launches_with_collectives_do_not_wait_for_the_device(tmp_path: Path) -> None:
    """Any operation of torch's that makes the host wait raises, once the engine is warm."""
    need_backend("flashinfer")
    folder, _ = checkpoint("qwen3-tied", tmp_path / "model", **{**WIDE, "num_key_value_heads": 4})
    group = Half(tmp_path / "rendezvous", 0, 1, FIRST)
    config = EngineConfig(model=str(folder), device="cuda", dtype="bfloat16", **SETTINGS)
    engine = load_engine(config, print, group)
    run_without_waits(engine, config)
    _closes(group)


@only_on_a_gpu("there are no devices to count")
def test_more_ranks_than_devices_are_refused(tmp_path: Path) -> None:
    folder, _ = checkpoint("qwen3-tied", tmp_path, **WIDE)
    ranks = next(n for n in (2, 4, 8, 16, 32) if n > COUNT)
    with pytest.raises(ConfigError, match=rf"--tp {ranks}: "):
        build_engine(EngineConfig(model=str(folder), device="cuda", tp=ranks), print)


# -------------------------------------------------------------------------------------------------- several ranks


def _on_ranks(
    folder: Path, tp: int, wanted: Wanted, drive: Callable[[Run, RankEngine], None] | None = None, **settings: Any
) -> Run:
    """By real worker processes, each with its device."""
    config = EngineConfig(
        model=str(folder), tp=tp, **{"device": DEVICE, "attention_backend": BACKEND, **SETTINGS, **settings}
    )
    engine = build_engine(config, print)
    assert isinstance(engine, RankEngine) and isinstance(engine.engine, TorchEngine)
    recorded: Any = Recorded(engine.engine)
    recorded.engine = engine  # rank 0 samples, all launch
    collector = Run(recorded, config)
    try:
        collector.run(wanted) if drive is None else drive(collector, engine)
        assert all(one.resident_bytes > 2**24 for one in engine.usage())
    finally:
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 30
    assert not [child for child in psutil.Process().children() if "minisgl.runner.worker" in " ".join(child.cmdline())]
    collector.logits = recorded.logits()
    return collector


@with_devices
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [("llama-bias-untied", "float32"), ("llama-bias-untied", "bfloat16"), ("qwen3-moe-not-everywhere", "float32")],
)
def test_logits_are_those_of_one_rank(variant: str, dtype: str, tp: int, tmp_path: Path) -> None:
    """bfloat16 picks other experts at near-ties: no bound on that."""
    folder, _ = checkpoint(variant, tmp_path)
    one = run(folder, greedily(), dtype=dtype, attention_backend=BACKEND)
    many = _on_ranks(folder, tp, greedily(), dtype=dtype)
    assert_alike(many, one, WITHIN[dtype], at_least=0.5 if dtype == "bfloat16" else 0.95)


@with_devices
@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("overlap", [True, False])
def test_all_parameters(overlap: bool, graphs: int, tp: int, tmp_path: Path) -> None:
    """Sampled, penalised, with log probabilities of prompts; chunked prefill, prefix hits, retraction."""
    folder, _ = checkpoint("qwen3-tied", tmp_path, **{**WIDE, "num_key_value_heads": 4})
    wanted = {
        i: (
            prompt,
            SamplingParams(
                temperature=(0.0, 0.9)[i % 2],
                top_p=0.9,
                frequency_penalty=(0.0, 0.5)[i == 3],
                seed=i,
                max_tokens=24,
                logprobs=2,
                prompt_logprobs=1 if i == 4 else None,
            ),
        )
        for i, prompt in enumerate(prompts())
    }
    settings = {"dtype": "float32", "overlap": overlap, "cuda_graph_max_bs": graphs, "num_pages": 16}
    one = run(folder, wanted, attention_backend=BACKEND, **settings)
    many = _on_ranks(folder, tp, wanted, **settings)
    assert_alike(many, one, WITHIN["float32"], at_least=0.7)
    assert many.prompt_logprobs[4] == pytest.approx(one.prompt_logprobs[4], abs=WITHIN["float32"])


@with_devices
def test_a_step_that_is_not_finite_fails_on_all_ranks(tp: int, tmp_path: Path) -> None:
    """Of rank 0's numbers, here; what follows must be as if nothing had been."""
    folder, _ = checkpoint("llama-bias-untied", tmp_path)

    def drive(collector: Run, engine: Any) -> None:
        attention = engine.engine.attention
        inner = attention.attend
        attention.attend = lambda *args: inner(*args) * float("nan")
        collector.run({100: ([1, 2, 3], SamplingParams(temperature=0, max_tokens=4, seed=0))})
        attention.attend = inner
        collector.run(greedily())

    many = _on_ranks(folder, tp, {}, drive, dtype="float32", cuda_graph_max_bs=0)
    assert many.reasons[100] is FinishReason.ERROR and "not finite" in many.errors[100]
    one = run(folder, greedily(), dtype="float32", attention_backend=BACKEND)
    for i in one.tokens:
        assert many.reasons[i] is FinishReason.LENGTH
    assert_alike(many, one, WITHIN["float32"], at_least=0.9)


@two_devices
def test_a_rank_that_is_killed_ends_a_run(tmp_path: Path) -> None:
    """Rank 0 waits in a collective whose peer is gone: the communicator is aborted."""
    folder, _ = checkpoint("llama-bias-untied", tmp_path)
    died: list[BaseException] = []

    def drive(collector: Run, engine: RankEngine) -> None:
        collector.start({0: ([1, 2, 3], SamplingParams(temperature=0, max_tokens=400, seed=0, ignore_eos=True))})
        engine._ranks.processes[0].kill()
        began = time.monotonic()
        with pytest.raises(RankDied, match="rank 1 was ended by signal 9") as caught:
            while time.monotonic() - began < 20:
                collector.loop.step([])
        died.append(caught.value)

    _on_ranks(folder, 2, {}, drive, dtype="float32")
    assert died
