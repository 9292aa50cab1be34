//! Eviction order of the radix tree: which leaf is evicted next.
//!
//! Invariants: under LRU all unlocked nodes are in one list by stamp. A parent is never older than its children, so the
//! head is an evictable leaf: O(1). Under LFU the unlocked leaves are in an ordered set: O(log n).

use std::collections::BTreeSet;

use super::nodes::{NO_NODE, NodeId, Nodes, ROOT};
use crate::api::CachePolicy;
use crate::numbers::ToUsize;

/// Order in which nodes are evicted. A tree without caching uses `Lru`, empty.
pub(super) enum EvictionOrder {
    Lru(LruList),
    /// Unlocked leaves, by (frequency, stamp).
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

    /// Updates the order after a child of `parent` was removed: `parent` may be a leaf now.
    pub fn child_removed(&mut self, nodes: &Nodes, parent: NodeId) {
        if let Self::Lfu(_) = self {
            self.leaf(nodes, parent);
        }
    }

    /// Adds `upper`, the new parent of the unlocked node `lower`. It has the same age and is evicted after `lower`.
    pub fn split(&mut self, lower: NodeId, upper: NodeId) {
        if let Self::Lru(list) = self {
            list.insert_after(lower, upper);
        }
    }

    /// Returns the leaf to evict next, or `None` if there is none.
    pub fn next(&self) -> Option<NodeId> {
        match self {
            Self::Lru(list) => list.head(),
            Self::Lfu(leaves) => leaves.first().map(|&(_, _, id)| id),
        }
    }

    /// Returns the unlocked nodes (LRU) or unlocked leaves (LFU) in the order. For invariant checks.
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

/// Neighbours of a node in the LRU list.
#[derive(Clone, Copy)]
struct Link {
    prev: NodeId,
    next: NodeId,
}

const UNLINKED: Link = Link {
    prev: NO_NODE,
    next: NO_NODE,
};

/// Doubly linked list of unlocked nodes, oldest first. Links are indexed by node id and stored outside of the nodes.
pub(super) struct LruList {
    links: Vec<Link>,
    head: NodeId,
    tail: NodeId,
}

impl LruList {
    pub fn new() -> Self {
        Self {
            links: Vec::new(),
            head: NO_NODE,
            tail: NO_NODE,
        }
    }

    pub fn head(&self) -> Option<NodeId> {
        (self.head != NO_NODE).then_some(self.head)
    }

    pub fn clear(&mut self) {
        self.links.clear();
        self.head = NO_NODE;
        self.tail = NO_NODE;
    }

    /// Appends `node` as the youngest.
    pub fn push(&mut self, node: NodeId) {
        self.insert_between(node, self.tail, NO_NODE);
    }

    /// Inserts `node` right after `older`, with the same age.
    pub fn insert_after(&mut self, older: NodeId, node: NodeId) {
        let next = self.links[older.to_usize()].next;
        self.insert_between(node, older, next);
    }

    pub fn remove(&mut self, node: NodeId) {
        let Link { prev, next } = self.links[node.to_usize()];
        match prev {
            NO_NODE => self.head = next,
            _ => self.links[prev.to_usize()].next = next,
        }
        match next {
            NO_NODE => self.tail = prev,
            _ => self.links[next.to_usize()].prev = prev,
        }
        self.links[node.to_usize()] = UNLINKED;
    }

    fn insert_between(&mut self, node: NodeId, prev: NodeId, next: NodeId) {
        if self.links.len() <= node.to_usize() {
            self.links.resize(node.to_usize() + 1, UNLINKED);
        }
        self.links[node.to_usize()] = Link { prev, next };
        match prev {
            NO_NODE => self.head = node,
            _ => self.links[prev.to_usize()].next = node,
        }
        match next {
            NO_NODE => self.tail = node,
            _ => self.links[next.to_usize()].prev = node,
        }
    }

    /// Returns all nodes of the list, oldest first. For invariant checks.
    pub fn nodes(&self) -> Vec<NodeId> {
        let mut nodes = Vec::new();
        let mut at = self.head;
        while at != NO_NODE {
            nodes.push(at);
            at = self.links[at.to_usize()].next;
        }
        nodes
    }
}
