"""The collectives over gloo, how sizes are cut, and what a rank sees when a peer is gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minisgl.distributed import ALONE, Group, GroupError, Shard, ShardRange
from tests.helpers.ranks import on_ranks


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_collectives(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    def work(group: Group) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], int]:
        mine = torch.arange(5).to(dtype) + 10 * group.rank
        reduced, heard = group.all_reduce(mine.clone()), group.broadcast(mine.clone())
        return reduced, heard, group.gather(mine), group.all_reduce_min(7 - group.rank)

    for rank, (reduced, heard, gathered, least) in enumerate(on_ranks(size, tmp_path, work)):
        assert reduced.tolist() == [size * i + 10 * sum(range(size)) for i in range(5)]
        assert heard.tolist() == [0, 1, 2, 3, 4]
        assert [part.tolist() for part in gathered] == (
            [[10 * r + i for i in range(5)] for r in range(size)] if rank == 0 else []
        )
        assert least == 8 - size


def test_sums_are_the_same_bits_on_every_rank(tmp_path: Path) -> None:
    """What failures in lock-step rest on."""

    def work(group: Group) -> torch.Tensor:
        generator = torch.Generator().manual_seed(group.rank)
        sizes = (1, 7, 1000, 70_001)
        return torch.cat([group.all_reduce(torch.randn(n, generator=generator) * 1e3) for n in sizes])

    first, *others = on_ranks(4, tmp_path, work)
    assert all(torch.equal(first, other) for other in others)


def test_integers_wrap(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, lambda group: group.all_reduce(torch.tensor([2**63 - 1])).item())
    assert found == [-2, -2]


def test_rank_gets_an_error_after_its_peer_exits(tmp_path: Path) -> None:
    program = (
        "import os, sys, torch; from pathlib import Path; from minisgl.distributed.torch_group import TorchGroup\n"
        "TorchGroup(Path(sys.argv[1]), 1, 2, torch.device('cpu')); os._exit(0)"
    )
    from minisgl.distributed.torch_group import TorchGroup

    rendezvous = tmp_path / "rendezvous"
    with subprocess.Popen([sys.executable, "-c", program, str(rendezvous)]) as peer:
        group = TorchGroup(rendezvous, 0, 2, torch.device("cpu"))
        assert peer.wait() == 0
        with pytest.raises(GroupError, match="allreduce on rank 0 of 2"):
            group.all_reduce(torch.zeros(3))
    group.close()
    group.close()
    with pytest.raises(GroupError, match="closed"):
        group.broadcast(torch.zeros(3))


def test_group_of_one_needs_no_peer() -> None:
    mine = torch.arange(3)
    assert ALONE.all_reduce(mine) is mine and ALONE.broadcast(mine) is mine
    assert ALONE.gather(mine)[0] is mine and ALONE.all_reduce_min(4) == 4


@pytest.mark.parametrize("size", [1, 4, 7, 12, 131])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_shard_ranges_cover_a_dimension_once(size: int, ranks: int) -> None:
    covered = [i for rank in range(ranks) for i in range(*_ends(ShardRange.of(size, rank, ranks)))]
    assert covered == list(range(size))


def test_fewer_kv_heads_than_ranks_are_held_by_neighbours() -> None:
    assert [ShardRange.of_kv_heads(2, rank, 8).start for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [_ends(ShardRange.of_kv_heads(6, rank, 3)) for rank in range(3)] == [(0, 2), (2, 4), (4, 6)]


def test_a_shard_of_a_merged_tensor_has_a_range_of_each_part() -> None:
    shard = Shard(1, (ShardRange.of(10, 1, 2), ShardRange.of(10, 1, 2)))
    assert shard.whole == 20 and shard.ranges() == [(5, 5), (15, 5)]


def _ends(cut: ShardRange) -> tuple[int, int]:
    return cut.start, cut.start + cut.length
