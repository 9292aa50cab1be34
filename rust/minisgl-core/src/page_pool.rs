//! Free pages of the KV pool, as a stack: the order in which pages are allocated is specified.
//!
//! Invariants: a page is on the stack at most once; at start, and after `reset`, the lowest page is on top.

use crate::api::{Result, broken};
use crate::numbers::ToU32;

/// Index of a page in the KV pool.
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

    /// Frees all pages and stacks them as at start.
    pub fn reset(&mut self) {
        self.free.clear();
        self.free.extend((0..self.num_pages.to_u32()).rev());
    }

    /// Pops `num_pages` pages and appends them to `into`, top of the stack first. `Error::Broken` if there are fewer.
    pub fn pop_many(&mut self, num_pages: usize, into: &mut Vec<Page>) -> Result<()> {
        let Some(left) = self.free.len().checked_sub(num_pages) else {
            return broken("a page was taken from an empty pool");
        };
        into.extend(self.free[left..].iter().rev());
        self.free.truncate(left);
        Ok(())
    }

    /// Frees `pages` in order: the last of them is allocated first. `Error::Broken` if more are free than the pool has.
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

    /// Returns the stack of free pages. The last element is allocated next.
    pub fn free_pages(&self) -> &[Page] {
        &self.free
    }
}

/// Division by the page size: a shift if it is a power of two.
#[derive(Clone, Copy)]
pub(crate) struct PageSize {
    size: u32,
    mask: u32, // size - 1 for a power of two, else 0
    shift: u32,
}

impl PageSize {
    pub fn new(tokens: usize) -> Self {
        let size = tokens.to_u32();
        Self {
            size,
            mask: if size.is_power_of_two() { size - 1 } else { 0 },
            shift: size.trailing_zeros(),
        }
    }

    pub fn size(self) -> u32 {
        self.size
    }

    /// Returns the number of pages that `tokens` tokens occupy, rounded up.
    pub fn count(self, tokens: u32) -> u32 {
        let (full, rest) = self.split(tokens);
        full + u32::from(rest > 0)
    }

    /// Returns the page index (column of the page table) and the offset in the page of a token position.
    pub fn split(self, position: u32) -> (u32, u32) {
        if self.mask + 1 == self.size {
            (position >> self.shift, position & self.mask)
        } else {
            (position / self.size, position % self.size)
        }
    }
}
