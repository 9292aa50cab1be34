"""What the FlashInfer backend asks of the package: it attends as torch does, on a stand-in with the same calls, and on
the package itself where it is installed, with plain softmax in the place of its kernels."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention import flashinfer
from minisgl.attention.backend import BackendError
from minisgl.attention.flashinfer import FlashInfer, Heads, renormalise, workspace_bytes
from minisgl.engine import sampler
from minisgl.engine.graphs import RunAgain
from tests.helpers import flashinfer as helpers_flashinfer
from tests.helpers.attention import Rig

CPU = torch.device("cpu")
DTYPE = torch.float16  # the package knows no float32
HEADS = Heads(4, 2, 8)
TENSOR_CORES = Heads(8, 2, 8)
GROUP_OF_THREE = Heads(9, 3, 8)
COLUMNS, WINDOWS = 6, (None, 5)
WITHIN = 0.02  # of outputs below 4, with 11 bits


class Fence:
    def __init__(self, waits: list[int]) -> None:
        self._waits = waits

    def synchronize(self) -> None:
        self._waits.append(1)


class _Kernels:
    """What a compiled module of the package is to its Python: `plan` and `paged_run` (or `run`), C++ signatures."""

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self._kind = kind
        self._window = bool(arguments[7])
        self._planned: dict[int, list[Tensor]] = {}

    def build_and_load(self) -> _Kernels:
        return self

    def plan(self, *given: Any) -> list[int]:
        assert len(given) == {"decode": 15, "fa2": 19, "fa3": 16}[self._kind]
        float_workspace, int_workspace, pinned = given[:3]
        assert (
            float_workspace.dtype == torch.uint8
            and len(int_workspace) == len(pinned) == helpers_flashinfer.INT_WORKSPACE
        )
        if self._kind == "decode":
            lists, rest = [given[3]], given[4:]
            batch, heads, kv_heads, _, graph, window, *_ = rest
            assert heads // kv_heads in helpers_flashinfer.GROUPS
            helpers_flashinfer.log.append(f"decode {batch} {'graph' if graph else 'eager'}")
        else:
            lists = list(given[3:6])
            tokens, batch, _heads, _kv_heads, _page_size, graph, _dim, _dim_vo, causal, window = given[6:16]
            assert tokens == int(lists[0][-1])
            name = f"prefill {batch}" if causal else f"decode {batch} {'graph' if graph else 'eager'}"
            helpers_flashinfer.log.append(name)
        assert (window >= 0) == self._window
        for tensor in lists:
            assert tensor.dtype == torch.int32 and tensor.device.type == "cpu" and tensor.is_contiguous()
        self._planned[int_workspace.data_ptr()] = [tensor.clone() for tensor in lists]
        return [len(self._planned)]

    def run(self, *given: Any) -> None:
        assert self._kind == "decode" and len(given) == 19
        _, ints, _, q, k, v, indptr, indices, last, out, lse, layout, window, pdl = given[:14]
        assert lse is None and layout == 0 and not pdl
        (planned,) = self._planned[ints.data_ptr()]
        assert torch.equal(planned, indptr)
        out.copy_(helpers_flashinfer.attend_pages(q, (k, v), torch.arange(len(q) + 1), (indptr, indices, last), window))

    def ragged_run(self, *given: Any) -> None:
        raise AssertionError("minisgl has pages only")

    def paged_run(self, *given: Any) -> None:
        assert len(given) == {"fa2": 27, "fa3": 24}[self._kind]
        _, ints, _, q, k, v, qo_indptr, indptr, indices, last, out, lse, mask, layout, window, pdl = given[:16]
        assert lse is None and layout == 0 and not pdl and mask in (0, 1)
        planned_qo, planned, lens = self._planned[ints.data_ptr()]
        assert torch.equal(planned_qo, qo_indptr) and torch.equal(planned, indptr)
        assert torch.equal(lens, (indptr.diff() - 1) * k.shape[1] + last)
        assert mask == 1 or len(q) == len(last)  # rows of one token need no mask
        out.copy_(helpers_flashinfer.attend_pages(q, (k, v), qo_indptr, (indptr, indices, last), window))


def with_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts plain softmax in the place of the package's kernels: all of its Python runs on the CPU, and what it hands to
    C++ is checked."""
    import flashinfer.decode
    import flashinfer.prefill

    def decode(*arguments: Any) -> _Kernels:
        return _Kernels("decode", arguments)

    def prefill(backend: str, *arguments: Any) -> _Kernels:
        return _Kernels(backend, arguments)

    empty = torch.empty

    def unpinned(*size: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
        return empty(*size, **settings)

    monkeypatch.setattr(flashinfer.decode, "gen_batch_decode_module", decode)
    monkeypatch.setattr(flashinfer.prefill, "gen_batch_prefill_module", prefill)
    for folder in (flashinfer.decode, flashinfer.prefill):
        monkeypatch.setattr(folder, "device_support_pdl", lambda device: False)
    monkeypatch.setattr(torch, "empty", unpinned)
    for cached in (flashinfer.decode.get_batch_decode_module, flashinfer.prefill.get_batch_prefill_module):
        cached.cache_clear()


@pytest.fixture(params=["stand-in", "package"])
def waits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    if request.param == "package":
        pytest.importorskip("flashinfer")
        with_plain_kernels(monkeypatch)
    else:
        monkeypatch.setitem(sys.modules, "flashinfer", helpers_flashinfer.module())
    monkeypatch.setattr(flashinfer, "recorded_event", lambda: Fence(found))
    helpers_flashinfer.log.clear()
    return found


def rig(heads: Heads = HEADS, seed: int = 0) -> Rig:
    return Rig(CPU, heads, DTYPE, windows=WINDOWS, page_size=4, columns=COLUMNS, seed=seed)


def backend(rig: Rig, graph_sizes: tuple[int, ...] = (), prefill: str = "fa2") -> FlashInfer:
    settings: dict[str, Any] = {"max_rows": rig.max_rows, "max_pages_per_row": rig.columns, "prefill": prefill}
    return FlashInfer(rig.pool, rig.heads, DTYPE, CPU, WINDOWS, graph_sizes=graph_sizes, **settings)


def check_steps(
    heads: Heads, prefill: str, seed: int, num_decode: int, num_prefill: int, plans: list[str], steps: int = 3
) -> None:
    mine = rig(heads, seed)
    ours = backend(mine, graph_sizes=(4,), prefill=prefill)
    for _ in range(steps):
        helpers_flashinfer.log.clear()
        mine.check(ours, mine.step(num_decode, num_prefill), WITHIN)
        assert helpers_flashinfer.log == [plan for plan in plans for _ in set(WINDOWS)]


@pytest.mark.parametrize(
    ("num_decode", "num_prefill", "plans"),
    [
        (5, 0, ["decode 5 eager"]),
        (4, 0, ["decode 4 graph"]),
        (0, 3, ["prefill 3"]),
        (4, 2, ["decode 4 eager", "prefill 2"]),
    ],
)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("heads", [HEADS, TENSOR_CORES, GROUP_OF_THREE], ids=["pairs", "tensor-cores", "threes"])
def test_attention_equals_torch_sdpa(
    waits: list[int], heads: Heads, seed: int, num_decode: int, num_prefill: int, plans: list[str]
) -> None:
    check_steps(heads, "fa2", seed, num_decode, num_prefill, plans)


def test_fa3_takes_prefill_and_leaves_decode(waits: list[int]) -> None:
    check_steps(TENSOR_CORES, "fa3", 0, 3, 2, ["decode 3 eager", "prefill 2"])


def test_a_wrapper_is_planned_again_only_after_its_fence(waits: list[int]) -> None:
    mine = rig()
    ours = backend(mine)
    ours.prepare(*mine.step(3, 0))
    assert not waits
    ours.prepare(*mine.step(0, 3))  # other wrappers
    assert not waits
    ours.prepare(*mine.step(2, 0))
    assert len(waits) == len(set(WINDOWS))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("Ninja build failed. Ninja output:\n[1/9] nvcc ...\nfatal error: no cuda.h"), "no cuda.h"),
        (FileNotFoundError("no such file: ninja"), "ninja"),
    ],
)
def test_kernels_that_cannot_be_compiled_say_what_to_do(
    waits: list[int], monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    mine = rig()
    ours = backend(mine)

    def plan(*args: object, **settings: object) -> None:
        raise error

    for planned in ours._eager_decode.values():
        monkeypatch.setattr(planned.wrapper, "plan", plan)
    with pytest.raises(BackendError, match=f"{says}.* install these, or use --attention-backend torch_sdpa"):
        ours.prepare(*mine.step(3, 0))


@pytest.mark.parametrize("heads", [HEADS, TENSOR_CORES], ids=["pairs", "tensor-cores"])
def test_a_graph_attends_to_the_rows_of_its_step(waits: list[int], heads: Heads) -> None:
    """And reads the pages where they are gathered: the package copies that list onto itself, which torch skips."""
    mine = rig(heads)
    ours = backend(mine, graph_sizes=(2, 4))
    mine.check_graph(ours, RunAgain, 4, WITHIN, ((1, 1), (1, 24), (20, 24), (1, 3)))
    places = set()
    for _ in range(3):
        ours.prepare(*mine.step(4, 0))
        wrapper = ours._decode[-1].wrapper
        buffers = (wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf)
        places.add(tuple(buffer.data_ptr() for buffer in buffers))
        assert wrapper._paged_kv_indices_buf.data_ptr() == ours._page_list.data_ptr()
    assert len(places) == 1


# ---------------------------------------------------------------------------------------------------------- workspace

H200 = 132  # multiprocessors


@pytest.mark.parametrize(
    ("heads", "sizes", "mebibytes"),
    [
        (Heads(16, 8, 128), (1, 256), 128),  # Qwen3-0.6B
        (Heads(32, 8, 128), (1, 256), 128),  # Llama-3.1-8B
        (Heads(64, 8, 128), (1, 256), 193),  # Qwen3-32B
        (Heads(64, 8, 128), (1, 512), 387),
        (Heads(64, 8, 128), (), 134),
        (Heads(64, 1, 128), (), 1065),
        (Heads(9, 3, 64), (1, 256), 128),  # SmolLM2-135M
    ],
)
def test_workspace_holds_the_largest_plan(heads: Heads, sizes: tuple[int, ...], mebibytes: int) -> None:
    assert -(-workspace_bytes(heads, H200, sizes) // 2**20) == mebibytes


# ----------------------------------------------------------------------------------------------------------- sampling


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    made = helpers_flashinfer.module()
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", made.sampling)


def random_rows(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    probabilities = torch.from_numpy(rng.standard_normal((16, 300)).astype(np.float32) * 3).softmax(-1)
    probabilities[::3] = probabilities[::3].masked_fill(probabilities[::3] < 0.01, 0.0)  # min_p was here
    top_k = torch.from_numpy(rng.choice([-1, 1, 5, 299, 300, 10_000], 16))
    top_p = torch.from_numpy(rng.choice([1.0, 0.9, 0.3], 16).astype(np.float32))
    return probabilities, top_k, top_p


@pytest.mark.parametrize("seed", range(5))
def test_renormalise_keeps_the_tokens_of_truncate(sampling: None, seed: int) -> None:
    """And as it was: a row draws the same whatever the kernels scale by."""
    probabilities, top_k, top_p = random_rows(seed)
    assert torch.equal(renormalise(probabilities, top_k, top_p), sampler.truncate(probabilities, top_k, top_p))


def test_nan_ends_at_the_first_kernel(sampling: None) -> None:
    probabilities, top_k, top_p = random_rows(0)
    probabilities[4] = float("nan")
    left = renormalise(probabilities, top_k, top_p)
    assert not left[4].any()
    others = torch.arange(16) != 4
    assert torch.equal(left[others], sampler.truncate(probabilities, top_k, top_p)[others])
