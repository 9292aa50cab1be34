//! Read access to the radix tree's structure, and its invariant check, for checks and tests.

use std::collections::{BTreeSet, HashMap};

use super::nodes::{NO_CHECKPOINT, NO_NODE, Namespace, NodeId, ROOT};
use super::tree::RadixTree;
use crate::api::{CachePolicy, Result, need};
use crate::numbers::ToU64;
use crate::page_pool::Page;

impl RadixTree {
    /// Returns the tokens and pages on the path from the root to the end of `node`.
    pub fn path(&self, node: NodeId) -> (Vec<i32>, Vec<Page>) {
        let mut steps = Vec::new();
        let mut at = node;
        while at != ROOT && at != NO_NODE {
            steps.push(at);
            at = self.node(at).parent;
        }
        let (mut tokens, mut pages) = (Vec::new(), Vec::new());
        for &step in steps.iter().rev() {
            tokens.extend_from_slice(&self.node(step).tokens);
            pages.extend_from_slice(&self.node(step).pages);
        }
        (tokens, pages)
    }

    /// Returns for each node but the root: id, parent's id, lock count, pages, state checkpoint slot (-1 for none).
    pub fn shape(&self) -> impl Iterator<Item = (NodeId, NodeId, u32, Vec<Page>, i64)> {
        self.ids().map(|id| {
            let node = self.node(id);
            (id, node.parent, node.lock, node.pages.clone(), self.checkpoint(id))
        })
    }

    /// Returns the nodes from `node` up to the root (excluded), each with its number of pages.
    pub fn path_nodes(&self, node: NodeId) -> Vec<(NodeId, usize)> {
        let mut nodes = Vec::new();
        let mut at = node;
        while at != ROOT && at != NO_NODE {
            nodes.push((at, self.node(at).pages.len()));
            at = self.node(at).parent;
        }
        nodes
    }

    /// Returns each cached page with all tokens of its path up to the page's end, in no order. A namespace n above 0 is
    /// prepended as the element -n, which is no token.
    pub fn tree_pages(&self) -> Vec<(Vec<i32>, Page)> {
        let size = self.page_size();
        let mut cached = Vec::new();
        for id in self.ids() {
            let (tokens, pages) = self.path(id);
            let own = self.node(id).pages.len();
            let namespace = self.node(id).namespace;
            let before = (namespace > 0).then(|| -namespace.cast_signed());
            for column in pages.len() - own..pages.len() {
                let path = before.iter().chain(&tokens[..(column + 1) * size]);
                cached.push((path.copied().collect(), pages[column]));
            }
        }
        cached
    }
}

/// Checks the tree's structure: links, whole pages, keys, counters, and that eviction can reach every unlocked leaf.
pub(crate) fn check_tree(tree: &RadixTree) -> Result<()> {
    let (mut evictable, mut protected, mut count) = (0, 0, 0);
    let mut leaves = BTreeSet::new();
    let mut unlocked = BTreeSet::new();
    let mut children: HashMap<NodeId, u32> = HashMap::new();
    let mut siblings: BTreeSet<(NodeId, Namespace, &[i32])> = BTreeSet::new();
    for id in tree.ids() {
        let node = tree.node(id);
        count += 1;
        need(!node.pages.is_empty(), || "a node of the tree has no pages".into())?;
        need(node.tokens.len() == node.pages.len() * tree.page_size(), || {
            "the tokens of a node don't fill its pages".into()
        })?;
        if node.lock == 0 {
            evictable += node.pages.len();
            unlocked.insert(id);
            if node.num_children == 0 {
                leaves.insert(id);
                need(tree.checkpoints.is_none() || node.checkpoint != NO_CHECKPOINT, || {
                    "a leaf is found by nobody".into()
                })?;
            }
        } else {
            protected += node.pages.len();
        }
        *children.entry(node.parent).or_default() += 1;
        need(
            siblings.insert((node.parent, node.namespace, &node.tokens[..tree.page_size()])),
            || "two siblings begin alike".into(),
        )?;
        need(tree.has_page(node.parent, node.namespace, &node.tokens, 0), || {
            "a node is not linked under the key that its tokens begin with".into()
        })?;
        need(
            node.parent == ROOT || node.namespace == tree.node(node.parent).namespace,
            || "a node is of another namespace than its parent".into(),
        )?;
        need(node.parent == ROOT || node.lock <= tree.node(node.parent).lock, || {
            "a node has more locks than its parent".into()
        })?;
    }
    for id in tree.ids().chain([ROOT]) {
        let num_children = children.get(&id).copied().unwrap_or(0);
        need(tree.node(id).num_children == num_children, || {
            "a node miscounts its children".into()
        })?;
    }
    need(evictable == tree.num_evictable(), || {
        format!("{evictable} pages are evictable, counted {}", tree.num_evictable())
    })?;
    need(protected == tree.num_protected(), || {
        format!("{protected} pages are protected, counted {}", tree.num_protected())
    })?;
    let entered = tree.num_inserted_total - tree.num_evicted_total;
    let num_pages = evictable + protected;
    need(entered == num_pages.to_u64(), || {
        format!("{num_pages} pages are in the tree, {entered} entered and stayed")
    })?;
    need(count == tree.num_nodes(), || {
        format!("the tree has {count} nodes, counted {}", tree.num_nodes())
    })?;
    let known: BTreeSet<NodeId> = tree.known_to_eviction().into_iter().collect();
    let expected = if tree.policy() == CachePolicy::Lfu {
        leaves
    } else {
        unlocked
    };
    need(known == expected, || "eviction does not know the unlocked nodes".into())
}
