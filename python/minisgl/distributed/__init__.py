"""Tensor parallelism: a group of processes, its collectives, and how sizes are cut among its ranks.

Keeps true: nothing of the package is imported here; torch only by `torch_group`, so that a process without a group of
its own does without.
"""

from minisgl.distributed.group import ALONE, Group, GroupError
from minisgl.distributed.shard import Cut, Shard

__all__ = ["ALONE", "Cut", "Group", "GroupError", "Shard"]
