"""Every Triton kernel compiles for Hopper (sm_90) on a machine without a GPU, as its launcher calls it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import minisgl.kernels
from tests.helpers_triton import SM_90_SHARED_BYTES, Compiled, compiling, launched_names, resources

pytest.importorskip("triton")
MODULES = sorted(file.stem for file in Path(minisgl.kernels.__path__[0]).glob("*_triton.py"))


def kernels(name: str) -> ModuleType:
    return importlib.import_module(f"minisgl.kernels.{name}")


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def call_pages(module: ModuleType) -> None:
    table, block = int32(9, 600), int32(64)
    for shift in (0, 1):  # what a step packs lies at any multiple of 4 bytes
        module.apply_changes(table, block[shift : shift + 8].view(2, 4), block[16 + shift : 26])
        module.gather_pages(table, block[shift : shift + 3], block[8 + shift : 12 + shift], int32(20))


def call_kv_store(module: ModuleType) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for heads, dim in ((8, 128), (2, 64), (1, 24)):
            pools = [torch.zeros(20, heads, dim, dtype=dtype) for _ in range(2)]
            merged = torch.zeros(3, 4 * heads, dim, dtype=dtype)
            module.store_kv(*pools, int32(4)[1:], merged[:, :heads], merged[:, heads : 2 * heads])


CALLS: dict[str, Callable[[ModuleType], None]] = {"pages_triton": call_pages, "kv_store_triton": call_kv_store}


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


def test_a_kernel_that_does_not_compile_is_noticed(compiled: list[Compiled], tmp_path: Path) -> None:
    source = tmp_path / "planted.py"
    source.write_text(
        "import triton, triton.language as tl\n@triton.jit\ndef _bad(x):\n    tl.store(x, tl.nothing(3))\n"
    )
    spec = importlib.util.spec_from_file_location("planted", source)
    assert spec is not None and spec.loader is not None
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    with pytest.raises(Exception, match="nothing"):
        planted._bad[(1,)](int32(4))


def test_where_a_step_lies_in_its_block_compiles_nothing_again(compiled: list[Compiled]) -> None:
    """Packed step data starts at any multiple of 4 bytes, and its sizes change from step to step: were a kernel
    specialised on either, a step would wait for the compiler."""
    module = kernels("pages_triton")
    call_pages(module)
    assert sorted(kernel.name for kernel in compiled) == ["_apply", "_gather"]
    compiled.clear()
    store = kernels("kv_store_triton")
    pools = [torch.zeros(20, 2, 64) for _ in range(2)]
    k = torch.zeros(3, 2, 64)
    for shift in (0, 1, 2):
        store.store_kv(*pools, int32(8)[shift : shift + 3], k, k)
    assert len(compiled) == 1
