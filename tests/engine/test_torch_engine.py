"""The torch engine on devices of the CPU: one that runs each job as late as the engine's orders allow gives what one
gives that runs each job when it is queued; what a failed forward ends, and what it leaves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from minisgl.config import EngineConfig
from minisgl.distributed import ALONE
from minisgl.engine.api import EngineStepError
from minisgl.engine.building import compiled
from minisgl.engine.device import InlineDevice
from minisgl.engine.graphs import Outputs, RunAgain, capture_all, graph_sizes
from minisgl.engine.launched_step import EngineDeadError, step_failure
from minisgl.engine.loading import load_engine
from minisgl.engine.torch_engine import TorchEngine
from minisgl.models import load_config
from minisgl.runner.build import build_control_plane
from minisgl.sampling_params import SamplingParams
from minisgl.step import Events, FinishReason
from tests.helpers.device import LateDevice
from tests.helpers.engines import Collector, assert_greedy, greedy
from tests.helpers.models import save, tiny_model
from tests.helpers.tp import SETTINGS, break_forward, cuda_rank

pytestmark = pytest.mark.any_cpu
GRAPHS = (1, 2, 4, 6)
VOCAB = 120
Reference = tuple[Path, PreTrainedModel]


def load(folder: Path, **settings: object) -> tuple[TorchEngine, EngineConfig]:
    config = EngineConfig(model=str(folder), dtype="float32", **settings)  # type: ignore[arg-type]
    return load_engine(config, lambda text, done=0, total=0: None), config


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A tiny random checkpoint and the model that transformers makes of it."""
    model = tiny_model(
        "qwen3-tied", vocab_size=VOCAB, max_position_embeddings=512, eos_token_id=None, bos_token_id=None
    )
    return save(model, tmp_path_factory.mktemp("model")), model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(
        "qwen3-tied", vocab_size=VOCAB, max_position_embeddings=256, eos_token_id=None, bos_token_id=None
    )
    return save(model, tmp_path_factory.mktemp("cuda"))


def build(
    folder: Path, device: Any, graphs: tuple[int, ...] = (), **settings: Any
) -> tuple[TorchEngine, EngineConfig, list[RunAgain]]:
    config = EngineConfig(model=str(folder), dtype="float32", **{**SETTINGS, **settings})
    engine = cuda_rank(folder, ALONE, device, graphs, **settings)
    return engine, config, engine.captured  # type: ignore[attr-defined]


def requests(seed: int, count: int = 9) -> dict[int, tuple[list[int], SamplingParams]]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, 9).tolist()
    made = {}
    for i in range(count):
        prompt = (shared if i % 2 else []) + rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist()
        sampling = SamplingParams(
            max_tokens=int(rng.integers(1, 12)),
            temperature=float(rng.choice([0.0, 0.8, 1.3])),
            top_k=int(rng.choice([-1, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.05])),
            frequency_penalty=float(rng.choice([0.0, 0.0, 0.7])),
            allowed_token_ids=tuple(range(0, VOCAB, 16)) if i in (2, 3) else (),
            bad_token_ids=((16,), (32, 48), (48, 32, 48), (0, 0)) if i in (3, 5) else (),
            seed=int(rng.integers(-(2**63), 2**63)),
            logprobs=2 if i % 3 == 0 else None,
            prompt_logprobs=1 if i == 4 else None,
        )
        made[i + 1] = (prompt, sampling)
    return made


def served(engine: Any, config: EngineConfig, wanted: dict[int, Any], *, overlap: bool = True) -> Collector:
    collector = Collector(engine, config, overlap=overlap)
    try:
        collector.run(wanted)
    finally:
        engine.close()
    return collector


