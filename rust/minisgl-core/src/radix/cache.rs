//! The prefix cache as a building block: a radix tree with the pages that it owns, for schedulers in Python, replay
//! scripts and measurements. The scheduler of this crate holds a `RadixTree` itself.
//!
//! Invariants: a page is in the pool, in the tree, or taken by the caller, and the caller gives back only what it took;
//! a handle whose nodes may be gone is refused.

use std::sync::atomic::{AtomicU64, Ordering};

use super::check::check_tree;
use super::checkpoints::Checkpoints;
use super::nodes::{NodeId, ROOT};
use super::tree::RadixTree;
use crate::api::{CachePolicy, Result, argument, need, need_memory};
use crate::numbers::{MAX_U32, ToUsize};
use crate::page_pool::{Page, PagePool};

/// A prefix cache and its pages, 0 .. `num_pages` - 1.
pub struct RadixCacheManager {
    /// Whoever changes it by itself keeps `taken` true (`take`, `claim`).
    #[doc(hidden)]
    pub tree: RadixTree,
    taken: Vec<bool>, // by page: whether the caller has it
    id: u64,          // of this cache, since its last reset
}

/// Caches and resets so far: a handle of one means nothing to another.
static NUM_CACHES: AtomicU64 = AtomicU64::new(0);

/// The end of a matched prefix. Unlocked, it can be used until pages leave the cache.
#[derive(Clone, Debug)]
pub struct Handle {
    node: NodeId,
    cached_len: usize,
    num_locks: u32,
    num_evicted: u64,
    cache: u64,
}

impl Handle {
    /// Tokens of the prefix, whole pages.
    #[must_use]
    pub fn cached_len(&self) -> usize {
        self.cached_len
    }
}

