//! View of the radix tree for people: its largest nodes.
//!
//! Invariants: read only; the same tree gives the same view as in the Python reference, whatever the arena's node ids.

use std::collections::BTreeSet;

use super::nodes::{NO_CHECKPOINT, NodeId, ROOT};
use super::tree::RadixTree;

/// Tokens of an edge that a `TreeNode` shows at most.
const SHOWN_TOKENS: usize = 16;

/// A node of the radix tree as shown to people. Ids are the same in every implementation: the edge's first page plus 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeNode {
    /// Id of the node: its edge's first page plus 1, so above 0.
    pub id: u64,
    /// Id of the parent; 0 for the root.
    pub parent: u64,
    /// Number of tokens of the edge.
    pub num_tokens: usize,
    /// Number of tokens from the root to the node's end.
    pub depth: usize,
    /// Number of locks: handles on the node and below it.
    pub lock: u32,
    /// Ticks of the tree's clock since the node was unlocked; 0 while it is locked.
    pub age: u64,
    /// Number of child nodes.
    pub num_children: u32,
    /// Whether a pin locks the node.
    pub is_pinned: bool,
    /// Whether the state at the node's end is saved.
    pub has_state: bool,
    /// First tokens of the edge, at most 16.
    pub begins: Vec<i32>,
}

/// Totals of the radix tree, and its largest nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeView {
    /// Number of nodes, without the root.
    pub num_nodes: usize,
    /// Number of tokens of all nodes.
    pub num_tokens: usize,
    /// Nodes with the most tokens, largest first; ties by id.
    pub nodes: Vec<TreeNode>,
}

impl RadixTree {
    /// Returns a view with the `limit` largest nodes. `pinned`: the nodes that a pin locks.
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

    /// Returns the id shown for a node. It is made from a page, because pages are allocated alike in every
    /// implementation and arena ids are not.
    fn shown_id(&self, id: NodeId) -> u64 {
        self.node(id).pages.first().map_or(0, |&page| u64::from(page) + 1)
    }
}
