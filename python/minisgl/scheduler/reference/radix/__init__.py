"""The prefix cache: a radix tree over whole pages (`tree`) and the order in which it gives pages back (`evict`)."""

from minisgl.scheduler.reference.radix.tree import Match, Node, RadixTree

__all__ = ["Match", "Node", "RadixTree"]
