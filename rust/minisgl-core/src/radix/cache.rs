//! The prefix cache as a building block: a radix tree with the pages that it owns, for schedulers in Python, replay
//! scripts and measurements. The scheduler of this crate holds a `RadixTree` itself.
//!
//! Invariants: a page is free, cached or owned by the caller, and the caller may free only pages that it owns; a handle
//! whose nodes may have been evicted is refused.

use std::sync::atomic::{AtomicU64, Ordering};

use super::check::check_tree;
use super::checkpoints::Checkpoints;
use super::nodes::{NodeId, ROOT};
use super::tree::RadixTree;
use crate::api::{CachePolicy, Result, argument, need, need_memory};
use crate::numbers::{MAX_U32, ToUsize};
use crate::page_pool::{Page, PagePool};

/// Prefix cache over pages 0 .. `num_pages` - 1, each free, cached or owned by the caller.
pub struct RadixCacheManager {
    /// The radix tree. Code that changes it directly must keep `taken` in step (`take`, `claim`).
    #[doc(hidden)]
    pub tree: RadixTree,
    taken: Vec<bool>, // whether the caller owns the page, by page
    id: u64,          // id of the cache, new after each reset
}

/// Number of caches and resets so far. Gives each cache an id, so that a handle of another cache is refused.
static NUM_CACHES: AtomicU64 = AtomicU64::new(0);

/// Handle of a matched prefix. While unlocked, it is valid until pages are evicted.
#[derive(Clone, Debug)]
pub struct Handle {
    node: NodeId,
    cached_len: usize,
    num_locks: u32,
    num_evicted: u64,
    cache: u64,
}

impl Handle {
    /// Returns the length of the prefix, in tokens (whole pages).
    #[must_use]
    pub fn cached_len(&self) -> usize {
        self.cached_len
    }
}

impl RadixCacheManager {
    /// Creates an empty cache of `num_pages` free pages of `page_size` tokens. `num_checkpoints`: slots for saved
    /// states, for a model with recurrent state.
    ///
    /// # Errors
    /// `Error::Argument` for a size below 1 or above 2^31 - 1, or without memory for it.
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

    /// Returns the id of this cache. It changes with each reset.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Allocates `num_pages` pages for the caller. Evicts cached prefixes if too few are free.
    ///
    /// # Errors
    /// `Error::Argument` if fewer pages are free or evictable.
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

    /// Frees pages of the caller in order: the last of them is allocated first.
    ///
    /// # Errors
    /// `Error::Argument` for a page that the caller does not own.
    pub fn free(&mut self, pages: &[Page]) -> Result<()> {
        self.claim(pages)?;
        self.tree.pool.push(pages.iter().copied())
    }

    /// Ends the caller's ownership of `pages`, of all or (on an error) of none.
    ///
    /// # Errors
    /// `Error::Argument` for a page that the caller does not own or that is listed twice.
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

    /// Frees all pages and empties the cache. Handles from before are invalid.
    pub fn reset(&mut self) {
        self.tree.pool.reset();
        self.tree.reset();
        self.taken.fill(false);
        self.id = NUM_CACHES.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns a handle of the longest cached prefix of `tokens`, and its pages. Counts as a use for eviction.
    ///
    /// # Errors
    /// `Error::Broken` if the tree is inconsistent.
    pub fn match_prefix(&mut self, tokens: &[i32], namespace: u32) -> Result<(Handle, Vec<Page>)> {
        let size = self.tree.page_size();
        let matched = self.tree.find(ROOT, namespace, tokens, 0, tokens.len() / size);
        let node = self.tree.descend(ROOT, &matched)?;
        let handle = Handle {
            node,
            cached_len: matched.pages.len() * size,
            num_locks: 0,
            num_evicted: self.tree.num_evicted_total,
            cache: self.id,
        };
        self.tree.release(node)?;
        Ok((handle, matched.pages))
    }

    /// Adds a lock to the pages of `handle`, so that they are not evicted; with `unlock`, removes one.
    ///
    /// # Errors
    /// `Error::Argument` for a handle of another cache, an unlocked handle whose pages may have been evicted, or
    /// `unlock` of a handle that is not locked.
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

    /// Inserts `pages`, owned by the caller, as the KV of `tokens`. Returns how many of the first pages were cached
    /// already: the caller still owns its own pages for those.
    ///
    /// # Errors
    /// `Error::Argument` if the tokens do not fill the pages exactly, or for a page that the caller does not own.
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

    /// Inserts as `RadixTree::insert` does, moving a handle. The caller owns the pages that the tree lacks.
    ///
    /// # Errors
    /// `Error::Argument` for a page that the caller does not own.
    #[doc(hidden)]
    pub fn insert(
        &mut self,
        handle: NodeId,
        namespace: u32,
        tokens: &[i32],
        pages: &[Page],
        first_page: usize,
    ) -> Result<(NodeId, usize)> {
        let matched = self.tree.find(handle, namespace, tokens, first_page, pages.len());
        self.claim(&pages[first_page + matched.pages.len()..])?;
        self.tree.insert(handle, namespace, tokens, pages, first_page)
    }

    /// Evicts `num_pages` pages in policy order and returns them. They are free then.
    ///
    /// # Errors
    /// `Error::Argument` if fewer pages are evictable.
    pub fn evict(&mut self, num_pages: usize) -> Result<Vec<Page>> {
        let (evictable, free) = (self.tree.num_evictable(), self.tree.pool.num_free());
        if num_pages > evictable {
            return argument("num_pages", format!("{num_pages}: {evictable} are evictable"));
        }
        self.tree.evict(num_pages)?;
        Ok(self.tree.pool.free_pages()[free..].to_vec())
    }

    /// Returns the stack of free pages. The last element is allocated next.
    #[must_use]
    pub fn free_pages(&self) -> &[Page] {
        self.tree.pool.free_pages()
    }

    /// Returns the number of evictable and of locked pages in the cache.
    #[must_use]
    pub fn size_info(&self) -> (usize, usize) {
        (self.tree.num_evictable(), self.tree.num_protected())
    }

    /// Checks the invariants of the tree, and that each page is free, cached or owned by the caller. O(everything).
    ///
    /// # Errors
    /// `Error::Broken` with the first invariant that does not hold.
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
