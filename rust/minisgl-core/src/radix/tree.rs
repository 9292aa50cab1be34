//! The radix tree: which pages hold the KV of which token prefixes.
//!
//! Keeps true: edges cover whole pages; no two nodes stand for the same tokens (siblings differ in their first page); a
//! node's lock count is the number of handles on it and below it; locked nodes are never trimmed or removed, though a
//! split may cut one in two.
//! Doesn't know: requests. A *handle* is a node that someone has locked from the root down to it.
//!
//! Children are found by (parent, hash of their first page's tokens) in one table for the whole tree. Hashes may
//! collide: those that do stand in a chain, and tokens are always compared.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::evict::{LfuSet, LruList};
use crate::config::CachePolicy;
use crate::error::{Result, broken};
use crate::page_pool::{Page, PagePool};

/// A node of the tree's arena.
pub(crate) type NodeId = u32;
pub(crate) const NO_NODE: NodeId = NodeId::MAX;
pub(crate) const ROOT: NodeId = 0;
const MAX_RESERVED: usize = 1 << 20;

/// An edge and its lower end: `pages` hold the KV of `tokens`.
#[derive(Default)]
pub(crate) struct Node {
    pub parent: NodeId,
    pub tokens: Vec<i32>,
    pub pages: Vec<Page>,
    pub num_children: u32,
    chain: NodeId, // the next sibling with the same hash
    pub lock: u32,
    stamp: u64,
    frequency: u64,
}

/// The longest cached continuation below a node: all of the edges down to `node`, then `num_partial_pages` of the edge
/// of `partial`, a child of `node` (or none). `num_unlocked` of the pages are evictable until it is locked.
pub(crate) struct Match {
    node: NodeId,
    partial: NodeId,
    num_partial_pages: usize,
    pub pages: Vec<Page>,
    pub num_unlocked: usize,
}

/// The keys are hashes already.
#[derive(Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = mix(self.0 ^ u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// The finalizer of splitmix64 (Steele, Lea, Flood 2014).
fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

pub(crate) struct RadixTree {
    pub pool: PagePool,
    page_size: usize,
    policy: CachePolicy,
    nodes: Vec<Node>,
    unused: Vec<NodeId>,
    children: HashMap<u64, NodeId, BuildHasherDefault<Identity>>,
    num_evictable: usize,
    num_protected: usize,
    num_nodes: usize,
    clock: u64,
    lru: LruList,
    lfu: LfuSet,
    #[cfg(any(test, feature = "count-ops"))]
    pub ops: std::cell::Cell<u64>,
}

