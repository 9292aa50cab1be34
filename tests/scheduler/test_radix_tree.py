"""The prefix cache: matching, splitting, locking, and what is evicted in which order."""

from __future__ import annotations

import pytest

from minisgl.scheduler.api import ControlPlaneError
from minisgl.scheduler.policies import CachePolicy
from minisgl.scheduler.reference.page_pool import PagePool
from minisgl.scheduler.reference.radix import Node, RadixTree, check_tree

SIZE = 2


def make_tree(policy: CachePolicy = "lru", num_pages: int = 16, page_size: int = SIZE) -> RadixTree:
    return RadixTree(PagePool(num_pages), page_size, policy)


def hold(tree: RadixTree, tokens: list[int]) -> Node:
    """A handle on `tokens`, which enter the tree as far as they are not in it."""
    num_pages = len(tokens) // tree.page_size
    match = tree.match(tree.root, tokens, 0, num_pages)
    handle = tree.descend(tree.root, match)
    had = len(match.pages)
    if had < num_pages:
        pages = tree.take(num_pages - had)
        handle = tree.append(handle, tokens[had * tree.page_size : num_pages * tree.page_size], pages)
    check_tree(tree)
    return handle


def cache(tree: RadixTree, tokens: list[int]) -> None:
    tree.release(hold(tree, tokens))
    check_tree(tree)


