"""Tensor parallelism: a group of processes, its collectives, and how sizes are cut among its ranks.

Starting and watching the processes belongs to `runner/ranks.py`. Start with `group.py`.

Invariants: only `torch_group` imports torch, so that a process without a group does without.
"""

from minisgl.distributed.group import ALONE, Group, GroupError
from minisgl.distributed.shard import Cut, Shard

__all__ = ["ALONE", "Cut", "Group", "GroupError", "Shard"]
