"""The prefix cache: a radix tree over whole pages (`tree`) and its eviction order (`evict`)."""

from minisgl.scheduler.reference.radix.cache import RadixCache
from minisgl.scheduler.reference.radix.check import check_tree
from minisgl.scheduler.reference.radix.checkpoints import Checkpoints
from minisgl.scheduler.reference.radix.nodes import NO_CHECKPOINT, Node
from minisgl.scheduler.reference.radix.tree import Match, RadixTree

__all__ = ["NO_CHECKPOINT", "Checkpoints", "Match", "Node", "RadixCache", "RadixTree", "check_tree"]
