"""Sizes of CUDA graphs, and their capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.engine.graph import Outputs, capture_all, graph_sizes


@pytest.mark.parametrize(
    ("max_bs", "max_rows", "sizes"),
    [
        (None, 64, (1, 2, 4, 8, 16, 32, 48, 64)),
        (None, 5, (1, 2, 4, 5)),
        (20, 64, (1, 2, 4, 8, 16, 20)),
        (1, 64, (1,)),
        (0, 64, ()),
        (None, 4096, (1, 2, 4, 8, *range(16, 257, 16))),
    ],
)
def test_graph_sizes(max_bs: int | None, max_rows: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_bs, max_rows) == sizes


def test_graphs_are_captured_largest_first_and_told() -> None:
    order: list[int] = []
    lines: list[str] = []
    free = iter([900 * 2**20, 400 * 2**20])

    def forward_of(size: int) -> Any:
        order.append(size)
        return lambda: Outputs(torch.zeros(size, 3), torch.ones(1))

    graphs = capture_all(
        (1, 4, 2),
        forward_of,
        lambda forward: forward(),
        lambda text, done=0, total=0: lines.append(f"{text} {done}/{total}"),
        lambda: next(free),
    )
    assert order == [4, 2, 1]
    assert sorted(graphs) == [1, 2, 4]
    assert lines[:3] == [f"capturing CUDA graphs {i}/3" for i in (1, 2, 3)]
    assert lines[3].startswith("CUDA graphs: 3 sizes up to 4, 500 MiB")
