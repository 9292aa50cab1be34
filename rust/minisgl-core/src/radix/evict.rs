//! Which leaf of the radix tree goes next.
//!
//! Keeps true: under LRU all unlocked nodes stand in one list by stamp. A parent is never older than its children, so
//! the head is a leaf that may go: O(1). Under LFU the unlocked leaves stand in an ordered set: O(log n).
//! Doesn't know: what the pages hold, how the tree is changed.

use std::collections::BTreeSet;

use super::tree::{NO_NODE, NodeId};

/// Neighbours of a node in the list of unlocked nodes.
#[derive(Clone, Copy)]
struct Link {
    prev: NodeId,
    next: NodeId,
}

const UNLINKED: Link = Link {
    prev: NO_NODE,
    next: NO_NODE,
};

/// The list of unlocked nodes, oldest first. Links are by node id, outside of the nodes.
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

    /// The youngest of all.
    pub fn push(&mut self, node: NodeId) {
        self.insert_between(node, self.tail, NO_NODE);
    }

    /// `node` is as old as `older`, but goes later.
    pub fn insert_after(&mut self, older: NodeId, node: NodeId) {
        let next = self.links[older as usize].next;
        self.insert_between(node, older, next);
    }

    pub fn remove(&mut self, node: NodeId) {
        let Link { prev, next } = self.links[node as usize];
        match prev {
            NO_NODE => self.head = next,
            _ => self.links[prev as usize].next = next,
        }
        match next {
            NO_NODE => self.tail = prev,
            _ => self.links[next as usize].prev = prev,
        }
        self.links[node as usize] = UNLINKED;
    }

    fn insert_between(&mut self, node: NodeId, prev: NodeId, next: NodeId) {
        if self.links.len() <= node as usize {
            self.links.resize(node as usize + 1, UNLINKED);
        }
        self.links[node as usize] = Link { prev, next };
        match prev {
            NO_NODE => self.head = node,
            _ => self.links[prev as usize].next = node,
        }
        match next {
            NO_NODE => self.tail = node,
            _ => self.links[next as usize].prev = node,
        }
    }

    /// All nodes of the list, oldest first. For checks.
    pub fn nodes(&self) -> Vec<NodeId> {
        let mut found = Vec::new();
        let mut at = self.head;
        while at != NO_NODE {
            found.push(at);
            at = self.links[at as usize].next;
        }
        found
    }
}

/// The unlocked leaves by frequency, then stamp.
pub(super) type LfuSet = BTreeSet<(u64, u64, NodeId)>;
