//! The radix tree by itself, for tests, measurements and people who build on it. The scheduler does not go through
//! this.
//!
//! Invariants: a page is in the tree at most once; a page that was evicted, or that the tree had already, is the
//! caller's; a handle whose nodes may be gone is refused.

use super::check::check_tree;
use super::nodes::{NodeId, ROOT};
use super::tree::RadixTree;
use crate::api::CachePolicy;
use crate::api::{Result, argument, broken, need};
use crate::numbers::{MAX_I32, ToU32, ToUsize};
use crate::page_pool::{Page, PagePool};

/// A prefix cache over pages that the caller gives out.
pub struct RadixCacheManager {
    tree: RadixTree, // its pool only passes on what is evicted
    held: Vec<bool>, // by page
    num_evictions: u64,
}

/// The end of a matched prefix. Unlocked, it is good until the next eviction.
#[derive(Clone, Debug)]
pub struct Handle {
    node: NodeId,
    cached_len: usize,
    num_locks: u32,
    num_evictions: u64,
}

impl Handle {
    /// Tokens of the prefix, whole pages.
    #[must_use]
    pub fn cached_len(&self) -> usize {
        self.cached_len
    }
}

impl RadixCacheManager {
    /// For pages 0 .. `num_pages` - 1 of `page_size` tokens.
    ///
    /// # Errors
    /// `Error::Argument`: sizes below 1, or the policy that caches nothing.
    pub fn new(num_pages: usize, page_size: usize, policy: CachePolicy) -> Result<Self> {
        if num_pages == 0 || num_pages > MAX_I32 {
            return argument("num_pages", "must be between 1 and 2^31 - 1");
        }
        if page_size == 0 {
            return argument("page_size", "must be at least 1");
        }
        if policy == CachePolicy::Naive {
            return argument("policy", "must be lru or lfu");
        }
        let mut pool = PagePool::new(num_pages);
        pool.pop_many(num_pages, &mut Vec::new())?;
        Ok(Self {
            tree: RadixTree::new(pool, page_size, policy),
            held: vec![false; num_pages],
            num_evictions: 0,
        })
    }

    /// The longest cached prefix of `tokens` and its pages. It counts as used now.
    ///
    /// # Errors
    /// `Error::Broken`.
    pub fn match_prefix(&mut self, tokens: &[i32]) -> Result<(Handle, Vec<Page>)> {
        let size = self.tree.page_size();
        let found = self.tree.find(ROOT, 0, tokens, 0, tokens.len() / size);
        let node = self.tree.descend(ROOT, &found)?;
        self.tree.release(node)?;
        let handle = Handle {
            node,
            cached_len: found.pages.len() * size,
            num_locks: 0,
            num_evictions: self.num_evictions,
        };
        Ok((handle, found.pages))
    }

    /// Keep the pages of a handle from eviction, once more.
    ///
    /// # Errors
    /// `Error::Argument`: something was evicted since the handle was matched or unlocked.
    pub fn lock(&mut self, handle: &mut Handle) -> Result<()> {
        if handle.num_locks == 0 && handle.num_evictions != self.num_evictions {
            return argument("handle", "pages were evicted since: match again");
        }
        self.tree.lock(ROOT, handle.node)?;
        handle.num_locks += 1;
        Ok(())
    }

    /// Take one lock back.
    ///
    /// # Errors
    /// `Error::Argument`: it is not locked.
    pub fn unlock(&mut self, handle: &mut Handle) -> Result<()> {
        if handle.num_locks == 0 {
            return argument("handle", "is not locked");
        }
        self.tree.release(handle.node)?;
        handle.num_locks -= 1;
        handle.num_evictions = self.num_evictions;
        Ok(())
    }

