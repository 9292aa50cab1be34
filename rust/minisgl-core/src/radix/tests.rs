//! Tests of the cost of tree operations, counted in pages compared, tokens copied and nodes visited, not in time.

use super::nodes::Nodes;
use super::{ROOT, RadixTree};
use crate::api::CachePolicy;
use crate::numbers::ToI32;
use crate::page_pool::PagePool;

const MANY: usize = if cfg!(miri) { 200 } else { 10_000 };

/// Returns a tree of page size 1 with `num_leaves` unlocked sequences of 8 tokens that share no prefix.
fn grown(num_leaves: usize, policy: CachePolicy) -> RadixTree {
    let mut tree = RadixTree::new(PagePool::new(8 * num_leaves + 4096), 1, policy, None);
    for leaf in 0..num_leaves {
        let tokens: Vec<i32> = (0..8).map(|i| (8 * leaf + i).to_i32()).collect();
        let mut pages = Vec::new();
        tree.take(8, &mut pages).expect("pages");
        let (handle, _) = tree.insert(ROOT, 0, &tokens, &pages, 0).expect("new tokens");
        tree.release(handle).expect("locked");
    }
    tree
}

fn cost<T>(tree: &mut RadixTree, work: impl FnOnce(&mut RadixTree) -> T) -> u64 {
    let before = tree.ops.get();
    work(tree);
    tree.ops.get() - before
}

#[test]
fn match_cost_is_the_matched_pages_for_any_tree_size() {
    for policy in [CachePolicy::Lru, CachePolicy::Lfu] {
        for num_leaves in [10, MANY] {
            let mut tree = grown(num_leaves, policy);
            let tokens: Vec<i32> = (40..48).chain([-1; 100]).collect();
            assert_eq!(cost(&mut tree, |tree| tree.find(ROOT, 0, &tokens, 0, tokens.len())), 8);
        }
    }
}

#[test]
fn insert_cost_is_the_new_tokens() {
    for num_leaves in [10, MANY] {
        let mut tree = grown(num_leaves, CachePolicy::Lru);
        let tokens: Vec<i32> = (40..48).chain(1_000_000..1_001_000).collect();
        let mut pages = tree.find(ROOT, 0, &tokens, 0, 8).pages;
        tree.take(1000, &mut pages).expect("pages");
        let spent = cost(&mut tree, |tree| {
            tree.insert(ROOT, 0, &tokens, &pages, 0).expect("new tokens")
        });
        assert!((1008..=1016).contains(&spent), "{spent}");
    }
}

#[test]
fn evict_cost_is_independent_of_the_number_of_leaves() {
    for policy in [CachePolicy::Lru, CachePolicy::Lfu] {
        for num_leaves in [100, MANY] {
            let mut tree = grown(num_leaves, policy);
            assert_eq!(cost(&mut tree, |tree| tree.evict(8 * 50).expect("unlocked")), 50);
            assert_eq!(cost(&mut tree, |tree| tree.evict(3).expect("unlocked")), 1);
        }
    }
}

#[test]
fn child_table_grows_with_the_nodes() {
    let mut nodes = Nodes::new(2, 1);
    let first_page = |child: i32| [child / 10, child % 10];
    let ids: Vec<_> = (0..1000)
        .map(|child| {
            let id = nodes.create(ROOT, 0);
            nodes.get_mut(id).tokens.extend(first_page(child));
            nodes.link(id);
            id
        })
        .collect();
    for id in ids.iter().step_by(3) {
        nodes.retire(*id);
    }
    for (child, id) in (0..).zip(ids) {
        let expected = (child % 3 != 0).then_some(id);
        assert_eq!(nodes.child(ROOT, 0, &first_page(child)), expected);
    }
    assert_eq!(nodes.len(), 666);
}
