//! A list of nodes by age, linked by node id.
//!
//! Invariants: a node is in the list at most once; every change is O(1).

use super::nodes::{NO_NODE, NodeId};
use crate::numbers::ToUsize;

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

    /// All nodes of the list, oldest first. For checks.
    pub fn nodes(&self) -> Vec<NodeId> {
        let mut found = Vec::new();
        let mut at = self.head;
        while at != NO_NODE {
            found.push(at);
            at = self.links[at.to_usize()].next;
        }
        found
    }
}
