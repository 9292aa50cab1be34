"""Matrix products with padded rows: few sizes, the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.layers.experts import Experts
from minisgl.layers.products import MIN_BYTES, linear, pack, padded_rows


def test_few_numbers_of_rows_and_little_waste() -> None:
    found = [padded_rows(rows) for rows in range(1, 8193)]
    assert all(padded >= rows for rows, padded in enumerate(found, 1))
    assert found == sorted(found) and all(padded_rows(padded) == padded for padded in found)
    assert len(set(found)) < 100
    assert found[:16] == [*range(1, 17)]
    assert all(padded <= rows * 9 / 8 for rows, padded in enumerate(found, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 17, 33, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_that_of_torch(dtype: torch.dtype, rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 48, generator=generator), torch.randn(40, 48, generator=generator)
    extra = torch.randn(40, generator=generator) if bias else None
    exact = F.linear(x, weight, extra)
    found = linear(x.to(dtype), weight.to(dtype), None if extra is None else extra.to(dtype))
    assert found.shape == (rows, 40) and found.dtype is dtype and found.is_contiguous()
    torch.testing.assert_close(found.float(), exact, atol=1e-5 if dtype is torch.float32 else 0.2, rtol=0.02)


def test_kernels_are_asked_for_few_numbers_of_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of rows that torch has not seen before costs a compiled kernel, time and memory."""
    seen = set[int]()
    real = F.linear

    def spy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.add(x.shape[0])
        return real(x, weight, bias)

    monkeypatch.setattr(F, "linear", spy)
    weight = torch.zeros(4, 4, dtype=torch.bfloat16)
    experts = Experts("", 3, 4, 4, dtype=torch.bfloat16, device=torch.device("cpu"))
    experts.gate_up.zero_()
    experts.down.zero_()
    for rows in range(1, 300):
        x = torch.zeros(rows, 4, dtype=torch.bfloat16)
        linear(x, weight)
        experts(x, torch.tensor([[0, 2]]).expand(rows, 2), torch.ones(rows, 2, dtype=torch.bfloat16))
    assert seen == {padded_rows(rows) for rows in range(1, 300)} and len(seen) < 60


def test_packed_weights_give_the_same_product() -> None:
    weight = torch.randn(MIN_BYTES // 2 // 512, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed = pack(weight)
    if packed is None:
        pytest.skip("this machine's torch has no packed bfloat16 layout")
    x = torch.randn(21, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    torch.testing.assert_close(linear(x, weight.new_empty(0), None, packed), F.linear(x, weight), atol=0.5, rtol=0.02)