def same(got: Collector, expected: Collector) -> None:
    assert got.tokens == expected.tokens
    assert got.reasons == expected.reasons
    assert got.logprobs.keys() == expected.logprobs.keys()
    for req_id, steps in got.logprobs.items():
        for mine, other in zip(steps, expected.logprobs[req_id], strict=True):
            assert mine[0] == pytest.approx(other[0], abs=1e-4)
            assert mine[1] == other[1]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("graphs", [(), GRAPHS], ids=["eager", "graphs"])
def test_delayed_device_gives_the_same_tokens(folder: Path, seed: int, graphs: tuple[int, ...]) -> None:
    wanted = requests(seed)
    in_a_thread, config = load(folder, **SETTINGS)
    expected = served(in_a_thread, config, wanted)
    device = LateDevice(seed, eagerness=(0.0, 0.3, 0.8)[seed % 3])
    engine, config, captured = build(folder, device, graphs)
    same(served(engine, config, wanted), expected)
    assert any(graph.count for graph in captured) == bool(graphs)
    assert set(expected.reasons.values()) == {FinishReason.LENGTH}


def test_overlap_changes_nothing(folder: Path) -> None:
    wanted = requests(11)
    collected = []
    for overlap in (True, False):
        engine, config, _ = build(folder, LateDevice(3), GRAPHS)
        collected.append(served(engine, config, wanted, overlap=overlap))
    same(*collected)


def not_finite(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * float("nan")


def out_of_memory(hidden: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")


@pytest.mark.parametrize(("at", "how"), [(3, not_finite), (2, out_of_memory)])
def test_step_failure_ends_only_that_step(folder: Path, at: int, how: Any) -> None:
    engine, config, _ = build(folder, InlineDevice())
    break_forward(engine, at, how)
    collector = served(engine, config, requests(at - 1))
    assert set(collector.reasons) == set(requests(at - 1))
    assert set(collector.reasons.values()) == {FinishReason.ERROR, FinishReason.LENGTH}


@pytest.mark.parametrize("device", [LateDevice(0, eagerness=0.9), LateDevice(0, eagerness=0.0)], ids=["soon", "late"])
def test_any_other_error_means_that_the_engine_is_dead(folder: Path, device: Any) -> None:
    engine, config, _ = build(folder, device)

    def illegal(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    break_forward(engine, 1, illegal)
    with pytest.raises(EngineDeadError, match=r"step 0: RuntimeError: CUDA error: an illegal"):
        Collector(engine, config).run(requests(3))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), EngineStepError),
        (EngineStepError("not finite"), EngineStepError),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), EngineDeadError),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), EngineDeadError),
        (MemoryError(), EngineDeadError),
    ],
)
def test_step_failure_maps_errors_to_dead_or_usable(error: BaseException, kind: type) -> None:
    assert type(step_failure(7, error)) is kind


def test_a_cpu_survives_any_error() -> None:
    assert type(step_failure(7, MemoryError(), survives=True)) is EngineStepError
    assert type(step_failure(7, MemoryError(), ranks=2, survives=True)) is EngineDeadError, "the others wait"


