//! The rows of a step as the scheduler gives them.
//!
//! Invariants: what `check` lets through reads no page outside of the pool and no entry outside of the tables.

use crate::error::{Error, Result};

/// The rows of a step: row i has the tokens `qo_indptr[i]..qo_indptr[i + 1]`, which are the last ones of its `seq_lens[i]`,
/// and the pages `table[slots[i] * columns ..]`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Length of each row, the step's tokens included.
    pub seq_lens: &'a [u32],
    /// Prefix sums of the rows' tokens of this step: one more than rows.
    pub qo_indptr: &'a [u32],
    /// All page tables, `columns` entries each.
    pub table: &'a [u32],
    /// Entries of one page table.
    pub columns: usize,
    /// The page table of each row.
    pub slots: &'a [u32],
}

impl<'a> Rows<'a> {
    /// Pages of a row; entries past its length mean nothing.
    pub fn pages(&self, row: usize) -> &'a [u32] {
        let from = self.slots[row] as usize * self.columns;
        &self.table[from..from + self.columns]
    }

    pub(super) fn check(&self, page_size: usize, pages: usize) -> Result<()> {
        let n = self.seq_lens.len();
        if self.qo_indptr.len() != n + 1 || self.slots.len() != n {
            return Err(Error::step(format!(
                "{n} rows have {} prefix sums and {} slots",
                self.qo_indptr.len(),
                self.slots.len()
            )));
        }
        for row in 0..n {
            let (from, to) = (self.qo_indptr[row], self.qo_indptr[row + 1]);
            let len = self.seq_lens[row] as usize;
            let end = (self.slots[row] as usize + 1).saturating_mul(self.columns);
            let needs = len.div_ceil(page_size);
            if to < from || (to - from) as usize > len || needs > self.columns || end > self.table.len() {
                return Err(Error::step(format!(
                    "row {row} of length {len}: tokens {from}..{to}, {needs} pages in a table of {}",
                    self.columns
                )));
            }
            if let Some(page) = self.pages(row)[..needs].iter().find(|p| **p as usize >= pages) {
                return Err(Error::step(format!("row {row}: page {page} of {pages}")));
            }
        }
        Ok(())
    }
}
