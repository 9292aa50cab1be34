"""Products of halves with float32 sums: by the CPU engine's kernels, and by torch where those are missing."""

from __future__ import annotations

import sys

import pytest
import torch

from minisgl.config import ConfigError
from minisgl.layers.products import WideProduct, wide_product

pytestmark = pytest.mark.any_cpu

HALVES = [torch.bfloat16, torch.float16]


def _numbers(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(outputs, inputs, generator=generator).to(dtype)
    return table, torch.randn(33, inputs, generator=generator)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (131, 64), (160, 45), (1000, 256)])
def test_a_product_is_that_of_the_numbers(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    table, x = _numbers(outputs, inputs, dtype)
    exact = (x.double() @ table.double().T).float()
    if not WideProduct.serves(table):
        pytest.skip("this processor has no vectors")
    product = WideProduct(table)
    found = product(x)
    assert found.shape == (33, outputs) and found.is_contiguous()
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(wide_product(x, table), exact, rtol=1e-5, atol=1e-4)
    for rows in (0, 1, 2, 7, 8, 9, 32):
        assert torch.equal(product(x[:rows]), found[:rows])  # to the last bit
    halves = x.to(dtype)
    found = product(halves)
    torch.testing.assert_close(found, product(halves.float()), rtol=1e-5, atol=1e-4)
    for rows in (1, 2, 7, 8, 9, 32):
        assert torch.equal(product(halves[:rows]), found[:rows])


def test_unsupported_tables_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    table, _ = _numbers(16, 16, torch.bfloat16)
    assert not WideProduct.serves(table.float())
    assert not WideProduct.serves(table.to("meta"))
    monkeypatch.setenv("MINISGL_CPU_ISA", "scalar")
    assert not WideProduct.serves(table)
    monkeypatch.setenv("MINISGL_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match=r"MINISGL_CPU_ISA: 'sse9': must be one of scalar"):
        WideProduct.serves(table)
    monkeypatch.setitem(sys.modules, "minisgl._rust", None)  # as if it were not built
    monkeypatch.delattr("minisgl._rust", raising=False)
    assert not WideProduct.serves(table)


def test_nothing_of_the_table_is_needed_afterwards() -> None:
    table, x = _numbers(48, 32, torch.bfloat16)
    if not WideProduct.serves(table):
        pytest.skip("this processor has no vectors")
    product = WideProduct(table)
    before = product(x)
    table.zero_()
    assert torch.equal(product(x), before)
