//! The scheduler's tree for `benches/prefix_cache.rs`, which times single operations of it.

use super::nodes::ROOT;
use super::tree::RadixTree;
use crate::api::{CachePolicy, Result};
use crate::page_pool::{Page, PagePool};

/// A tree of page size 1 that evicts the least recently used.
pub struct TimedTree(RadixTree);

impl TimedTree {
    /// A tree over a pool of so many pages.
    #[must_use]
    pub fn new(num_pages: usize) -> Self {
        Self(RadixTree::new(PagePool::new(num_pages), 1, CachePolicy::Lru, None))
    }

    /// Take pages out of the pool.
    ///
    /// # Errors
    /// `Error::Broken`: there are fewer.
    pub fn take(&mut self, num_pages: usize) -> Result<Vec<Page>> {
        let mut pages = Vec::with_capacity(num_pages);
        self.0.take(num_pages, &mut pages)?;
        Ok(pages)
    }

    /// Insert `tokens` with their pages, unlocked; pages that the tree has already go back to the pool.
    ///
    /// # Errors
    /// `Error::Broken`.
    pub fn insert(&mut self, tokens: &[i32], pages: &[Page]) -> Result<usize> {
        let (handle, had) = self.0.insert(ROOT, 0, tokens, pages, 0)?;
        self.0.release(handle)?;
        self.0.pool.push(pages[..had].iter().copied())?;
        Ok(had)
    }

    /// The length of the cached prefix of `tokens`, which counts as used.
    ///
    /// # Errors
    /// `Error::Broken`.
    pub fn match_prefix(&mut self, tokens: &[i32]) -> Result<usize> {
        let found = self.0.find(ROOT, 0, tokens, 0, tokens.len());
        let node = self.0.descend(ROOT, &found)?;
        self.0.release(node)?;
        Ok(found.pages.len())
    }

    /// Give unlocked pages back to the pool.
    ///
    /// # Errors
    /// `Error::Broken`: there are fewer.
    pub fn evict(&mut self, num_pages: usize) -> Result<()> {
        self.0.evict(num_pages)
    }
}
