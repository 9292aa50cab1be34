//! The radix tree: which pages hold the KV of which token prefixes.
//!
//! Invariants: edges cover whole pages; no two nodes stand for the same tokens of the same namespace (siblings differ
//! in it or in their first page), and a match never crosses namespaces; a node's lock count is the number of handles on
//! it and below it; locked nodes are never trimmed or removed, but may be split.
//!
//! The tree of a model with recurrent state has `checkpoints`. A match then ends at the deepest checkpoint on the path;
//! nodes below it are of no use, so an unlocked leaf without a checkpoint is removed at once, and nodes are evicted
//! whole.

use super::checkpoints::Checkpoints;
use super::evict::EvictionOrder;
use super::nodes::{NO_NODE, Namespace, Node, NodeId, Nodes, ROOT};
use crate::api::{CachePolicy, Result, broken};
use crate::numbers::ToU64;
use crate::page_pool::{Page, PagePool};

/// Longest cached continuation below a node: all edges down to `node`, then `num_partial_pages` of the edge to
/// `partial`, a child of `node` (or none). `num_unlocked` of the pages are evictable until the match is locked.
#[doc(hidden)]
#[derive(Clone)]
pub struct Match {
    pub(super) node: NodeId,
    pub(super) partial: NodeId,
    pub(super) num_partial_pages: usize,
    pub pages: Vec<Page>,
    pub num_unlocked: usize,
}

impl Match {
    /// Returns the node at which the match ends, or `None` if it ends inside an edge.
    pub fn end(&self) -> Option<NodeId> {
        (self.partial == NO_NODE).then_some(self.node)
    }
}

#[doc(hidden)]
pub struct RadixTree {
    pub(crate) pool: PagePool,
    page_size: usize,
    policy: CachePolicy,
    pub(super) nodes: Nodes,
    num_evictable: usize,
    num_protected: usize,
    pub(super) clock: u64,
    pub num_inserted_total: u64, // pages inserted and evicted (next field) so far
    pub num_evicted_total: u64,
    order: EvictionOrder,
    pub(crate) checkpoints: Option<Checkpoints>,
    #[cfg(test)]
    pub ops: std::cell::Cell<u64>,
}

impl RadixTree {
    pub(crate) fn new(pool: PagePool, page_size: usize, policy: CachePolicy, checkpoints: Option<Checkpoints>) -> Self {
        let expected = match policy {
            CachePolicy::Naive => 0,
            _ => pool.num_pages(),
        };
        Self {
            pool,
            page_size,
            policy,
            nodes: Nodes::new(page_size, expected),
            num_evictable: 0,
            num_protected: 0,
            clock: 0,
            num_inserted_total: 0,
            num_evicted_total: 0,
            order: EvictionOrder::new(policy),
            checkpoints,
            #[cfg(test)]
            ops: std::cell::Cell::new(0),
        }
    }

    pub fn page_size(&self) -> usize {
        self.page_size
    }

    pub fn policy(&self) -> CachePolicy {
        self.policy
    }

    pub fn num_evictable(&self) -> usize {
        self.num_evictable
    }

    pub fn num_protected(&self) -> usize {
        self.num_protected
    }

    pub fn num_nodes(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn node(&self, node: NodeId) -> &Node {
        self.nodes.get(node)
    }

    /// Returns the unlocked nodes (under LFU the unlocked leaves) in the eviction order. For invariant checks.
    pub fn known_to_eviction(&self) -> Vec<NodeId> {
        self.order.known()
    }

    /// Returns the number of pages that `take` can allocate: free and evictable ones.
    pub fn num_available(&self) -> usize {
        self.pool.num_free() + self.num_evictable
    }

    #[cfg(test)]
    fn count(&self, ops: usize) {
        self.ops.set(self.ops.get() + crate::numbers::ToU64::to_u64(ops));
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self)]
    fn count(&self, _ops: usize) {}

    // ------------------------------------------------------------------------------------------------- read only

