"""Triton kernels run by Triton's interpreter, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest


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
