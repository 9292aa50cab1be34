"""What the torch engine decides at its start: graphs, pages, whether there is a device."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from minisgl.attention import Eager, LayerAttention, TorchSdpa
from minisgl.attention.backend import Machine
from minisgl.attention.flash_attention import FlashAttention
from minisgl.attention.flashinfer import FlashInfer
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.api import EngineInfo
from minisgl.engine.building import build_torch_engine, check_device, graphs_for, num_pages
from minisgl.layers import experts


def test_without_a_backend_for_them_there_are_no_graphs() -> None:
    lines: list[str] = []

    class Dense:
        graph_obstacle = ""

    config = EngineConfig(max_running_requests=4)
    tell = lambda text, done=0, total=0: lines.append(text)  # noqa: E731
    for can in (FlashInfer, FlashAttention):
        assert graphs_for(config, Dense(), can, tell) == (1, 2, 4)  # type: ignore[arg-type]
    assert not lines
    assert graphs_for(config, Dense(), TorchSdpa, tell) == ()  # type: ignore[arg-type]
    assert lines == [f"CUDA graphs: none: TorchSdpa: {TorchSdpa.graph_obstacle}"]


def test_eager_captures_no_graphs_and_says_so() -> None:
    """The attention `eager` decodes without graphs, too: it has an obstacle."""
    lines: list[str] = []

    class Dense:
        graph_obstacle = ""

    assert Eager.graph_obstacle
    config = EngineConfig(max_running_requests=4, cuda_graph_max_bs=0)
    for can in (FlashInfer, FlashAttention, TorchSdpa):
        assert graphs_for(config, Dense(), can, lambda text, done=0, total=0: lines.append(text)) == ()  # type: ignore[arg-type]
    assert lines == ["CUDA graphs: none: --cuda-graph-max-bs 0 asks for eager forwards"] * 3


def test_mixtures_of_experts_have_graphs_where_their_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    class Mixture:
        @property
        def graph_obstacle(self) -> str:
            return experts.graph_obstacle()

    config = EngineConfig(max_running_requests=4)
    tell = lambda text, done=0, total=0: lines.append(text)  # noqa: E731
    monkeypatch.setattr("minisgl.layers.experts.triton_is_installed", lambda: True)
    assert graphs_for(config, Mixture(), FlashInfer, tell) == (1, 2, 4)  # type: ignore[arg-type]
    assert not lines
    monkeypatch.setattr("minisgl.layers.experts.triton_is_installed", lambda: False)
    assert graphs_for(config, Mixture(), FlashInfer, tell) == ()  # type: ignore[arg-type]
    assert lines == ["CUDA graphs: none: without Triton the host looks at which experts a step uses"]


def test_pool_and_graphs_are_of_the_rows_of_a_cuda_device() -> None:
    config = EngineConfig()
    assert num_pages(config, 1000, 64, 10_000_000) == 256 * 4

    class Dense:
        graph_obstacle = ""

    tell = lambda text, done=0, total=0: None  # noqa: E731
    assert graphs_for(config, Dense(), FlashInfer, tell, "cuda:0")[-1] == 256  # type: ignore[arg-type]
    assert graphs_for(config, Dense(), FlashInfer, tell, "cpu")[-1] == 64  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["flash_attention", "flash_attention,flashinfer", "flashinfer,flash_attention"])
def test_flash_attention_that_is_asked_for_gets_pages_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    device = Machine("cuda", (9, 0), frozenset({"flashinfer", "flash_attention"}))
    monkeypatch.setattr("minisgl.engine.building.machine", lambda _: device)
    model = SimpleNamespace(attention=[LayerAttention(heads=4, kv_heads=2, k_dim=64, v_dim=64)], graph_obstacle="")
    pool = SimpleNamespace(k=[torch.zeros(1, dtype=torch.bfloat16)])
    lines: list[str] = []

    class Chosen(Exception): ...

    def tell(text: str, done: int = 0, total: int = 0) -> None:
        lines.append(text)
        raise Chosen

    def start(config: EngineConfig) -> None:
        info = EngineInfo("torch", None, 9, 99, (), 9, config.page_size, "cpu", "bfloat16")
        build_torch_engine(config, model, info, pool, tell)  # type: ignore[arg-type]

    with pytest.raises(Chosen):
        start(EngineConfig.of({"attention_backend": backend, "page_size": None}))
    assert "takes pages of multiples of 256 tokens, here of 256" in lines[0]
    with pytest.raises(ConfigError, match="--page-size 16 is no multiple of 256"):
        start(EngineConfig.of({"attention_backend": backend, "page_size": 16}))
    assert EngineConfig.of({"attention_backend": "flashinfer"}).page_size == 16


@pytest.mark.parametrize(("steps", "ranges"), [(0, []), (5, ["attention", "pop"])])
def test_jobs_on_a_device_are_nvtx_ranges_while_steps_are_profiled(
    monkeypatch: pytest.MonkeyPatch, steps: int, ranges: list[str]
) -> None:
    found: list[str] = []

    class Ran(Exception): ...

    def backend(*_: object) -> None:
        raise Ran

    monkeypatch.setattr("minisgl.engine.building.machine", lambda _: Machine("cuda", (9, 0), frozenset()))
    monkeypatch.setattr("minisgl.engine.building._backend", backend)
    monkeypatch.setattr("torch.cuda.Stream", lambda _: SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: None)
    monkeypatch.setattr("torch.cuda.stream", lambda _: nullcontext())
    monkeypatch.setattr("torch.cuda.nvtx.range_push", found.append)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: found.append("pop"))
    model = SimpleNamespace(attention=[LayerAttention(heads=4, kv_heads=2, k_dim=64, v_dim=64)], graph_obstacle="")
    info = EngineInfo("torch", None, 9, 99, (), 9, 16, "cuda:0", "bfloat16")
    pool = SimpleNamespace(k=[torch.zeros(1, dtype=torch.bfloat16)])
    config = EngineConfig.of({"profile_steps": steps})
    with pytest.raises(Ran):
        build_torch_engine(config, model, info, pool, lambda *_: None)  # type: ignore[arg-type]
    assert found == ranges


def test_pool_from_free_memory() -> None:
    config = EngineConfig(max_running_requests=1000)
    assert num_pages(config, 1000, 10**6, 10_000_000) == 8500
    assert num_pages(EngineConfig(memory_ratio=0.5), 1000, 10**6, 10_000_000) == 5000
    assert num_pages(EngineConfig(max_running_requests=2), 1000, 64, 10_000_000) == 8  # no more than rows can use
    assert num_pages(EngineConfig(num_pages=7), 1000, 64, 7000) == 7


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (EngineConfig(num_pages=8), r"--num-pages 8: .* at most 7 pages fit"),
        (EngineConfig(memory_ratio=0.1), r"--memory-ratio 0.1: .* raise it"),
    ],
)
def test_a_pool_that_does_not_fit_names_the_flag(config: EngineConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        num_pages(config, 1000, 64, 7000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_missing_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: .*use --device cpu"):
        check_device("cuda")
