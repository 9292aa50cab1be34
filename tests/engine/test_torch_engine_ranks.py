"""The torch engine of several ranks, over gloo on devices of the CPU, against one rank, in a forward thread too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from minisgl.config import ConfigError, EngineConfig
from minisgl.distributed import ALONE, Group
from minisgl.engine.api import Engine
from minisgl.engine.building import check_agreement
from minisgl.engine.launched_step import EngineDeadError
from minisgl.engine.loading import load_engine
from minisgl.engine.torch_engine import TorchEngine
from minisgl.runner.build import build_control_plane
from minisgl.runner.launch import RankDied
from minisgl.sampling_params import SamplingParams
from minisgl.step import FinishReason
from tests.helpers.grammars import PickyCompiler
from tests.helpers.models import save, tiny_model
from tests.helpers.ranks import ThreadRanks, on_ranks
from tests.helpers.tp import SETTINGS, Recorder, break_forward, cuda_rank
from tests.runner.test_ranks_engines import Request, drive

GRAPHS = (1, 2, 4, 6)
VARIANTS = {"qwen3-untied": 2, "llama-bias-untied": 4, "qwen3-moe-not-everywhere": 2}
VOCAB = 131


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tp")
    return {name: save(tiny_model(name, eos_token_id=None, bos_token_id=None), root / name) for name in VARIANTS}


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(9)]
    return [
        (
            (shared if i % 2 else []) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))],
            SamplingParams(
                temperature=(0.0, 0.9)[i % 3 == 1],
                top_p=(1.0, 0.8)[i % 5 == 0],
                frequency_penalty=(0.0, 0.7)[i == 3],
                max_tokens=rng.randint(8, 40),
                seed=i,
                logprobs=2,
                prompt_logprobs=1 if i == 4 else None,
            ),
        )
        for i in range(12)
    ]


def tight(engine: Engine, config: EngineConfig) -> Any:
    """A control plane whose estimate expects no output: rows are retracted."""
    plane = build_control_plane(config, engine.info)
    plane.reserve_ratio = 0  # type: ignore[attr-defined]
    return plane


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", cpu_backend="python", **SETTINGS)


@pytest.mark.parametrize(
    ("variant", "kind", "graphs"),
    [
        ("qwen3-untied", "inline", ()),
        ("qwen3-untied", "late", GRAPHS),
        pytest.param("llama-bias-untied", "inline", GRAPHS, marks=pytest.mark.slow),
        pytest.param("llama-bias-untied", "late", (), marks=pytest.mark.slow),
        pytest.param("llama-bias-untied", "late", GRAPHS, marks=pytest.mark.slow),
        pytest.param("qwen3-moe-not-everywhere", "inline", (), marks=pytest.mark.slow),
        ("qwen3-moe-not-everywhere", "late", GRAPHS),
    ],
    ids=str,
)
def test_several_ranks_give_the_tokens_of_one(
    variant: str, kind: str, graphs: tuple[int, ...], folders: dict[str, Path], tmp_path: Path
) -> None:
    """Greedy and sampled tokens, log probabilities, logits; chunked prefill, prefix hits, retraction, aborts."""
    folder, size = folders[variant], VARIANTS[variant]
    config, wanted, aborts = config_of(folder), requests(len(graphs)), (2, 9)
    ranks = ThreadRanks(size, tmp_path, lambda group: cuda_rank(folder, group, kind, graphs))
    alone = cuda_rank(folder, ALONE, kind, graphs)
    logits, found = [], []
    for engine, rank0 in ((alone, alone), (ranks, ranks.engines[0]), (load_engine(config, _silent), None)):
        if isinstance(rank0, TorchEngine):
            logits.append(Recorder(rank0).logits)
        clients, loop = drive(engine, tight(engine, config), wanted, aborts=aborts)
        stats = loop.control_plane.stats()
        assert stats.num_retracted_total > 0 and sum(clients.cached.values()) > 0
        engine.close()
        found.append(clients)
    assert not ranks.errors and not any(ranks.failed_steps)
    one, many, cpu = found
    assert one.tokens == cpu.tokens
    assert many.tokens == one.tokens
    assert one.reasons == cpu.reasons
    assert many.reasons == one.reasons
    assert FinishReason.ABORT in many.reasons.values()
    assert len(logits[0]) == len(logits[1])
    for mine, other in zip(*logits, strict=True):
        assert (mine - other).abs().max() <= 1e-4
    for i in many.logprobs:
        ours, theirs = ([own for own, *_ in each.logprobs[i]] for each in (many, cpu))
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert many.prompt_logprobs[4] == pytest.approx(cpu.prompt_logprobs[4], abs=1e-4)
    if graphs:
        for engine in ranks.engines:
            assert any(graph.count for graph in engine.captured)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "graphs"),
    [
        pytest.param("inline", (), marks=pytest.mark.slow),
        pytest.param("late", (), marks=pytest.mark.slow),
        ("late", GRAPHS),
    ],
    ids=["inline", "late", "late-graphs"],
)
def test_grammars_are_rank_0s(kind: str, graphs: tuple[int, ...], folders: dict[str, Path], tmp_path: Path) -> None:
    """The other ranks know of none: they wait in the broadcast until rank 0 has sampled."""
    folder = folders["llama-bias-untied"]
    config = config_of(folder)
    wanted = [
        (prompt, msgspec.structs.replace(sampling, grammar=str(i) if i % 3 else None))
        for i, (prompt, sampling) in enumerate(requests(1))
    ]
    ranks = ThreadRanks(4, tmp_path, lambda group: cuda_rank(folder, group, kind, graphs))
    found = []
    for engine in (ranks, cuda_rank(folder, ALONE, kind, graphs), load_engine(config, _silent)):
        clients, loop = drive(engine, tight(engine, config), wanted, aborts=(2, 9), compiler=PickyCompiler(VOCAB))
        assert loop.control_plane.stats().num_retracted_total > 0
        engine.close()
        found.append(clients)
    assert not ranks.errors and not any(ranks.failed_steps)
    assert not any(engine._grammars or engine._grammar_slots for engine in ranks.engines[1:])  # type: ignore[attr-defined]
    many, one, cpu = found
    assert many.tokens == one.tokens == cpu.tokens
    assert many.reasons == one.reasons == cpu.reasons
    for i, (_, sampling) in enumerate(wanted):
        if sampling.grammar is not None:
            assert PickyCompiler(VOCAB).follows(sampling.grammar, many.tokens.get(i, []))


def _silent(text: str, done: int = 0, total: int = 0) -> None:
    pass


def _nan(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * float("nan")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["inline", "late"])
def test_rows_that_are_not_finite_on_one_rank_fail_on_all(
    kind: str, overlap: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The NaN come from rank 1 and reach the others through the sums."""
    folder = folders["llama-bias-untied"]
    wanted = [([3 + i, 4, 5, 6, 7], SamplingParams(temperature=0, max_tokens=6, seed=0)) for i in range(14)]

    def build(group: Group) -> TorchEngine:
        engine = cuda_rank(folder, group, kind)
        if group.rank == 1:
            _spoil_attention(engine, at=2)
        return engine

    alone = cuda_rank(folder)
    clean, _ = drive(alone, tight(alone, config_of(folder)), wanted, overlap=overlap)
    alone.close()
    ranks = ThreadRanks(4, tmp_path, build)
    clients, _ = drive(ranks, tight(ranks, config_of(folder)), wanted, overlap=overlap)
    ranks.close()
    assert not ranks.errors
    assert not any(ranks.failed_steps)
    errors = {i for i, reason in clients.reasons.items() if reason is FinishReason.ERROR}
    assert 0 < len(errors) < len(wanted)
    for i in clients.reasons.keys() - errors:
        assert clients.tokens[i] == clean.tokens[i]


