//! How the radix tree gives pages back.
//!
//! Keeps true: only unlocked leaves are trimmed. Under LRU all unlocked nodes stand in one list by stamp. A parent is never
//! older than its children, so the head is a leaf that may go: O(1). Under LFU the unlocked leaves stand in an ordered set:
//! O(log n).
//! Doesn't know: who wants the pages.

use std::collections::BTreeSet;

use super::nodes::{NodeId, ROOT};
use super::tree::RadixTree;
use crate::config::CachePolicy;
use crate::error::{Result, broken};
use crate::page_pool::Page;

/// The unlocked leaves by frequency, then stamp.
pub(super) type LfuSet = BTreeSet<(u64, u64, NodeId)>;

impl RadixTree {
    /// Get pages: first evict as many as the pool lacks, which puts them on its stack, then pop all onto `into`.
    pub fn take(&mut self, num_pages: usize, into: &mut Vec<Page>) -> Result<()> {
        let free = self.pool.num_free();
        if free < num_pages {
            self.evict(num_pages - free)?;
        }
        self.pool.pop_many(num_pages, into)
    }

    /// As `take` of one page, so many times: what the pool has, then evicted pages one by one.
    pub fn take_each(&mut self, num_pages: usize, into: &mut Vec<Page>) -> Result<()> {
        let free = self.pool.num_free().min(num_pages);
        self.pool.pop_many(free, into)?;
        let mut missing = num_pages - free;
        while missing > 0 {
            let (id, kept) = self.next_cut(missing)?;
            let pages = &self.nodes.get(id).pages[kept..];
            missing -= pages.len();
            into.extend(pages.iter().rev());
            self.cut(id, kept);
        }
        Ok(())
    }

    /// Trim the oldest unlocked leaf from its end, page by page, then the next, until `num_pages` are freed.
    pub fn evict(&mut self, mut num_pages: usize) -> Result<()> {
        while num_pages > 0 {
            let (id, kept) = self.next_cut(num_pages)?;
            let pages = &self.nodes.get(id).pages[kept..];
            num_pages -= pages.len();
            self.pool.push(pages.iter().rev().copied())?;
            self.cut(id, kept);
        }
        Ok(())
    }

    /// The leaf that goes next, and how many of its pages stay if `num_pages` are wanted.
    fn next_cut(&self, num_pages: usize) -> Result<(NodeId, usize)> {
        self.count(1);
        match self.next_leaf() {
            Some(id) => {
                let len = self.nodes.get(id).pages.len();
                Ok((id, len.saturating_sub(num_pages)))
            }
            None => broken("more pages were evicted than the radix tree can give"),
        }
    }

    /// Take the pages from `kept` on off an unlocked leaf.
    fn cut(&mut self, id: NodeId, kept: usize) {
        let size = self.page_size;
        let leaf = self.nodes.get_mut(id);
        self.num_evictable -= leaf.pages.len() - kept;
        if kept == 0 {
            self.remove(id);
        } else {
            leaf.pages.truncate(kept);
            leaf.tokens.truncate(kept * size);
        }
    }

    fn remove(&mut self, id: NodeId) {
        self.becomes_locked(id); // out of the order
        let parent = self.nodes.get(id).parent;
        self.nodes.retire(id);
        if self.policy == CachePolicy::Lfu {
            self.add_leaf(parent);
        }
    }

    // ------------------------------------------------------------------------------------------- eviction order

    pub(super) fn becomes_unlocked(&mut self, id: NodeId) {
        match self.policy {
            CachePolicy::Lfu => self.add_leaf(id),
            _ => self.lru.push(id),
        }
    }

    pub(super) fn becomes_locked(&mut self, id: NodeId) {
        let node = self.nodes.get(id);
        if node.stamp == 0 {
            return; // never unlocked so far
        }
        match self.policy {
            CachePolicy::Lfu => {
                self.lfu.remove(&(node.frequency, node.stamp, id));
            }
            _ => self.lru.remove(id),
        }
    }

    fn add_leaf(&mut self, id: NodeId) {
        let node = self.nodes.get(id);
        if id != ROOT && node.lock == 0 && node.num_children == 0 {
            self.lfu.insert((node.frequency, node.stamp, id));
        }
    }

    fn next_leaf(&self) -> Option<NodeId> {
        match self.policy {
            CachePolicy::Lfu => self.lfu.first().map(|&(_, _, id)| id),
            _ => self.lru.head(),
        }
    }

    /// The unlocked nodes (LRU) or unlocked leaves (LFU) that eviction knows. For checks.
    pub fn known_to_eviction(&self) -> Vec<NodeId> {
        match self.policy {
            CachePolicy::Lfu => self.lfu.iter().map(|&(_, _, id)| id).collect(),
            _ => self.lru.nodes(),
        }
    }
}