    /// Let `tokens`, whole pages, enter with the `pages` that hold their KV. Returns how many of the first pages the
    /// cache had already: the caller keeps its own of those.
    ///
    /// # Errors
    /// `Error::Argument`: pages and tokens don't match, or a page that would enter doesn't exist or is in the cache.
    pub fn insert_prefix(&mut self, tokens: &[i32], pages: &[Page]) -> Result<usize> {
        let size = self.tree.page_size();
        if tokens.len() != pages.len() * size {
            let reason = format!("{} tokens do not fill {} pages", tokens.len(), pages.len());
            return argument("pages", reason);
        }
        let had = self.tree.find(ROOT, 0, tokens, 0, pages.len()).pages.len();
        self.hold(&pages[had..])?;
        let (handle, _) = self.tree.insert(ROOT, 0, tokens, pages, 0)?;
        self.tree.release(handle)?;
        Ok(had)
    }

    /// All of `pages` or none. One pass, as nearly always nothing is wrong; else what the tree holds is counted again.
    fn hold(&mut self, pages: &[Page]) -> Result<()> {
        let num_pages = self.held.len().to_u32();
        // without a branch a page
        let beyond = |any: bool, &page: &Page| any | (page >= num_pages);
        if pages.iter().fold(false, beyond) {
            return argument("pages", format!("must be below {num_pages}"));
        }
        let mut twice = false;
        for &page in pages {
            twice |= std::mem::replace(&mut self.held[page.to_usize()], true);
        }
        if twice {
            self.held = self.held_by_tree()?;
            return argument("pages", "a page is in the cache, or named twice");
        }
        Ok(())
    }

    fn held_by_tree(&self) -> Result<Vec<bool>> {
        let mut held = vec![false; self.held.len()];
        for id in self.tree.ids() {
            for &page in &self.tree.node(id).pages {
                if std::mem::replace(&mut held[page.to_usize()], true) {
                    return broken(format!("page {page} is in the tree twice"));
                }
            }
        }
        Ok(held)
    }

    /// Take `num_pages` out, those of the prefixes that are due first. They are the caller's then.
    ///
    /// # Errors
    /// `Error::Argument`: fewer are unlocked; nothing is evicted.
    pub fn evict(&mut self, num_pages: usize) -> Result<Vec<Page>> {
        if num_pages > self.tree.num_evictable() {
            let reason = format!("{num_pages} of {}", self.tree.num_evictable());
            return argument("num_pages", reason);
        }
        let mut pages = Vec::with_capacity(num_pages);
        self.tree.take_each(num_pages, &mut pages)?;
        for &page in &pages {
            self.held[page.to_usize()] = false;
        }
        self.num_evictions += u64::from(num_pages > 0);
        Ok(pages)
    }

    /// Pages that may be evicted, and pages that are locked.
    #[must_use]
    pub fn size_info(&self) -> (usize, usize) {
        (self.tree.num_evictable(), self.tree.num_protected())
    }

    /// Each cached page, with all tokens from the start of the sequence to the page's end, in no order.
    #[must_use]
    pub fn tree_pages(&self) -> Vec<(Vec<i32>, Page)> {
        self.tree.tree_pages()
    }

    /// Check the tree's shape, its counts, and that no page is in it twice. O(everything).
    ///
    /// # Errors
    /// `Error::Broken`.
    pub fn check(&self) -> Result<()> {
        check_tree(&self.tree)?;
        let held = self.held_by_tree()?;
        need(held == self.held, || {
            "the pages of the tree and those held differ".into()
        })
    }
}

impl RadixTree {
    /// As `take` of one page, so many times: what the pool has, then evicted pages one by one.
    pub fn take_each(&mut self, num_pages: usize, into: &mut Vec<Page>) -> Result<()> {
        let free = self.pool.num_free().min(num_pages);
        self.pool.pop_many(free, into)?;
        let mut missing = num_pages - free;
        while missing > 0 {
            let (id, kept) = self.next_cut(missing)?;
            let pages = &self.node(id).pages[kept..];
            missing -= pages.len();
            into.extend(pages.iter().rev());
            self.cut(id, kept);
        }
        Ok(())
    }
}
