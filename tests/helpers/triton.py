"""Triton kernels without a GPU: compiled for one that is not there (with a stand-in for the driver, a launch compiles
and stops), and run by Triton's interpreter.

Kernels are launched by the code that launches them on a GPU, so that types, constants, warps and what
Triton specialises on are those of a real call; a machine that has a GPU is not touched.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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


def interpreted(program: str) -> str:
    """Standard output of a Python program in which kernels are interpreted, on tensors of the CPU. The interpreter must
    be on before Triton is imported: a process of its own."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path[1:], "."])}
    program = f"from tests.helpers.triton import let_scalars_be_bounds\nlet_scalars_be_bounds()\n{program}"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def let_scalars_be_bounds() -> None:
    """For Triton 3.6 beside numpy 2.5: a scalar of the interpreter is an array of one number, which numpy no longer
    takes for an index, so that `range` over one fails. Later versions of Triton see to it by themselves."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


def let_products_be_plain() -> None:
    """The interpreter keeps bfloat16 as the integers of its bits, and `tl.dot` multiplies those. And it takes numpy's
    matrix product, whose library may sum a row in another order at another place of a tile (OpenBLAS does, on AVX2): no
    kernel could then give a row the same result in any batch. Sums here go through the inner index in order."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def values(x: Any, kind: Any) -> Any:
        if x.dtype.scalar == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32).astype(kind)
        return x.data.astype(kind)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        left, right = values(a, d.data.dtype), values(b, d.data.dtype)
        total = np.zeros_like(d.data)
        for k in range(left.shape[-1]):
            total += left[:, k, None] * right[k]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
