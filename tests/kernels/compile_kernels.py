"""Every Triton kernel compiles for Hopper (sm_90) on a machine without a GPU, as its launcher calls it.
`test_kernels_compile.py` runs these tests.

With a stand-in for the driver a launch compiles and stops, so that types, constants, warps and what Triton specialises
on are those of a real call; a machine that has a GPU is not touched.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import minisgl.kernels
from minisgl.kernels import experts, experts_tiles, ops
from minisgl.models.config import parse_config
from minisgl.models.decoder import Decoder, build_model

SM_90_SHARED_BYTES = 227 * 1024  # that one program may have
_NOWHERE = 990  # a device number that no machine has: Triton keeps what it compiled by device


class _Driver:
    """What `JITFunction.run` asks before it launches."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return _NOWHERE

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@dataclass(frozen=True)
class Compiled:
    module: str
    name: str
    key: str  # differs with whatever Triton compiled apart
    shared_bytes: int
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)


@contextlib.contextmanager
def compiling(monkeypatch: pytest.MonkeyPatch, cache: Path, capability: int = 90) -> Iterator[list[Compiled]]:
    """Launches inside compile for this compute capability and run nothing; yields what was compiled, in order.
    `cache` is an empty folder: nothing from an earlier run is taken."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        assert all(isinstance(size, int) and size > 0 for size in grid), grid
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        name = self.fn.__name__
        compiled = Compiled(
            self.module, name, kernel.hash, kernel.metadata.shared, kernel.asm["cubin"], kernel.asm["ptx"]
        )
        if compiled.key not in {other.key for other in found}:
            found.append(compiled)
        return kernel

    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(driver, "_active", _Driver(GPUTarget("cuda", capability, 32)))
        yield found


def launched_names(module: ModuleType) -> set[str]:
    """The kernels that a module's source launches: `name[grid](...)`."""
    assert module.__file__ is not None
    calls = [node for node in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(node, ast.Call)]
    subscripts = [call.func.value for call in calls if isinstance(call.func, ast.Subscript)]
    return {name.id for name in subscripts if isinstance(name, ast.Name) and name.id.startswith("_")}


