//! The radix tree for people who watch it: its largest nodes.
//!
//! Invariants: read only; the same tree gives the same view as the reference does, whatever the nodes' own numbers are.

use std::collections::BTreeSet;

use super::nodes::{NO_CHECKPOINT, NodeId, ROOT};
use super::tree::RadixTree;

/// How many of its first tokens a node shows.
const SHOWN_TOKENS: usize = 16;

/// `id` is the first page of the edge plus one, `parent` that of the parent, 0: the root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeNode {
    /// Above 0.
    pub id: u64,
    /// The number of the parent; 0: the root.
    pub parent: u64,
    /// Tokens of the edge.
    pub num_tokens: usize,
    /// Tokens from the root to its end.
    pub depth: usize,
    /// Handles on it and below it.
    pub lock: u32,
    /// Ticks of the tree's clock since nobody holds it; 0 while somebody does.
    pub age: u64,
    /// Nodes that follow it.
    pub num_children: u32,
    /// Whether a pin holds it.
    pub is_pinned: bool,
    /// Whether the state at its end is kept.
    pub has_state: bool,
    /// The first tokens of the edge.
    pub begins: Vec<i32>,
}

/// Numbers of the whole tree, and of its nodes the largest, the largest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeView {
    /// Without the root.
    pub num_nodes: usize,
    /// The tokens of all nodes.
    pub num_tokens: usize,
    /// Those with the most tokens; of as many, those with lower ids.
    pub nodes: Vec<TreeNode>,
}

impl RadixTree {
    /// The `limit` largest nodes; `pinned`: those that a pin holds.
    pub fn view(&self, limit: usize, pinned: &BTreeSet<NodeId>) -> TreeView {
        let size_of = |&id: &NodeId| (usize::MAX - self.node(id).pages.len(), self.shown_id(id));
        let mut ids: Vec<NodeId> = self.ids().collect();
        if limit < ids.len() {
            ids.select_nth_unstable_by_key(limit, size_of);
            ids.truncate(limit);
        }
        ids.sort_unstable_by_key(size_of);
        TreeView {
            num_nodes: self.num_nodes(),
            num_tokens: (self.num_evictable() + self.num_protected()) * self.page_size(),
            nodes: ids.iter().map(|&id| self.shown(id, pinned.contains(&id))).collect(),
        }
    }

    fn shown(&self, id: NodeId, is_pinned: bool) -> TreeNode {
        let node = self.node(id);
        let (mut depth, mut at) = (0, id);
        while at != ROOT {
            depth += self.node(at).tokens.len();
            at = self.node(at).parent;
        }
        TreeNode {
            id: self.shown_id(id),
            parent: self.shown_id(node.parent),
            num_tokens: node.tokens.len(),
            depth,
            lock: node.lock,
            age: if node.lock == 0 { self.clock - node.stamp } else { 0 },
            num_children: node.num_children,
            is_pinned,
            has_state: node.checkpoint != NO_CHECKPOINT,
            begins: node.tokens.iter().take(SHOWN_TOKENS).copied().collect(),
        }
    }

    /// Pages are given out alike in every implementation; the arena's numbers are not.
    fn shown_id(&self, id: NodeId) -> u64 {
        self.node(id).pages.first().map_or(0, |&page| u64::from(page) + 1)
    }
}
