"""Torch engine of one of several ranks, on CPU devices.

Each rank has a device of its own; a late one also advances while no thread waits for it, like a real one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minisgl.attention import KVPool, TorchSdpa
from minisgl.config import EngineConfig
from minisgl.distributed import ALONE, Group
from minisgl.engine.api import EngineInfo
from minisgl.engine.device import InlineDevice
from minisgl.engine.graphs import Outputs, RunAgain
from minisgl.engine.torch_engine import TorchEngine
from minisgl.models import load_config
from minisgl.models.decoder import build_model
from minisgl.runner.build import control_plane_config
from minisgl.weights.checkpoint import load_weights
from tests.helpers.device import LateDevice

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"num_pages": 40, "page_size": 4, "max_running_requests": 6, "max_prefill_length": 12}


class BusyDevice(LateDevice):
    """Late device that also advances when it is polled."""

    def run_some(self) -> None:
        for _ in range(30):
            self._random.choice(self._streams).step()


class Recorder:
    """Recorder of the logits that rank 0 sampled from, step by step."""

    def __init__(self, engine: TorchEngine) -> None:
        self.logits: list[torch.Tensor] = []
        sampler = engine.sampler
        inner = sampler.sample

        def sample(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.logits.append(logits.clone())
            return inner(logits, *rest)

        sampler.sample = sample  # type: ignore[method-assign]


def device_for(kind: str, rank: int) -> Any:
    return InlineDevice() if kind == "inline" else BusyDevice(seed=7 + rank, eagerness=0.2 * rank)


def cuda_rank(
    folder: Path, group: Group = ALONE, kind: str | Any = "inline", graphs: tuple[int, ...] = (), **settings: Any
) -> TorchEngine:
    """Return the engine of a rank with its shard of the float32 model in `folder`. `kind`: of its device, or the
    device."""
    config = EngineConfig(model=str(folder), dtype="float32", **{**SETTINGS, **settings})
    model_config = load_config(folder)
    info = EngineInfo(
        name="torch",
        model_dir=str(folder),
        vocab_size=model_config.vocab_size,
        context_len=model_config.max_position,
        eos_ids=model_config.eos_ids,
        num_pages=config.num_pages or 0,
        page_size=config.page_size,
        device="cpu",
        dtype="float32",
    )
    with torch.inference_mode():
        model = build_model(model_config, dtype=torch.float32, device=CPU, group=group)
        load_weights(model.checkpoint(), folder, stacked=model.stacked(), shards=model.shards())
        pool = KVPool(
            model.attention, num_pages=info.num_pages, page_size=info.page_size, dtype=torch.float32, device=CPU
        )
    attention = TorchSdpa(pool, torch.float32, CPU, model_config.windows)
    info = replace(info, graph_sizes=graphs)

    def capture(forward: Any) -> RunAgain:
        graph = RunAgain(forward)
        captured.append(graph)
        return graph

    captured: list[RunAgain] = []
    limits = control_plane_config(config, info).limits()
    device = device_for(kind, group.rank) if isinstance(kind, str) else kind
    engine = TorchEngine(model, info, pool, attention, device, limits, group=group, capture=capture)
    engine.warm_up()
    engine.captured = captured  # type: ignore[attr-defined]
    for graph in captured:
        graph.count = 0
    return engine


def break_forward(engine: TorchEngine, at: int, how: Any) -> None:
    """Replace the model's output by `how(hidden)` in the forward `at`, counted from 1 from now on; `how` may raise."""
    inner, calls = engine.model.forward, 0

    def forward(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        hidden = inner(*args)
        output: torch.Tensor = how(hidden) if calls == at else hidden
        return output

    engine.forward_model = forward
    engine.model.forward = forward  # type: ignore[method-assign]


__all__ = ["BusyDevice", "Outputs", "Recorder", "break_forward", "cuda_rank"]