def resources(compiled: Compiled, folder: Path) -> dict[str, int]:
    """REG (registers a thread) and STACK (bytes that did not fit into them), as cuobjdump of Triton's wheel reads the
    binary; empty where the wheel brings none."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return {}
    binary = folder / f"{compiled.name}.cubin"
    binary.write_bytes(compiled.cubin)
    said = subprocess.run([str(tool), "-res-usage", str(binary)], capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", said)}


pytest.importorskip("triton")
MODULES = sorted(file.stem for file in Path(minisgl.kernels.__path__[0]).glob("*_triton.py"))


def kernels(name: str) -> ModuleType:
    return importlib.import_module(f"minisgl.kernels.{name}")


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def call_pages(module: ModuleType) -> None:
    table, block = int32(9, 600), int32(64)
    for shift in (0, 1):  # what a step packs lies at any multiple of 4 bytes
        module.apply_updates(table, block[shift : shift + 8].view(2, 4), block[16 + shift : 26])
        module.gather_pages(table, block[shift : shift + 3], block[8 + shift : 12 + shift], int32(20))


def call_kv_store(module: ModuleType) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for heads, dim in ((8, 128), (2, 64), (1, 24)):
            pools = [torch.zeros(20, heads, dim, dtype=dtype) for _ in range(2)]
            merged = torch.zeros(3, 4 * heads, dim, dtype=dtype)
            module.store_kv(*pools, int32(4)[1:], merged[:, :heads], merged[:, heads : 2 * heads])


def on_meta(tokens: int, dtype: torch.dtype, *, hidden: int, inner: int, count: int, k: int) -> tuple[Tensor, ...]:
    """Inputs of `kernels.experts.run`, without values."""
    empty = partial(torch.empty, device="meta", dtype=dtype)
    chosen = torch.empty(tokens, k, dtype=torch.int64, device="meta")
    gate_up, down = empty(count, 2 * inner, hidden), empty(count, hidden, inner)
    return empty(tokens, hidden), gate_up, down, chosen, empty(tokens, k)


QWEN3_30B_A3B = {"hidden": 2048, "inner": 768, "count": 128, "k": 8}
ODD = {"hidden": 100, "inner": 36, "count": 5, "k": 2}


def call_experts(module: ModuleType) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for tile in experts_tiles.tiles(dtype):
            module.run(*on_meta(256, dtype, **QWEN3_30B_A3B), tile)
    module.run(*on_meta(256, torch.float16, **QWEN3_30B_A3B), experts_tiles.tiles(torch.float16)[1])
    module.run(*on_meta(256, torch.bfloat16, **ODD), experts_tiles.tiles(torch.bfloat16)[1])


def call_routing(module: ModuleType) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for count, k in ((128, 8), (7, 3), (8, 8), (512, 10)):
            for normalise in (False, True):
                module.route(torch.empty(3, count, dtype=dtype, device="meta"), k, normalise)


def call_token_mask(module: ModuleType) -> None:
    for shift in (0, 1):
        module.mask_tokens(torch.zeros(3, 1000), int32(8)[shift : shift + 2], int32(70)[shift : shift + 64].view(2, 32))


def call_ops(module: ModuleType) -> None:
    for call in (call_pages, call_kv_store, call_routing, call_token_mask):
        call(module)


CALLS: dict[str, Callable[[ModuleType], None]] = {
    "experts_triton": call_experts,
    "ops_triton": call_ops,
}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Compiled]]:
    with compiling(monkeypatch, tmp_path) as found:
        yield found


@pytest.mark.parametrize("name", MODULES)
def test_kernels_compile_for_hopper(name: str, compiled: list[Compiled], tmp_path: Path) -> None:
    module = kernels(name)
    CALLS[name](module)
    assert {kernel.name for kernel in compiled} == launched_names(module), "a kernel is launched by no call above"
    for kernel in compiled:
        assert ".target sm_90" in kernel.ptx
        assert kernel.shared_bytes <= SM_90_SHARED_BYTES, kernel.name
        assert resources(kernel, tmp_path).get("STACK", 0) == 0, f"{kernel.name} has too few registers"


def test_where_a_step_lies_in_its_block_compiles_nothing_again(compiled: list[Compiled]) -> None:
    """Packed step data starts at any multiple of 4 bytes, and its sizes change from step to step: were a kernel
    specialised on either, a step would wait for the compiler."""
    module = kernels("ops_triton")
    call_pages(module)
    assert sorted(kernel.name for kernel in compiled) == ["_apply", "_gather"]
    compiled.clear()
    store = kernels("ops_triton")
    pools = [torch.zeros(20, 2, 64) for _ in range(2)]
    k = torch.zeros(3, 2, 64)
    for shift in (0, 1, 2):
        store.store_kv(*pools, int32(8)[shift : shift + 3], k, k)
    assert len(compiled) == 1
    compiled.clear()
    call_token_mask(kernels("ops_triton"))
    assert len(compiled) == 1


def test_experts_of_real_models_meet_tensor_cores_in_wide_loads(compiled: list[Compiled]) -> None:
    """Kernels that compile to loads of single values, or to plain multiplications, are right and slow."""
    module = kernels("experts_triton")
    for tile in experts_tiles.tiles(torch.bfloat16):
        compiled.clear()
        module.run(*on_meta(256, torch.bfloat16, **QWEN3_30B_A3B), tile)
        for product in [kernel for kernel in compiled if kernel.name in ("_gate_up", "_down")]:
            assert ("wgmma.mma_async" if tile.block_m >= 64 else "mma.sync") in product.ptx
            assert "cp.async.cg.shared.global" in product.ptx  # 16 bytes each
            assert "cp.async.ca.shared.global" not in product.ptx  # fewer
            assert product.shared_bytes <= tile.shared_bytes(torch.bfloat16)  # by which devices with less leave it out


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_experts": 32,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": 0,
}


def model_without_values(dtype: torch.dtype) -> Decoder:
    with torch.inference_mode():
        return build_model(parse_config(MOE), dtype=dtype, device=torch.device("meta"))


@torch.inference_mode()
def forward(model: Decoder, tokens: int) -> None:
    """Whatever looks at a value raises."""
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    model.logits(model.forward(ids, ids, lambda layer, q, k, v: torch.empty_like(q)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_never_ask_the_device_and_compile_only_in_the_warm_up(
    dtype: torch.dtype, compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_without_values(dtype)
    with pytest.raises(NotImplementedError, match=r"[Mm]eta"):
        forward(model, 5)  # the grouped form looks
    for kernel in (experts, ops):
        monkeypatch.setattr(kernel, "serves", lambda tensor: True)
    with torch.inference_mode():
        model.warm_up()
    after = len(compiled)
    assert after
    for tokens in (1, 2, 3, 16, 33, 100, 128, 513, 4096):
        forward(model, tokens)
    assert len(compiled) == after