impl RadixTree {
    pub fn new(pool: PagePool, page_size: usize, policy: CachePolicy) -> Self {
        let reserved = match policy {
            CachePolicy::Naive => 0,
            _ => pool.num_pages().min(MAX_RESERVED),
        };
        Self {
            pool,
            page_size,
            policy,
            nodes: vec![root()],
            unused: Vec::with_capacity(reserved),
            children: HashMap::with_capacity_and_hasher(reserved, BuildHasherDefault::default()),
            num_evictable: 0,
            num_protected: 0,
            num_nodes: 0,
            clock: 0,
            lru: LruList::new(),
            lfu: LfuSet::new(),
            #[cfg(any(test, feature = "count-ops"))]
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
        self.num_nodes
    }

    pub fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node as usize]
    }

    /// Pages that `take` can get: free ones and those it may evict.
    pub fn num_available(&self) -> usize {
        self.pool.num_free() + self.num_evictable
    }

    #[cfg(any(test, feature = "count-ops"))]
    fn count(&self, ops: usize) {
        self.ops.set(self.ops.get() + ops as u64);
    }

    #[cfg(not(any(test, feature = "count-ops")))]
    #[allow(clippy::unused_self)]
    fn count(&self, _ops: usize) {}

    // ------------------------------------------------------------------------------------------------- read only

    /// Follow `tokens` below `node`, which stands for the first `first_page` pages of them, as far as they are cached,
    /// to at most `max_pages` pages of `tokens` in all. O(matched tokens).
    pub fn find(&self, node: NodeId, tokens: &[i32], first_page: usize, max_pages: usize) -> Match {
        let size = self.page_size;
        let mut found = Match {
            node,
            partial: NO_NODE,
            num_partial_pages: 0,
            pages: Vec::new(),
            num_unlocked: 0,
        };
        let mut at = first_page;
        while at < max_pages {
            let Some(id) = self.child(found.node, &tokens[at * size..(at + 1) * size]) else {
                break;
            };
            let child = &self.nodes[id as usize];
            let common = self.num_common_pages(child, tokens, at, max_pages);
            at += common;
            self.count(common);
            found.pages.extend_from_slice(&child.pages[..common]);
            if child.lock == 0 {
                found.num_unlocked += common;
            }
            if common < child.pages.len() {
                found.partial = id;
                found.num_partial_pages = common;
                return found;
            }
            found.node = id;
        }
        found
    }

    /// Whether page `column` of `tokens` is cached below `node`, which ends right before it.
    pub fn has_page(&self, node: NodeId, tokens: &[i32], column: usize) -> bool {
        let size = self.page_size;
        self.child(node, &tokens[column * size..(column + 1) * size])
            .is_some()
    }

    /// All nodes but the root, in no order.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        (1..self.nodes.len() as NodeId).filter(|&id| self.nodes[id as usize].parent != NO_NODE)
    }

    /// All tokens from the root to the end of `node`.
    pub fn path(&self, node: NodeId) -> (Vec<i32>, Vec<Page>) {
        let mut steps = Vec::new();
        let mut at = node;
        while at != ROOT && at != NO_NODE {
            steps.push(at);
            at = self.nodes[at as usize].parent;
        }
        let (mut tokens, mut pages) = (Vec::new(), Vec::new());
        for &step in steps.iter().rev() {
            tokens.extend_from_slice(&self.nodes[step as usize].tokens);
            pages.extend_from_slice(&self.nodes[step as usize].pages);
        }
        (tokens, pages)
    }

    // ----------------------------------------------------------------------------------------------------- locks

    /// Move a handle from `handle` down to the end of `found`, which was found below it; returns the new handle. The
    /// edge in which the match ends is split there.
    pub fn descend(&mut self, handle: NodeId, found: &Match) -> Result<NodeId> {
        let target = match found.partial {
            NO_NODE => found.node,
            partial => self.split(partial, found.num_partial_pages)?,
        };
        self.lock(handle, target)?;
        Ok(target)
    }

    /// Give a handle back: one lock less on every node from it up to the root.
    pub fn release(&mut self, handle: NodeId) -> Result<()> {
        let mut at = handle;
        while at != ROOT {
            self.count(1);
            let clock = self.clock + 1;
            let node = &mut self.nodes[at as usize];
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
                self.becomes_unlocked(at);
            }
            at = parent;
        }
        Ok(())
    }

    // ----------------------------------------------------------------------------------------- growing, shrinking

    /// Hang `pages`, the KV of `tokens`, below `handle` and move the handle onto them. The tree has nothing of it yet.
    pub fn append(&mut self, handle: NodeId, tokens: &[i32], pages: &[Page]) -> Result<NodeId> {
        if pages.is_empty() || tokens.len() != pages.len() * self.page_size {
            return broken(format!(
                "{} tokens do not fill {} pages",
                tokens.len(),
                pages.len()
            ));
        }
        if self.child(handle, &tokens[..self.page_size]).is_some() {
            return broken("the radix tree holds these tokens already");
        }
        self.count(tokens.len());
        let id = self.new_node(handle);
        let node = &mut self.nodes[id as usize];
        node.tokens.extend_from_slice(tokens);
        node.pages.extend_from_slice(pages);
        self.hang(id);
        self.num_nodes += 1;
        self.num_evictable += pages.len();
        // it counts as unlocked until the handle is on it, but never stands in an order
        self.lock(handle, id)?;
        Ok(id)
    }

    /// Move a handle to the end of `tokens` (whole pages), of which it covers `first_page` pages: over what the tree has
    /// already, then over `pages` (by column) of whose columns it lacks. Returns the new handle and the number of columns
    /// that the tree had.
    pub fn insert(
        &mut self,
        handle: NodeId,
        tokens: &[i32],
        pages: &[Page],
        first_page: usize,
    ) -> Result<(NodeId, usize)> {
        let found = self.find(handle, tokens, first_page, pages.len());
        let mut handle = self.descend(handle, &found)?;
        let had = first_page + found.pages.len();
        if had < pages.len() {
            let size = self.page_size;
            handle = self.append(
                handle,
                &tokens[had * size..pages.len() * size],
                &pages[had..],
            )?;
        }
        Ok((handle, had))
    }

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
            let pages = &self.nodes[id as usize].pages[kept..];
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
            let pages = &self.nodes[id as usize].pages[kept..];
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
                let len = self.nodes[id as usize].pages.len();
                Ok((id, len.saturating_sub(num_pages)))
            }
            None => broken("more pages were evicted than the radix tree can give"),
        }
    }

    /// Take the pages from `kept` on off an unlocked leaf.
    fn cut(&mut self, id: NodeId, kept: usize) {
        let size = self.page_size;
        let leaf = &mut self.nodes[id as usize];
        self.num_evictable -= leaf.pages.len() - kept;
        if kept == 0 {
            self.remove(id);
        } else {
            leaf.pages.truncate(kept);
            leaf.tokens.truncate(kept * size);
        }
    }

    /// Forget everything. The clock goes on; the pages are the pool's business (it is reset with the tree).
    pub fn reset(&mut self) {
        self.nodes.clear();
        self.nodes.push(root());
        self.unused.clear();
        self.children.clear();
        self.num_evictable = 0;
        self.num_protected = 0;
        self.num_nodes = 0;
        self.lru.clear();
        self.lfu.clear();
    }

    // --------------------------------------------------------------------------------------------------- helpers

    fn key(parent: NodeId, first_page: &[i32]) -> u64 {
        let mut hash = u64::from(parent);
        for &token in first_page {
            hash = mix(hash ^ u64::from(token as u32));
        }
        hash
    }

    fn child(&self, parent: NodeId, first_page: &[i32]) -> Option<NodeId> {
        if self.nodes[parent as usize].num_children == 0 {
            return None;
        }
        let mut at = *self.children.get(&Self::key(parent, first_page))?;
        while at != NO_NODE {
            let node = &self.nodes[at as usize];
            if node.parent == parent && node.tokens[..self.page_size] == *first_page {
                return Some(at);
            }
            at = node.chain;
        }
        None
    }

    fn key_of(&self, id: NodeId) -> u64 {
        let node = &self.nodes[id as usize];
        Self::key(node.parent, &node.tokens[..self.page_size])
    }

    /// Make `id` known below its parent.
    fn hang(&mut self, id: NodeId) {
        let key = self.key_of(id);
        let next = self.children.insert(key, id).unwrap_or(NO_NODE);
        self.nodes[id as usize].chain = next;
        let parent = self.nodes[id as usize].parent;
        self.nodes[parent as usize].num_children += 1;
    }

    /// Make `id` unknown below its parent.
    fn unhang(&mut self, id: NodeId) {
        let key = self.key_of(id);
        let next = self.nodes[id as usize].chain;
        let parent = self.nodes[id as usize].parent;
        self.nodes[parent as usize].num_children -= 1;
        let first = self.children.get(&key).copied().unwrap_or(NO_NODE);
        if first == id {
            match next {
                NO_NODE => self.children.remove(&key),
                _ => self.children.insert(key, next),
            };
            return;
        }
        let mut at = first;
        while at != NO_NODE {
            let chain = self.nodes[at as usize].chain;
            if chain == id {
                self.nodes[at as usize].chain = next;
                return;
            }
            at = chain;
        }
    }

    fn new_node(&mut self, parent: NodeId) -> NodeId {
        let id = self.unused.pop().unwrap_or_else(|| {
            self.nodes.push(Node::default());
            self.nodes.len() as NodeId - 1
        });
        let node = &mut self.nodes[id as usize];
        node.parent = parent;
        node.num_children = 0;
        node.chain = NO_NODE;
        node.lock = 0;
        node.stamp = 0;
        node.frequency = 0;
        id
    }

    /// How many pages of `child` equal those of `tokens` from page `at` on; the first does.
    fn num_common_pages(&self, child: &Node, tokens: &[i32], at: usize, max_pages: usize) -> usize {
        let size = self.page_size;
        let count = child.pages.len().min(max_pages - at);
        let (ours, theirs) = (
            &child.tokens[..count * size],
            &tokens[at * size..(at + count) * size],
        );
        if ours == theirs {
            return count;
        }
        let same = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
        same / size
    }

    /// Cut an edge after `num_pages`. `id` stays the lower part, so that handles on it keep their depth.
    fn split(&mut self, id: NodeId, num_pages: usize) -> Result<NodeId> {
        let parent = self.nodes[id as usize].parent;
        if parent == NO_NODE {
            return broken("a removed node was split");
        }
        let cut = num_pages * self.page_size;
        self.unhang(id);
        let upper_id = self.new_node(parent);
        let [upper, lower] = self.two(upper_id, id)?;
        upper.tokens.extend_from_slice(&lower.tokens[..cut]);
        upper.pages.extend_from_slice(&lower.pages[..num_pages]);
        upper.lock = lower.lock;
        upper.stamp = lower.stamp;
        upper.frequency = lower.frequency;
        lower.tokens.drain(..cut);
        lower.pages.drain(..num_pages);
        lower.parent = upper_id;
        let unlocked = lower.lock == 0;
        self.hang(upper_id);
        self.hang(id);
        self.num_nodes += 1;
        if unlocked && self.policy == CachePolicy::Lru {
            self.lru.insert_after(id, upper_id);
        }
        Ok(upper_id)
    }

    fn two(&mut self, a: NodeId, b: NodeId) -> Result<[&mut Node; 2]> {
        match self.nodes.get_disjoint_mut([a as usize, b as usize]) {
            Ok(both) => Ok(both),
            Err(_) => broken("a node of the radix tree is its own parent"),
        }
    }

    /// One lock more on the nodes from `target` up to, but without, `handle`.
    fn lock(&mut self, handle: NodeId, target: NodeId) -> Result<()> {
        let mut at = target;
        while at != handle {
            self.count(1);
            if at == ROOT || at == NO_NODE {
                return broken("a handle was moved to a node that is not below it");
            }
            let node = &self.nodes[at as usize];
            if node.lock == 0 {
                let pages = node.pages.len();
                self.num_evictable -= pages;
                self.num_protected += pages;
                self.becomes_locked(at);
            }
            let node = &mut self.nodes[at as usize];
            node.lock += 1;
            node.frequency += 1;
            at = node.parent;
        }
        Ok(())
    }

    fn remove(&mut self, id: NodeId) {
        self.becomes_locked(id); // out of the order
        self.unhang(id);
        let node = &mut self.nodes[id as usize];
        let parent = node.parent;
        node.parent = NO_NODE;
        node.tokens.clear();
        node.pages.clear();
        self.unused.push(id);
        self.num_nodes -= 1;
        if self.policy == CachePolicy::Lfu {
            self.add_leaf(parent);
        }
    }

    // ------------------------------------------------------------------------------------------- eviction order

    fn becomes_unlocked(&mut self, id: NodeId) {
        match self.policy {
            CachePolicy::Lfu => self.add_leaf(id),
            _ => self.lru.push(id),
        }
    }

    fn becomes_locked(&mut self, id: NodeId) {
        let node = &self.nodes[id as usize];
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
        let node = &self.nodes[id as usize];
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

fn root() -> Node {
    Node {
        parent: NO_NODE,
        chain: NO_NODE,
        ..Node::default()
    }
}