def _spoil_attention(engine: TorchEngine, at: int) -> None:
    """What this rank's attention gives in the last layer of forward number `at` from now on is not a number."""
    attention, last = engine.attention, engine.model.config.num_layers - 1
    inner, calls = attention.attend, 0

    def attend(layer: int, *args: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += layer == last
        found = inner(layer, *args)
        if layer == last and calls == at:
            return found * float("nan")
        return found

    attention.attend = attend  # type: ignore[method-assign]


def _out_of_memory(hidden: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["inline", "late"])
def test_out_of_memory_on_one_rank_ends_all(kind: str, rank: int, folders: dict[str, Path], tmp_path: Path) -> None:
    """Alone, an engine goes on; here the others wait in a collective."""
    folder = folders["qwen3-untied"]

    def build(group: Group) -> TorchEngine:
        engine = cuda_rank(folder, group, kind)
        if group.rank == rank:
            break_forward(engine, 3, _out_of_memory)
        return engine

    ranks = ThreadRanks(2, tmp_path, build)
    with pytest.raises(EngineDeadError if rank == 0 else RankDied, match="out of memory"):
        drive(ranks, tight(ranks, config_of(folder)), requests(1))
    assert ranks.killed() == (rank == 0)
    ranks.close()


def test_a_rank_that_ends_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["llama-bias-untied"]

    def gone(hidden: torch.Tensor) -> torch.Tensor:
        raise SystemExit("rank 2 has left")

    def build(group: Group) -> TorchEngine:
        engine = cuda_rank(folder, group)
        if group.rank == 2:
            break_forward(engine, 4, gone)
        return engine

    ranks = ThreadRanks(4, tmp_path, build)
    with pytest.raises(RankDied, match="rank 2 has left"):
        drive(ranks, tight(ranks, config_of(folder)), requests(2))
    ranks.close()


def test_ranks_that_would_run_different_programs_refuse_to(tmp_path: Path) -> None:
    def work(group: Group) -> str:
        check_agreement(group, "the same")
        try:
            check_agreement(group, "flashinfer attention" if group.rank < 2 else "torch_sdpa attention")
        except ConfigError as error:
            return str(error)
        return ""

    said = on_ranks(3, tmp_path, work)
    assert all(f"rank {rank} has " in text and "use identical devices" in text for rank, text in enumerate(said))
