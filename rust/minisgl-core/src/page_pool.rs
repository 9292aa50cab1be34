//! The free pages of the KV pool: a stack, so that the order in which pages are given out is specified.
//!
//! Keeps true: a page is on the stack at most once; at start, and after `reset`, the lowest page is on top.
//! Doesn't know: who owns the pages that are not on the stack.

use crate::error::{Result, broken};

/// A page of the pool.
pub(crate) type Page = u32;

pub(crate) struct PagePool {
    num_pages: usize,
    free: Vec<Page>,
}

impl PagePool {
    pub fn new(num_pages: usize) -> Self {
        let mut pool = Self {
            num_pages,
            free: Vec::with_capacity(num_pages),
        };
        pool.reset();
        pool
    }

    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// All pages are free again, stacked as at start.
    pub fn reset(&mut self) {
        self.free.clear();
        self.free.extend((0..self.num_pages as Page).rev());
    }

    /// Take pages off the top, one by one, onto `into`. The caller has made sure that there are as many.
    pub fn pop_many(&mut self, num_pages: usize, into: &mut Vec<Page>) -> Result<()> {
        let Some(left) = self.free.len().checked_sub(num_pages) else {
            return broken("a page was taken from an empty pool");
        };
        into.extend(self.free[left..].iter().rev());
        self.free.truncate(left);
        Ok(())
    }

    /// Free pages, in order: the last of them is given out first.
    pub fn push(&mut self, pages: impl Iterator<Item = Page>) -> Result<()> {
        self.free.extend(pages);
        if self.free.len() > self.num_pages {
            return broken(format!(
                "{} pages are free, the pool has {}",
                self.free.len(),
                self.num_pages
            ));
        }
        Ok(())
    }

    /// The stack, the next page to be given out last.
    pub fn free_pages(&self) -> &[Page] {
        &self.free
    }
}
