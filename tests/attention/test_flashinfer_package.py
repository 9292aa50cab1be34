"""The installed flashinfer has the calls that the stand-in has. Skipped where it is not installed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.helpers import flashinfer as stand_in

flashinfer = pytest.importorskip("flashinfer")


def calls(package: Any, sampling: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        for method in ("__init__", "plan", "run"):
            found[f"{name}.{method}"] = getattr(getattr(package, name), method)
    for name in ("top_k_renorm_probs", "top_p_renorm_probs"):
        found[name] = getattr(sampling, name)
    return found


@pytest.mark.parametrize("name", calls(stand_in, stand_in))
def test_parameters_are_those_of_the_stand_in(name: str) -> None:
    import flashinfer.sampling

    theirs = inspect.signature(calls(flashinfer, flashinfer.sampling)[name]).parameters
    mine = inspect.signature(calls(stand_in, stand_in)[name]).parameters
    given_by_place = [one for one in mine.values() if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [one.name for one in given_by_place] == list(theirs)[: len(given_by_place)]
    assert {one: found.default for one, found in mine.items()} == {one: theirs[one].default for one in mine}


def test_the_tile_sizes_and_cuts_that_the_workspace_counts_on_are_in_its_source() -> None:
    """What `flashinfer_workspace` was worked out from; another version may count otherwise."""
    from flashinfer.jit.env import FLASHINFER_INCLUDE_DIR

    scheduler = (FLASHINFER_INCLUDE_DIR / "flashinfer" / "attention" / "scheduler.cuh").read_text()
    for line in (
        "int num_blocks_per_sm = 2;",
        "uint32_t max_batch_size_if_split = max_grid_size / num_kv_heads;",
        "total_num_tiles_q = ceil_div(total_num_rows * gqa_group_size, cta_tile_q) + batch_size - 1;",
        "num_qo_heads * padded_batch_size * cta_tile_q * head_dim_vo * sizeof(float), 16,",
        "num_qo_heads * padded_batch_size * cta_tile_q * sizeof(float), 16,",
        "(enable_cuda_graph) ? (split_kv ? max_grid_size / gdy : batch_size) : new_batch_size;",
        "num_qo_heads * padded_batch_size * HEAD_DIM * sizeof(float), 16,",
    ):
        assert line in scheduler, line
    utilities = (FLASHINFER_INCLUDE_DIR / "flashinfer" / "utils.cuh").read_text()
    assert "if (avg_packed_qo_len > 64 && head_dim < 256) {" in utilities
