//! Which leaf of the radix tree goes next.
//!
//! Invariants: under LRU all unlocked nodes stand in one list by stamp. A parent is never older than its children, so
//! the head is a leaf that may go: O(1). Under LFU the unlocked leaves stand in an ordered set: O(log n).

use std::collections::BTreeSet;

use super::lru::LruList;
use super::nodes::{NodeId, Nodes, ROOT};
use crate::api::CachePolicy;

/// The order in which nodes are evicted. A tree that caches nothing has the one of LRU, empty.
pub(super) enum EvictionOrder {
    Lru(LruList),
    /// The unlocked leaves by frequency, then stamp.
    Lfu(BTreeSet<(u64, u64, NodeId)>),
}

impl EvictionOrder {
    pub fn new(policy: CachePolicy) -> Self {
        match policy {
            CachePolicy::Lfu => Self::Lfu(BTreeSet::new()),
            CachePolicy::Lru | CachePolicy::Naive => Self::Lru(LruList::new()),
        }
    }

    pub fn clear(&mut self) {
        match self {
            Self::Lru(list) => list.clear(),
            Self::Lfu(leaves) => leaves.clear(),
        }
    }

    pub fn unlocked(&mut self, nodes: &Nodes, id: NodeId) {
        match self {
            Self::Lru(list) => list.push(id),
            Self::Lfu(_) => self.leaf(nodes, id),
        }
    }

    pub fn locked(&mut self, nodes: &Nodes, id: NodeId) {
        let node = nodes.get(id);
        if node.stamp == 0 {
            return; // never unlocked so far
        }
        match self {
            Self::Lru(list) => list.remove(id),
            Self::Lfu(leaves) => {
                leaves.remove(&(node.frequency, node.stamp, id));
            }
        }
    }

    /// A child of `parent` was removed: it may be a leaf now.
    pub fn child_removed(&mut self, nodes: &Nodes, parent: NodeId) {
        if let Self::Lfu(_) = self {
            self.leaf(nodes, parent);
        }
    }

    /// `upper` was split off the unlocked node `lower`, which is its child: as old, but it goes later.
    pub fn split(&mut self, lower: NodeId, upper: NodeId) {
        if let Self::Lru(list) = self {
            list.insert_after(lower, upper);
        }
    }

    /// The leaf that goes next.
    pub fn next(&self) -> Option<NodeId> {
        match self {
            Self::Lru(list) => list.head(),
            Self::Lfu(leaves) => leaves.first().map(|&(_, _, id)| id),
        }
    }

    /// The unlocked nodes (LRU) or unlocked leaves (LFU) that stand in it. For checks.
    pub fn known(&self) -> Vec<NodeId> {
        match self {
            Self::Lru(list) => list.nodes(),
            Self::Lfu(leaves) => leaves.iter().map(|&(_, _, id)| id).collect(),
        }
    }

    fn leaf(&mut self, nodes: &Nodes, id: NodeId) {
        let node = nodes.get(id);
        if let Self::Lfu(leaves) = self
            && id != ROOT
            && node.lock == 0
            && node.num_children == 0
        {
            leaves.insert((node.frequency, node.stamp, id));
        }
    }
}
