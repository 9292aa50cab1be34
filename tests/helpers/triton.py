"""Triton kernels run by Triton's interpreter, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest


def interpreted(program: str) -> str:
    """Run a Python program with interpreted kernels on CPU tensors; return its stdout. The interpreter must be enabled
    before Triton is imported, hence a process of its own."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path[1:], "."])}
    program = f"from tests.helpers.triton import let_scalars_be_bounds\nlet_scalars_be_bounds()\n{program}"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def let_scalars_be_bounds() -> None:
    """Patch Triton 3.6 for numpy 2.5: a scalar of the interpreter is an array of one element, which numpy no longer
    accepts as an index, so that `range` over one fails. Later versions of Triton do this themselves."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend


def let_products_be_plain() -> None:
    """Patch the interpreter's `tl.dot` to multiply bfloat16 values, not the integers of their bits, and to sum the
    inner index in order. numpy's matrix product may sum a row differently at another place of a tile (OpenBLAS does, on
    AVX2), so that no kernel could give a row the same result in any batch."""
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
