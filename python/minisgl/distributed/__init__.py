"""Tensor parallelism: a group of processes, its collectives, and the sharding of dimensions among its ranks.

`runner/ranks.py` starts and watches the processes. Start with `group.py`.

Invariants: only `torch_group` imports torch, so that a process without a group does not need it.
"""

from minisgl.distributed.group import ALONE, Group, GroupError
from minisgl.distributed.shard import Shard, ShardRange

__all__ = ["ALONE", "ShardRange", "Group", "GroupError", "Shard"]