def cached(tree: RadixTree, tokens: list[int]) -> list[int]:
    return tree.match(tree.root, tokens, 0, len(tokens) // tree.page_size).pages


def evict(tree: RadixTree, count: int = 1) -> list[int]:
    """The pages evicted, in the order in which they were freed."""
    before = tree.pool.free_pages()
    tree.evict(count)
    check_tree(tree)
    after = tree.pool.free_pages()
    assert after[: len(before)] == before
    return after[len(before) :]


def test_a_match_covers_whole_pages_of_the_common_prefix() -> None:
    tree = make_tree()
    cache(tree, [1, 2, 3, 4, 5, 6])
    assert cached(tree, [1, 2, 3, 4, 5, 6]) == [0, 1, 2]
    assert cached(tree, [1, 2, 3, 4, 5, 6, 7, 8]) == [0, 1, 2]
    assert cached(tree, [1, 2, 3, 4, 9, 9]) == [0, 1]
    assert cached(tree, [1, 2, 3, 9]) == [0]
    assert cached(tree, [1, 9]) == []
    assert cached(tree, [2, 1]) == []


def test_a_match_stops_at_its_limit_and_goes_on_from_a_node() -> None:
    tree = make_tree()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    cache(tree, tokens)
    assert tree.match(tree.root, tokens, 0, 3).pages == [0, 1, 2]
    assert tree.match(tree.root, tokens, 0, 0).pages == []
    below = tree.descend(tree.root, tree.match(tree.root, tokens, 0, 1))
    assert tree.match(below, tokens, 1, 3).pages == [1, 2]
    assert tree.match(below, tokens, 1, 1).pages == []


def test_a_match_crosses_nodes() -> None:
    tree = make_tree()
    cache(tree, [1, 2])
    cache(tree, [1, 2, 3, 4])
    cache(tree, [1, 2, 3, 4, 5, 6])
    assert tree.num_nodes == 3
    assert cached(tree, [1, 2, 3, 4, 5, 6]) == [0, 1, 2]


def test_matching_changes_nothing() -> None:
    tree = make_tree()
    cache(tree, [1, 2, 3, 4])
    before = (tree.num_nodes, tree.clock, tree.num_evictable, [node.stamp for node in tree.nodes()])
    tree.match(tree.root, [1, 2, 9, 9], 0, 2)
    assert before == (tree.num_nodes, tree.clock, tree.num_evictable, [node.stamp for node in tree.nodes()])


def test_a_second_sequence_splits_the_edge_at_the_page_where_it_differs() -> None:
    tree = make_tree()
    cache(tree, [1, 2, 3, 4, 5, 6])
    cache(tree, [1, 2, 3, 9, 5, 6])
    assert tree.num_nodes == 3
    assert sorted(tree.tree_pages()) == [
        ((1, 2), 0),
        ((1, 2, 3, 4), 1),
        ((1, 2, 3, 4, 5, 6), 2),
        ((1, 2, 3, 9), 3),
        ((1, 2, 3, 9, 5, 6), 4),
    ]


def test_a_split_keeps_locks_stamps_and_frequencies_and_the_depth_of_handles() -> None:
    tree = make_tree("lfu")
    cache(tree, [1, 2, 3, 4])
    handle = hold(tree, [1, 2, 3, 4])
    other = hold(tree, [1, 2, 9, 9])
    upper = handle.parent
    assert upper is not None
    assert (handle.tokens, upper.tokens) == ([3, 4], [1, 2])
    assert (handle.lock, upper.lock) == (1, 2)
    assert (handle.stamp, upper.stamp) == (1, 1)
    assert (handle.frequency, upper.frequency) == (2, 3)
    tree.release(other)
    tree.release(handle)
    check_tree(tree)
    assert tree.num_protected == 0


def test_locked_pages_are_protected_with_all_their_ancestors() -> None:
    tree = make_tree()
    cache(tree, [1, 2, 3, 4])
    cache(tree, [1, 2, 5, 6])
    handle = hold(tree, [1, 2, 3, 4])
    assert (tree.num_evictable, tree.num_protected) == (1, 2)
    assert tree.match(tree.root, [1, 2, 5, 6], 0, 2).num_unlocked == 1
    assert evict(tree) == [2]
    with pytest.raises(ControlPlaneError, match="more pages were evicted than the radix tree can give"):
        tree.evict(1)
    tree.release(handle)
    assert (tree.num_evictable, tree.num_protected) == (2, 0)


def test_releasing_twice_is_noticed() -> None:
    tree = make_tree()
    handle = hold(tree, [1, 2])
    tree.release(handle)
    with pytest.raises(ControlPlaneError, match="unlocked more often than locked"):
        tree.release(handle)


def test_check_tree_child_with_more_locks_than_its_parent_is_refused() -> None:
    tree = make_tree()
    cache(tree, [1, 2, 3, 4])
    child = hold(tree, [1, 2, 5, 6])
    child.lock += 1
    with pytest.raises(ControlPlaneError, match="a node has more locks than its parent"):
        check_tree(tree)


def test_the_tree_refuses_tokens_that_it_has_and_pages_that_are_not_full() -> None:
    tree = make_tree()
    cache(tree, [1, 2])
    with pytest.raises(ControlPlaneError, match="holds these tokens already"):
        tree.append(tree.root, [1, 2], tree.take(1))
    with pytest.raises(ControlPlaneError, match="1 tokens do not fill 1 pages"):
        tree.append(tree.root, [3], tree.take(1))


def test_insert_leaves_to_the_caller_what_the_tree_has_already() -> None:
    tree = make_tree()
    cache(tree, [1, 2, 3, 4])  # pages 0, 1
    pages = tree.take(3)
    handle, had = tree.insert(tree.root, [1, 2, 3, 4, 5, 6], pages, 0)
    assert had == 2
    tree.release(handle)
    check_tree(tree)
    assert cached(tree, [1, 2, 3, 4, 5, 6]) == [0, 1, pages[2]]


def test_lru_evicts_what_was_released_longest_ago() -> None:
    tree = make_tree()
    for first in (1, 2, 3):  # pages 0, 1, 2
        cache(tree, [first, 0])
    cache(tree, [1, 0])
    assert evict(tree, 3) == [1, 2, 0]


def test_lfu_evicts_what_was_used_least_and_then_what_is_oldest() -> None:
    tree = make_tree("lfu")
    for first in (1, 2, 3, 1, 1, 3):  # used 3, 1, 2 times
        cache(tree, [first, 0])
    cache(tree, [4, 0])
    assert evict(tree, 4) == [1, 3, 2, 0]


def test_a_leaf_is_trimmed_from_its_end_and_only_as_much_as_needed() -> None:
    tree = make_tree()
    cache(tree, [1, 2, 3, 4, 5, 6])
    assert evict(tree, 2) == [2, 1]
    assert cached(tree, [1, 2, 3, 4, 5, 6]) == [0]
    assert evict(tree, 1) == [0]
    assert tree.num_nodes == 0


def test_parents_go_after_their_children_whatever_their_age() -> None:
    tree = make_tree()
    cache(tree, [1, 2, 3, 4])  # pages 0, 1
    cache(tree, [1, 2, 5, 6])  # page 2: splits; the parent is the youngest now
    cache(tree, [7, 8])  # page 3
    assert evict(tree, 4) == [1, 2, 0, 3]


def test_take_evicts_what_the_pool_lacks_and_then_pops() -> None:
    tree = make_tree(num_pages=4)
    cache(tree, [1, 2, 3, 4])  # pages 0, 1
    assert tree.num_available == 4
    assert tree.take(3) == [1, 2, 3]
    assert tree.num_available == 1


def test_a_tree_with_pages_of_one_token_matches_every_token() -> None:
    tree = make_tree(page_size=1)
    cache(tree, [1, 2, 3])
    cache(tree, [1, 2, 4, 5])
    assert cached(tree, [1, 2, 3]) == [0, 1, 2]
    assert cached(tree, [1, 2, 4, 5]) == [0, 1, 3, 4]
    assert evict(tree, 1) == [2]


def test_touching_one_leaf_for_ever_does_not_grow_the_eviction_heap() -> None:
    tree = make_tree()
    cache(tree, [3, 4])
    for _ in range(1000):
        cache(tree, [1, 2])
    assert len(tree.heap) < 200
    assert evict(tree, 2) == [0, 1]


def test_reset_forgets_all() -> None:
    tree = make_tree()
    cache(tree, [1, 2])
    hold(tree, [3, 4])
    tree.reset()
    check_tree(tree)
    assert (tree.tree_pages(), tree.num_available) == ([], 16)
