"""Two backends in one engine, PREFILL,DECODE: each row is what its own backend alone makes of it. On stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.attention import TorchSdpa, flashinfer
from minisgl.attention.backend import BackendError, Machine, Shape, choose
from minisgl.attention.flash_attention import FlashAttention
from minisgl.attention.flashinfer import FlashInfer, Heads
from minisgl.attention.pair import Pair
from minisgl.config import ConfigError, EngineConfig
from minisgl.engine import building
from minisgl.engine.graphs import RunAgain
from minisgl.engine.loading import load_engine
from minisgl.sampling_params import SamplingParams
from tests.helpers import flash_attention as helpers_flash_attention
from tests.helpers import flashinfer as helpers_flashinfer
from tests.helpers.attention import Rig
from tests.helpers.models import save, tiny_model

CPU = torch.device("cpu")
DTYPE = torch.float16
PAGE, COLUMNS, WINDOWS = 256, 2, (None, 300)
WITHIN = 0.02
HEADS = Heads(4, 2, 8)
H200 = Machine("cuda", (9, 0), frozenset(("flashinfer", "flash_attention")))
BIG_PAGES = Shape(torch.bfloat16, 128, 256)
NAMES = ("torch_sdpa", "flashinfer", "flash_attention")


class _NoEvent:
    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", helpers_flashinfer.module())
    monkeypatch.setitem(sys.modules, "flash_attn", helpers_flash_attention.module())
    monkeypatch.setattr(flashinfer, "recorded_event", _NoEvent)


def backend(name: str, rig: Rig, graph_sizes: tuple[int, ...] = ()) -> Any:
    if name == "torch_sdpa":
        return TorchSdpa(rig.pool, DTYPE, CPU, WINDOWS)
    if name == "flash_attention":
        return FlashAttention(rig.pool, CPU, WINDOWS, max_pages_per_row=COLUMNS, graph_sizes=graph_sizes)
    sizes = {"max_rows": rig.max_rows, "max_pages_per_row": COLUMNS, "graph_sizes": graph_sizes}
    return FlashInfer(rig.pool, HEADS, DTYPE, CPU, WINDOWS, **sizes)


def rig_of(seed: int) -> Rig:
    return Rig(CPU, HEADS, DTYPE, windows=WINDOWS, page_size=PAGE, columns=COLUMNS, seed=seed)


@pytest.mark.parametrize("pair", [*permutations(NAMES, 2)], ids=",".join)
@pytest.mark.parametrize(("num_decode", "num_prefill"), [(3, 2), (1, 1), (4, 0), (0, 3)])
def test_each_row_is_what_its_backend_makes_of_it(pair: tuple[str, str], num_decode: int, num_prefill: int) -> None:
    rig = rig_of(num_decode)
    prefill, decode = (backend(name, rig) for name in pair)
    ours = Pair(rig.pool, *(backend(name, rig) for name in pair))
    for _ in range(2):
        rig.check(ours, rig.step(num_decode, num_prefill), WITHIN)
    step = rig.step(num_decode, num_prefill)
    for layer in range(len(WINDOWS)):
        q, k, v = rig.qkv(len(step[0].out_loc))
        outputs = []
        for each in (ours, prefill, decode):
            each.prepare(*step)
            outputs.append(each.attend(layer, q, k, v))
        together, of_prefill, of_decode = outputs
        assert torch.equal(together[:num_decode], of_decode[:num_decode])
        assert torch.equal(together[num_decode:], of_prefill[num_decode:])


def test_all_rows_are_stored_before_any_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, done = rig_of(0), list[str]()
    prefill, decode = backend("torch_sdpa", rig), backend("torch_sdpa", rig)

    def told(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*args: Any) -> Any:
            done.append(f"{what} {len(args[1])}")
            return call(*args)

        return calling

    monkeypatch.setattr(rig.pool, "store", told("store", rig.pool.store))
    for each in (prefill, decode):
        monkeypatch.setattr(each, "read", told("read", each.read))
    ours, (rows, table) = Pair(rig.pool, prefill, decode), rig.step(3, 2)
    ours.prepare(rows, table)
    tokens = len(rows.out_loc)
    ours.attend(0, *rig.qkv(tokens))
    assert done == [f"store {tokens}", "read 3", f"read {tokens - 3}"]


@pytest.mark.parametrize("decode", ["flashinfer", "flash_attention"])
def test_graphs_are_those_of_the_backend_that_decodes(decode: str) -> None:
    rig = rig_of(0)
    ours = Pair(rig.pool, backend("torch_sdpa", rig), backend(decode, rig, (4,)))
    rig.check_graph(ours, RunAgain, 4, WITHIN, ((1, 1), (1, 500), (400, 512), (1, 3)))


# ------------------------------------------------------------------------------------------------------------ choice


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        ("flashinfer,flash_attention", ("flashinfer", "fa2", "flash_attention")),
        ("flash_attention,flashinfer", ("flash_attention", "", "flashinfer")),
        ("flashinfer:fa3,torch_sdpa", ("flashinfer", "fa3", "torch_sdpa")),
        ("flashinfer:fa3,flashinfer", ("flashinfer", "fa3", "")),  # its decode is the same in both
    ],
)
def test_pairs_that_serve(asked: str, choice: tuple[str, str, str]) -> None:
    found = choose(asked, H200, BIG_PAGES)
    assert (found.name, found.prefill, found.decode) == choice
    assert "asked for" in found.reason


@pytest.mark.parametrize(
    ("asked", "machine", "shape", "says"),
    [
        ("flashinfer,auto", H200, BIG_PAGES, "a pair is of two of torch_sdpa, flashinfer"),
        ("flashinfer,xformers", H200, BIG_PAGES, "a pair is of two of torch_sdpa, flashinfer"),
        ("flashinfer,torch_sdpa,flashinfer", H200, BIG_PAGES, "a pair is of two of"),
        ("flashinfer,flash_attention", H200, Shape(torch.bfloat16, 128, 16), "flash_attention: --page-size 16"),
        ("flash_attention,flashinfer", H200, Shape(torch.bfloat16, 80, 256), "flashinfer: head_dim 80"),
        ("torch_sdpa,flashinfer", Machine("cpu", (0, 0), frozenset()), BIG_PAGES, "flashinfer: it needs a CUDA device"),
    ],
)
def test_a_pair_that_cannot_serve_says_which_and_why(asked: str, machine: Machine, shape: Shape, says: str) -> None:
    with pytest.raises(BackendError, match=f"--attention-backend {asked}: {says}"):
        choose(asked, machine, shape)


# ------------------------------------------------------------------------------------------------------ whole engines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("qwen3-tied", head_dim=64, max_position_embeddings=1024)
    return save(model, tmp_path_factory.mktemp("pairs"), tokenizer=True)


def _settings(folder: Path, backend: str, **settings: Any) -> dict[str, Any]:
    sizes = {"page_size": 256, "num_pages": 12, "max_running_requests": 4, "max_prefill_length": 256}
    return {"model": str(folder), "dtype": "float16", "attention_backend": backend, **sizes, **settings}


def _tokens(folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[list[int]]:
    from minisgl import LLM

    monkeypatch.setattr(building, "machine", lambda device: H200)
    llm = LLM(**_settings(folder, backend, device="inline", cuda_graph_max_bs=2, **settings))
    prompts = [[3 + (7 * i + j) % 120 for j in range(length)] for i, length in enumerate((4, 300, 9, 270))]
    try:
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        return [out.token_ids for out in llm.generate(prompts, params, progress=False)]
    finally:
        llm.close()


def test_an_engine_with_a_pair_writes_what_one_backend_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two stand-ins compute a row alike, so the tokens are the same to the bit."""
    expected = _tokens(folder, "flashinfer", monkeypatch)
    for pair in ("flashinfer,flash_attention", "flash_attention,flashinfer"):
        helpers_flash_attention.calls.clear()
        assert _tokens(folder, pair, monkeypatch) == expected
        kernels = {name for name, _ in helpers_flash_attention.calls}
        assert kernels == {"with_kvcache" if pair.endswith("flash_attention") else "varlen"}


def test_the_cpu_engine_refuses_what_it_would_not_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flash_attn"):
        monkeypatch.delitem(sys.modules, name)
    config = EngineConfig(**_settings(folder, "torch_sdpa,flashinfer", device="cpu"))
    with pytest.raises(ConfigError, match="torch_sdpa,flashinfer: flashinfer: it needs a CUDA device, and this is cpu"):
        load_engine(config, lambda text, done=0, total=0: None)