    /// Matches `tokens` in `namespace` below `node`, which covers their first `first_page` pages, up to `max_pages`
    /// pages of `tokens` in total. O(matched tokens).
    pub fn find(
        &self,
        node: NodeId,
        namespace: Namespace,
        tokens: &[i32],
        first_page: usize,
        max_pages: usize,
    ) -> Match {
        let size = self.page_size;
        let mut matched = Match {
            node,
            partial: NO_NODE,
            num_partial_pages: 0,
            pages: Vec::new(),
            num_unlocked: 0,
        };
        let mut at = first_page;
        while at < max_pages {
            let first = &tokens[at * size..(at + 1) * size];
            let Some(id) = self.nodes.child(matched.node, namespace, first) else {
                break;
            };
            let child = self.nodes.get(id);
            let common = self.num_common_pages(child, tokens, at, max_pages);
            at += common;
            self.count(common);
            matched.pages.extend_from_slice(&child.pages[..common]);
            if child.lock == 0 {
                matched.num_unlocked += common;
            }
            if common < child.pages.len() {
                matched.partial = id;
                matched.num_partial_pages = common;
                return matched;
            }
            matched.node = id;
        }
        matched
    }

    /// Returns true if page `column` of `tokens` is cached below `node`, which ends right before it.
    pub fn has_page(&self, node: NodeId, namespace: Namespace, tokens: &[i32], column: usize) -> bool {
        let page = &tokens[column * self.page_size..(column + 1) * self.page_size];
        self.nodes.child(node, namespace, page).is_some()
    }

