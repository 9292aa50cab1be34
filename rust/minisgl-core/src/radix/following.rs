//! What the tree knows of how a text goes on.
//!
//! Invariants: nothing is changed.

use super::nodes::{Namespace, NodeId};
use super::tree::RadixTree;

impl RadixTree {
    /// Up to `count` tokens that come after `tokens` in the edge below `node` in which they end; `node` stands for
    /// their first `first_page` pages. None of an edge that they do not fill a page of: children are known by whole
    /// pages. Of `namespace` only.
    pub fn following(
        &self,
        mut node: NodeId,
        tokens: &[i32],
        first_page: usize,
        count: usize,
        namespace: Namespace,
    ) -> &[i32] {
        let size = self.page_size();
        let mut at = first_page * size;
        while at + size <= tokens.len() {
            let Some(id) = self.nodes.child(node, namespace, &tokens[at..at + size]) else {
                break;
            };
            let edge = &self.nodes.get(id).tokens[..];
            let rest = &tokens[at..tokens.len().min(at + edge.len())];
            if !edge.starts_with(rest) {
                break;
            }
            if rest.len() < edge.len() {
                return &edge[rest.len()..edge.len().min(rest.len() + count)];
            }
            (at, node) = (at + edge.len(), id);
        }
        &[]
    }
}