def test_a_forward_that_raises_on_a_cpu_ends_its_step_only(reference: Reference) -> None:
    folder, model = reference
    engine, config = load(folder, num_pages=64)
    collector = Collector(engine, config)

    def out_of_luck(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of luck")

    break_forward(engine, 4, out_of_luck)
    collector.run({0: ([1, 2, 3], greedy(20))})
    assert collector.reasons[0] is FinishReason.ERROR and len(collector.tokens[0]) < 20
    collector.run({1: ([1, 2, 3], greedy(20))})
    engine.close()
    assert collector.reasons[1] is FinishReason.LENGTH
    assert_greedy(model, [1, 2, 3], collector.tokens[1])


def test_non_finite_values_in_pages_do_not_affect_later_requests(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = reference
    engine, config = load(folder, num_pages=8, page_size=4)
    collector = Collector(engine, config)
    store, spoiled = engine.pool.store, iter([True])

    def spoil(layer: int, out_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        store(layer, out_loc, k, v * float("nan") if next(spoiled, False) else v)

    monkeypatch.setattr(engine.pool, "store", spoil)
    collector.run({0: ([1, 2, 3], greedy(5))})
    assert collector.reasons[0] is FinishReason.ERROR
    collector.run({1: ([1, 2, 3], greedy(10))})  # the same pages again, partly filled
    engine.close()
    assert_greedy(model, [1, 2, 3], collector.tokens[1])


def test_launch_beyond_overlap_depth_resolves_the_oldest_step(folder: Path) -> None:
    """A stage is not written again before its results are out, whoever forgets to wait."""
    device = LateDevice(1, eagerness=0.0)
    engine, config, _ = build(folder, device)
    plane = build_control_plane(config, engine.info)
    plan = plane.schedule(0, Events())
    handles = [engine.launch(plan, plane.buffers, ()) for _ in range(4)]
    assert [handle.done() for handle in handles] == [True, True, False, False]
    engine.close()
    assert all(handle.done() for handle in handles)


def programs_of(folder: Path, wanted: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is compiled to serve `wanted`: traced for real, computed as written, and the same tokens."""
    engine, config, _ = build(folder, InlineDevice())
    expected = served(engine, config, wanted)
    programs: list[Any] = []

    def backend(program: Any, inputs: Any) -> Any:
        programs.append(program)
        return program.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    engine, config, _ = build(folder, InlineDevice())
    engine.forward_model = compiled(engine.model)
    same(served(engine, config, wanted), expected)
    torch.compiler.reset()
    return programs


@pytest.mark.slow
def test_the_compiled_forward_is_compiled_few_times(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many numbers of tokens, a program or two a part."""
    programs = programs_of(folder, requests(6), monkeypatch)
    assert 0 < len(programs) <= 4 * (load_config(folder).num_layers + 1)


@pytest.mark.slow
def test_experts_are_one_operation_of_a_compiled_forward(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host may look at in them ends no program and makes no new one."""
    changes = {"vocab_size": VOCAB, "num_hidden_layers": 1, "eos_token_id": None, "bos_token_id": None}
    folder = save(tiny_model("qwen3-moe", **changes), tmp_path_factory.mktemp("moe"))
    programs = programs_of(folder, requests(3, count=3), monkeypatch)
    targets = [str(node.target) for program in programs for node in program.graph.nodes]
    assert 1 <= sum("routed_experts" in target for target in targets) <= 2
    assert not any("bincount" in target for target in targets)


@pytest.mark.parametrize(
    ("max_bs", "max_rows", "sizes"),
    [
        (None, 64, (1, 2, 4, 8, 16, 32, 48, 64)),
        (None, 5, (1, 2, 4, 5)),
        (20, 64, (1, 2, 4, 8, 16, 20)),
        (1, 64, (1,)),
        (0, 64, ()),
        (None, 4096, (1, 2, 4, 8, *range(16, 257, 16))),
    ],
)
def test_graph_sizes(max_bs: int | None, max_rows: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_bs, max_rows) == sizes


def test_graphs_are_captured_largest_first_and_reported() -> None:
    order: list[int] = []
    lines: list[str] = []
    free = iter([900 * 2**20, 400 * 2**20])

    def forward_of(size: int) -> Any:
        order.append(size)
        return lambda: Outputs(torch.zeros(size, 3), torch.ones(1))

    graphs = capture_all(
        (1, 4, 2),
        forward_of,
        lambda forward: forward(),
        lambda text, done=0, total=0: lines.append(f"{text} {done}/{total}"),
        lambda: next(free),
    )
    assert order == [4, 2, 1]
    assert sorted(graphs) == [1, 2, 4]
    assert lines[:3] == [f"capturing CUDA graphs {i}/3" for i in (1, 2, 3)]
    assert lines[3].startswith("CUDA graphs: 3 sizes up to 4, 500 MiB")