impl RadixCacheManager {
    /// An empty cache whose pages of `page_size` tokens are all free. A model that keeps states has `num_checkpoints`
    /// slots for them.
    ///
    /// # Errors
    /// `Error::Argument`: a size below 1 or above 2^31.
    pub fn new(
        num_pages: usize,
        page_size: usize,
        policy: CachePolicy,
        num_checkpoints: Option<usize>,
    ) -> Result<Self> {
        for (name, size) in [("num_pages", num_pages), ("page_size", page_size)] {
            if size == 0 || size > MAX_U32 / 2 {
                return argument(name, format!("{size}: must be between 1 and 2^31 - 1"));
            }
        }
        if num_checkpoints.is_some_and(|slots| slots > MAX_U32 / 2) {
            return argument("num_checkpoints", "must be at most 2^31 - 1");
        }
        need_memory("num_pages", 128 * num_pages)?;
        need_memory("num_checkpoints", 128 * num_checkpoints.unwrap_or(0))?;
        let checkpoints = num_checkpoints.map(Checkpoints::new);
        Ok(Self {
            tree: RadixTree::new(PagePool::new(num_pages), page_size, policy, checkpoints),
            taken: vec![false; num_pages],
            id: NUM_CACHES.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Says which cache this is, and since which reset.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Gives pages to the caller: free ones, and for what lacks those of the prefixes that are evicted for it.
    ///
    /// # Errors
    /// `Error::Argument`: more pages than are free or evictable.
    pub fn take(&mut self, num_pages: usize) -> Result<Vec<Page>> {
        let available = self.tree.num_available();
        if num_pages > available {
            return argument("num_pages", format!("{num_pages}: {available} are free or evictable"));
        }
        let mut pages = Vec::with_capacity(num_pages);
        self.tree.take(num_pages, &mut pages)?;
        for page in &pages {
            self.taken[page.to_usize()] = true;
        }
        Ok(pages)
    }

    /// Frees pages of the caller, in order: the last of them is given out first.
    ///
    /// # Errors
    /// `Error::Argument`: a page that the caller does not have.
    pub fn free(&mut self, pages: &[Page]) -> Result<()> {
        self.claim(pages)?;
        self.tree.pool.push(pages.iter().copied())
    }

    /// Takes pages off the caller, all or none.
    ///
    /// # Errors
    /// `Error::Argument`: a page that the caller does not have, or that is named twice.
    pub fn claim(&mut self, pages: &[Page]) -> Result<()> {
        for (at, &page) in pages.iter().enumerate() {
            match self.taken.get_mut(page.to_usize()) {
                Some(taken) if *taken => *taken = false,
                _ => {
                    for &page in &pages[..at] {
                        self.taken[page.to_usize()] = true;
                    }
                    return argument("pages", format!("{page}: not a page that was taken"));
                }
            }
        }
        Ok(())
    }

    /// All pages are free again, and nothing is cached.
    pub fn reset(&mut self) {
        self.tree.pool.reset();
        self.tree.reset();
        self.taken.fill(false);
        self.id = NUM_CACHES.fetch_add(1, Ordering::Relaxed);
    }

    /// The longest cached prefix of `tokens` and its pages. It counts as used now.
    ///
    /// # Errors
    /// `Error::Broken`.
    pub fn match_prefix(&mut self, tokens: &[i32], namespace: u32) -> Result<(Handle, Vec<Page>)> {
        let size = self.tree.page_size();
        let found = self.tree.find(ROOT, namespace, tokens, 0, tokens.len() / size);
        let node = self.tree.descend(ROOT, &found)?;
        let handle = Handle {
            node,
            cached_len: found.pages.len() * size,
            num_locks: 0,
            num_evicted: self.tree.num_evicted_total,
            cache: self.id,
        };
        self.tree.release(node)?;
        Ok((handle, found.pages))
    }

    /// Locks the pages of a handle once more, so that they are not evicted, or takes one such lock back.
    ///
    /// # Errors
    /// `Error::Argument`: a handle that is not locked, and whose pages may be gone or that is to be unlocked.
    pub fn lock_handle(&mut self, handle: &mut Handle, unlock: bool) -> Result<()> {
        if handle.cache != self.id {
            return argument("handle", "of another cache, or from before a reset");
        }
        let is_current = handle.num_evicted == self.tree.num_evicted_total;
        if handle.num_locks == 0 && (unlock || !is_current) {
            let reason = if unlock {
                "not locked"
            } else {
                "its pages may be gone: match again"
            };
            return argument("handle", reason);
        }
        if unlock {
            handle.num_locks -= 1;
            handle.num_evicted = self.tree.num_evicted_total;
            return self.tree.release(handle.node);
        }
        handle.num_locks += 1;
        self.tree.lock(ROOT, handle.node)
    }

    /// Caches `tokens`, whole pages, in `pages`, which the caller took; returns how many of the first pages the cache
    /// had already: the caller keeps its own of those.
    ///
    /// # Errors
    /// `Error::Argument`: tokens that do not fill the pages, or a page that the caller does not have.
    pub fn insert_prefix(&mut self, tokens: &[i32], pages: &[Page], namespace: u32) -> Result<usize> {
        let wanted = pages.len() * self.tree.page_size();
        if tokens.len() != wanted {
            return argument(
                "tokens",
                format!("{} do not fill {} pages: {wanted}", tokens.len(), pages.len()),
            );
        }
        self.claim(pages)?;
        let (node, had) = self.tree.insert(ROOT, namespace, tokens, pages, 0)?;
        self.tree.release(node)?;
        for page in &pages[..had] {
            self.taken[page.to_usize()] = true;
        }
        Ok(had)
    }

    /// Moves a handle as `RadixTree::insert` does. The caller took the pages of the columns that the tree lacks.
    ///
    /// # Errors
    /// `Error::Argument`: a page that the caller does not have.
    #[doc(hidden)]
    pub fn insert(
        &mut self,
        handle: NodeId,
        namespace: u32,
        tokens: &[i32],
        pages: &[Page],
        first_page: usize,
    ) -> Result<(NodeId, usize)> {
        let found = self.tree.find(handle, namespace, tokens, first_page, pages.len());
        self.claim(&pages[first_page + found.pages.len()..])?;
        self.tree.insert(handle, namespace, tokens, pages, first_page)
    }

    /// Evicts `num_pages` pages, those of the prefixes that are due first; returns them. They are free then.
    ///
    /// # Errors
    /// `Error::Argument`: more pages than are evictable.
    pub fn evict(&mut self, num_pages: usize) -> Result<Vec<Page>> {
        let (evictable, free) = (self.tree.num_evictable(), self.tree.pool.num_free());
        if num_pages > evictable {
            return argument("num_pages", format!("{num_pages}: {evictable} are evictable"));
        }
        self.tree.evict(num_pages)?;
        Ok(self.tree.pool.free_pages()[free..].to_vec())
    }

    /// The stack of free pages, the next to be given out last.
    #[must_use]
    pub fn free_pages(&self) -> &[Page] {
        self.tree.pool.free_pages()
    }

    /// Cached pages that may be evicted, and those that are locked.
    #[must_use]
    pub fn size_info(&self) -> (usize, usize) {
        (self.tree.num_evictable(), self.tree.num_protected())
    }

    /// Checks all that must hold of the tree, and that each page is free, cached or taken. O(everything).
    ///
    /// # Errors
    /// `Error::Broken`: the first that does not.
    pub fn check_integrity(&self) -> Result<()> {
        check_tree(&self.tree)?;
        let mut owners: Vec<u32> = self.taken.iter().map(|&taken| u32::from(taken)).collect();
        let cached = self.tree.ids().flat_map(|id| &self.tree.node(id).pages);
        for &page in self.free_pages().iter().chain(cached) {
            owners[page.to_usize()] += 1;
        }
        let wrong = owners.iter().position(|&count| count != 1);
        need(wrong.is_none(), || format!("page {wrong:?} has no owner, or several"))
    }
}