    /// Returns the ids of all nodes but the root, in no order.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.nodes.ids()
    }

    // ----------------------------------------------------------------------------------------------------- locks

    /// Moves a handle from `handle` down to the end of `found`, a match below it. Returns the new handle. Splits the
    /// edge in which the match ends.
    pub fn descend(&mut self, handle: NodeId, found: &Match) -> Result<NodeId> {
        let target = match found.partial {
            NO_NODE => found.node,
            partial => self.split(partial, found.num_partial_pages)?,
        };
        self.lock(handle, target)?;
        Ok(target)
    }

    /// Releases a handle: removes one lock from every node between it and the root.
    pub fn release(&mut self, handle: NodeId) -> Result<()> {
        let mut at = handle;
        while at != ROOT {
            self.count(1);
            let clock = self.clock + 1;
            let node = self.nodes.get_mut(at);
            if node.lock == 0 {
                return broken("a node of the radix tree was unlocked more often than locked");
            }
            node.lock -= 1;
            let parent = node.parent;
            if node.lock == 0 {
                node.stamp = clock;
                let pages = node.pages.len();
                self.clock = clock;
                self.num_evictable += pages;
                self.num_protected -= pages;
                self.order.unlocked(&self.nodes, at);
            }
            at = parent;
        }
        self.prune(handle)
    }

    // ----------------------------------------------------------------------------------------- growing, shrinking

    /// Links `pages`, the KV of `tokens`, below `handle` and moves the handle there. `Error::Broken` if they are
    /// cached.
    pub fn append(&mut self, handle: NodeId, namespace: Namespace, tokens: &[i32], pages: &[Page]) -> Result<NodeId> {
        if pages.is_empty() || tokens.len() != pages.len() * self.page_size {
            return broken(format!("{} tokens do not fill {} pages", tokens.len(), pages.len()));
        }
        if self.has_page(handle, namespace, tokens, 0) {
            return broken("the radix tree holds these tokens already");
        }
        self.count(tokens.len());
        let id = self.nodes.create(handle, namespace);
        let node = self.nodes.get_mut(id);
        node.tokens.extend_from_slice(tokens);
        node.pages.extend_from_slice(pages);
        self.nodes.link(id);
        self.num_evictable += pages.len();
        self.num_inserted_total += pages.len().to_u64();
        // counted as unlocked until the handle locks it, but never in the eviction order
        self.lock(handle, id)?;
        Ok(id)
    }

    /// Moves a handle that covers `first_page` pages to the end of `tokens` (whole pages): over cached pages, then over
    /// those of `pages` (by page index) that the tree lacks. Returns the new handle and how many pages were cached.
    pub fn insert(
        &mut self,
        handle: NodeId,
        namespace: Namespace,
        tokens: &[i32],
        pages: &[Page],
        first_page: usize,
    ) -> Result<(NodeId, usize)> {
        let matched = self.find(handle, namespace, tokens, first_page, pages.len());
        let mut handle = self.descend(handle, &matched)?;
        let had = first_page + matched.pages.len();
        if had < pages.len() {
            let size = self.page_size;
            handle = self.append(
                handle,
                namespace,
                &tokens[had * size..pages.len() * size],
                &pages[had..],
            )?;
        }
        Ok((handle, had))
    }

    /// Allocates `num_pages` pages and appends them to `into`: first evicts as many as the pool lacks, then pops all.
    pub fn take(&mut self, num_pages: usize, into: &mut Vec<Page>) -> Result<()> {
        let free = self.pool.num_free();
        if free < num_pages {
            self.evict(num_pages - free)?;
        }
        self.pool.pop_many(num_pages, into)
    }

    /// Allocates `num_pages` pages as single `take` calls would: first the free ones, then evicted ones, one by one.
    pub fn take_each(&mut self, num_pages: usize, into: &mut Vec<Page>) -> Result<()> {
        let free = self.pool.num_free().min(num_pages);
        self.pool.pop_many(free, into)?;
        let mut missing = num_pages - free;
        if self.checkpoints.is_some() {
            return (0..missing).try_for_each(|_| self.take(1, into)); // nodes with checkpoints are evicted whole
        }
        while missing > 0 {
            let (id, kept) = self.next_eviction(missing)?;
            let pages = &self.node(id).pages[kept..];
            missing -= pages.len();
            into.extend(pages.iter().rev());
            self.truncate_leaf(id, kept);
        }
        Ok(())
    }

    /// Evicts `num_pages` pages: trims the next leaf in policy order from its end, page by page, then the next. Nodes
    /// with checkpoints are evicted whole.
    pub fn evict(&mut self, num_pages: usize) -> Result<()> {
        let target = self.pool.num_free() + num_pages;
        while self.pool.num_free() < target {
            let (id, kept) = self.next_eviction(target - self.pool.num_free())?;
            let parent = self.nodes.get(id).parent;
            self.free_end(id, kept)?;
            self.prune(parent)?;
        }
        Ok(())
    }

    /// Frees the pages from `kept` on of an unlocked leaf, last one first, and the checkpoint at its end.
    pub(super) fn free_end(&mut self, id: NodeId, kept: usize) -> Result<()> {
        self.free_checkpoint(id);
        let pages = &self.nodes.get(id).pages[kept..];
        self.pool.push(pages.iter().rev().copied())?;
        self.truncate_leaf(id, kept);
        Ok(())
    }

    /// Frees the end of the path of `depth` pages down to `node`, as far as no handle and no other sequence uses it,
    /// but never its first `keep` pages.
    pub fn drop_end(&mut self, node: NodeId, mut depth: usize, keep: usize) -> Result<()> {
        let mut at = node;
        while depth > keep && at != ROOT {
            let node = self.nodes.get(at);
            if node.parent == NO_NODE || node.lock + node.num_children > 0 {
                break;
            }
            let (len, parent) = (node.pages.len(), node.parent);
            let kept = len.saturating_sub(depth - keep);
            self.free_end(at, kept)?;
            self.prune(if kept > 0 { at } else { parent })?;
            depth -= len - kept;
            at = parent;
        }
        Ok(())
    }

    /// Returns the leaf to evict next, and how many of its pages remain if `num_pages` pages are needed.
    fn next_eviction(&self, num_pages: usize) -> Result<(NodeId, usize)> {
        self.count(1);
        match self.order.next() {
            Some(id) => {
                let len = self.nodes.get(id).pages.len();
                let kept = len.saturating_sub(num_pages);
                Ok((id, if self.checkpoints.is_some() { 0 } else { kept }))
            }
            None => broken("more pages were evicted than the radix tree can give"),
        }
    }

    /// Removes the pages from `kept` on from an unlocked leaf, and the leaf itself if `kept` is 0. Does not free them.
    fn truncate_leaf(&mut self, id: NodeId, kept: usize) {
        let size = self.page_size;
        let leaf = self.nodes.get_mut(id);
        self.num_evictable -= leaf.pages.len() - kept;
        self.num_evicted_total += (leaf.pages.len() - kept).to_u64();
        if kept == 0 {
            self.remove(id);
        } else {
            leaf.pages.truncate(kept);
            leaf.tokens.truncate(kept * size);
        }
    }

    fn remove(&mut self, id: NodeId) {
        self.order.locked(&self.nodes, id); // removes it from the order
        let parent = self.nodes.get(id).parent;
        self.nodes.retire(id);
        self.order.child_removed(&self.nodes, parent);
    }

    /// Removes all nodes. The clock continues; the caller resets the page pool.
    pub fn reset(&mut self) {
        self.nodes.clear();
        self.num_evicted_total += (self.num_evictable + self.num_protected).to_u64();
        self.num_evictable = 0;
        self.num_protected = 0;
        self.order.clear();
        if let Some(checkpoints) = &mut self.checkpoints {
            checkpoints.reset();
        }
    }

    // --------------------------------------------------------------------------------------------------- helpers

    /// Returns how many pages of `child` equal the pages of `tokens` from page `at` on. The first page is equal.
    fn num_common_pages(&self, child: &Node, tokens: &[i32], at: usize, max_pages: usize) -> usize {
        let size = self.page_size;
        let count = child.pages.len().min(max_pages - at);
        let (ours, theirs) = (&child.tokens[..count * size], &tokens[at * size..(at + count) * size]);
        if ours == theirs {
            return count;
        }
        let same = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
        same / size
    }

    /// Splits an edge after `num_pages` pages and returns the new upper node. `id` remains the lower node, so that
    /// handles on it keep their depth.
    pub(super) fn split(&mut self, id: NodeId, num_pages: usize) -> Result<NodeId> {
        let parent = self.nodes.get(id).parent;
        if parent == NO_NODE {
            return broken("a removed node was split");
        }
        let cut = num_pages * self.page_size;
        self.nodes.unlink(id);
        let namespace = self.nodes.get(id).namespace;
        let upper_id = self.nodes.create(parent, namespace);
        let Some([upper, lower]) = self.nodes.two(upper_id, id) else {
            return broken("a node of the radix tree is its own parent");
        };
        upper.tokens.extend_from_slice(&lower.tokens[..cut]);
        upper.pages.extend_from_slice(&lower.pages[..num_pages]);
        upper.lock = lower.lock;
        upper.stamp = lower.stamp;
        upper.frequency = lower.frequency;
        lower.tokens.drain(..cut);
        lower.pages.drain(..num_pages);
        lower.parent = upper_id;
        let unlocked = lower.lock == 0;
        self.nodes.link(upper_id);
        self.nodes.link(id);
        if unlocked {
            self.order.split(id, upper_id);
        }
        Ok(upper_id)
    }

    /// Adds one lock to the nodes from `target` up to, but without, `handle`.
    pub(super) fn lock(&mut self, handle: NodeId, target: NodeId) -> Result<()> {
        let mut at = target;
        while at != handle {
            self.count(1);
            if at == ROOT || at == NO_NODE {
                return broken("a handle was moved to a node that is not below it");
            }
            let node = self.nodes.get(at);
            if node.lock == 0 {
                let pages = node.pages.len();
                self.num_evictable -= pages;
                self.num_protected += pages;
                self.order.locked(&self.nodes, at);
            }
            let node = self.nodes.get_mut(at);
            node.lock += 1;
            node.frequency += 1;
            at = node.parent;
        }
        Ok(())
    }
}

impl RadixTree {
    /// Returns up to `count` cached tokens that follow `tokens` in `namespace`, below `node`, which covers their first
    /// `first_page` pages. Only tokens of the edge in which `tokens` end; empty if they do not fill its first page.
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
