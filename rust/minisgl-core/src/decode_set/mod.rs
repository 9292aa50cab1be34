//! The decode set: started requests in request order, as dense columns that a decode step visits.
//!
//! Invariants: rows are sorted by (background, age, id), and every started request has one.
//!
//! While a request decodes, its row is authoritative and its record in `Requests` is only as recent as the last
//! `synchronize`, which must precede each read. While it prefills, the record is authoritative and the row follows it.
//! Rows are scheduled and committed in *runs* of neighbours: a plain decode step is one run, and each of its loops goes
//! over plain arrays (`runs`). Tokens, and pages of one token, are first appended to an `AppendBuffer`; each step
//! flushes it for a sixteenth of the slots. Larger pages, which begin less often, are appended at once.

mod columns;
mod runs;

use columns::{AppendBuffer, Columns, due};
pub(crate) use columns::{Row, RowFlags};

use std::ops::Range;

use crate::api::{Result, broken};
use crate::numbers::{LowBits, ToU32, ToUsize};
use crate::page_pool::{Page, PageSize};
use crate::request::{Index, NO_STEP, Requests};

impl Row {
    /// Returns the number of committed tokens of a decoding row. Its KV covers all scheduled tokens but the last.
    pub fn len(&self) -> u32 {
        self.kv_len + 1 - self.num_pending
    }

    /// Returns true if the row equals the synchronized record of `index`. For invariant checks.
    pub fn equals_record(&self, index: Index, requests: &Requests) -> bool {
        *self == row_of(index, requests)
    }
}

const NO_PLACE: u32 = u32::MAX;
const NO_INDEX: Index = Index::MAX;

/// Started requests, sorted by (background, age, id).
pub(crate) struct DecodeSet {
    rows: Columns, // rows before `head` were removed
    head: usize,
    place: Vec<u32>,     // position in `rows`, by request index
    of_slot: Vec<Index>, // request index, by slot
    num_stopping: usize, // rows with stop ids
    num_special: usize,  // rows that prefill or await their tokens
    num_background: usize,
    tokens: AppendBuffer<i32>,
    pages: AppendBuffer<Page>,
    page_size: PageSize,
    // scratch for the current run
    new_rows: Vec<u32>, // rows of the run that begin a page
    new_pages: Vec<Page>,
}

impl DecodeSet {
    pub fn new(max_rows: usize, page_size: PageSize) -> Self {
        Self {
            rows: Columns::with_capacity(2 * max_rows),
            head: 0,
            place: Vec::new(),
            of_slot: vec![NO_INDEX; max_rows],
            num_stopping: 0,
            num_special: 0,
            num_background: 0,
            tokens: AppendBuffer::new(max_rows),
            pages: AppendBuffer::new(max_rows),
            page_size,
            new_rows: Vec::with_capacity(max_rows),
            new_pages: Vec::with_capacity(max_rows),
        }
    }

    pub fn len(&self) -> usize {
        self.rows.len() - self.head
    }

    /// Returns the number of rows that are not in the background. They come first.
    pub fn num_ordinary(&self) -> usize {
        self.len() - self.num_background
    }

    pub fn num_background(&self) -> usize {
        self.num_background
    }

    /// Returns the row at position `at` in request order (0 .. len() - 1).
    pub fn row(&self, at: usize) -> Row {
        self.rows.get(self.head + at)
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Row> + '_ {
        (self.head..self.rows.len()).map(|at| self.rows.get(at))
    }

    /// Returns the request index of each row, in order.
    pub fn indices(&self) -> &[Index] {
        &self.rows.index[self.head..]
    }

    /// Returns the position of a request's row, or `None` if it has not started.
    pub fn find(&self, index: Index) -> Option<usize> {
        match self.place.get(index.to_usize()) {
            Some(&place) if place != NO_PLACE => Some(place.to_usize() - self.head),
            _ => None,
        }
    }

    // ---------------------------------------------------------------------------------------------- coming, going

    /// Adds a request that just started, with its first chunk scheduled.
    pub fn add(&mut self, index: Index, requests: &Requests) {
        let order = requests.cold(index).order;
        let before = |&one: &Index| requests.cold(one).order < order;
        let at = if self.indices().last().is_none_or(before) {
            self.rows.len()
        } else {
            self.head + self.indices().partition_point(before)
        };
        let num_indices = self.place.len().max(index.to_usize() + 1);
        self.place.resize(num_indices, NO_PLACE);
        let row = row_of(index, requests);
        self.num_stopping += usize::from(row.kind.has_stop_ids);
        self.num_special += usize::from(row.kind.is_special());
        self.num_background += usize::from(row.kind.background);
        self.of_slot[row.slot.to_usize()] = index;
        self.rows.insert(at, &row);
        self.number_from(at);
    }

    /// Removes a request's row. Synchronize first: only its record remains. `Error::Broken` if it has not started.
    pub fn remove(&mut self, index: Index) -> Result<()> {
        let Some(at) = self.find(index) else {
            return broken("a request that has not started is to leave the decode set");
        };
        self.place[index.to_usize()] = NO_PLACE;
        self.of_slot[self.rows.slot[self.head + at].to_usize()] = NO_INDEX;
        let kind = self.rows.kind[self.head + at];
        self.num_stopping -= usize::from(kind.has_stop_ids);
        self.num_special -= usize::from(kind.is_special());
        self.num_background -= usize::from(kind.background);
        if at > 0 {
            self.rows.remove(self.head + at);
            self.number_from(self.head + at);
            return Ok(());
        }
        self.head += 1;
        if self.head > self.rows.len() / 2 {
            self.rows.drop_first(self.head);
            self.head = 0;
            self.number_from(0);
        }
        Ok(())
    }

    pub fn clear(&mut self) {
        self.rows.clear();
        self.head = 0;
        self.num_stopping = 0;
        self.num_special = 0;
        self.num_background = 0;
        self.place.fill(NO_PLACE);
        self.of_slot.fill(NO_INDEX);
    }

    fn number_from(&mut self, at: usize) {
        for (&index, place) in self.rows.index[at..].iter().zip(at.to_u32()..) {
            self.place[index.to_usize()] = place;
        }
    }

    // --------------------------------------------------------------------------------------------- row and record

    /// Reloads a row from the request's record after that changed (a chunk or a draft was scheduled or committed).
    pub fn load(&mut self, index: Index, requests: &Requests) {
        if let Some(at) = self.find(index) {
            let row = row_of(index, requests);
            let (rows, at) = (&mut self.rows, self.head + at);
            rows.kv_len[at] = row.kv_len;
            rows.left[at] = row.left;
            rows.num_pending[at] = row.num_pending;
            rows.last_page[at] = row.last_page;
            rows.last_token[at] = row.last_token;
            rows.last_step[at] = row.last_step;
            self.num_special -= usize::from(rows.kind[at].is_special());
            self.num_special += usize::from(row.kind.is_special());
            rows.kind[at] = row.kind;
        }
    }

    /// Updates a decoding request's record, tokens and pages from its row. `now` is the last scheduled step.
    pub fn synchronize(&mut self, index: Index, now: i64, requests: &mut Requests) {
        let Some(row) = self.find(index).map(|at| self.row(at)) else {
            return;
        };
        if row.kind.prefills {
            return;
        }
        let request = requests.get_mut(index);
        request.kv_len = row.kv_len;
        request.len = row.len();
        request.num_pending = row.num_pending;
        request.last_step = now - i64::from(now.low_u32().wrapping_sub(row.last_step));
        let sequence = requests.sequence_mut(index);
        let num_pages = self.page_size.count(row.kv_len);
        self.tokens.flush(row.slot, row.len(), &mut sequence.tokens);
        self.pages.flush(row.slot, num_pages, &mut sequence.pages);
    }

    /// Flushes buffered pages to the page tables whose turn is `step`. Call in every step after it is scheduled, so
    /// that the buffer never overflows.
    pub fn flush_pages(&self, step: i64, requests: &mut Requests) {
        if self.page_size.size() == 1 {
            self.due(step).for_each(|(at, index)| {
                let pages = &mut requests.sequence_mut(index).pages;
                self.pages.flush(self.rows.slot[at], self.rows.kv_len[at], pages);
            });
        }
    }

    /// Flushes buffered tokens to the sequences whose turn is `step`. Call in every step, after its commit.
    pub fn flush_tokens(&self, step: i64, requests: &mut Requests) {
        self.due(step).for_each(|(at, index)| {
            let len = self.rows.kv_len[at] + 1 - self.rows.num_pending[at];
            let tokens = &mut requests.sequence_mut(index).tokens;
            self.tokens.flush(self.rows.slot[at], len, tokens);
        });
    }

    /// Returns the decoding rows that are flushed in `step`, with their request indices.
    fn due(&self, step: i64) -> impl Iterator<Item = (usize, Index)> {
        let indices = due(step, &self.of_slot).filter(|&index| index != NO_INDEX);
        let rows = indices.map(|index| (self.place[index.to_usize()].to_usize(), index));
        rows.filter(|&(at, _)| !self.rows.kind[at].prefills)
    }

    // ------------------------------------------------------------------------------------------------------ counts

    /// Returns how many rows of `range` may decode in this step, given pages.
    pub fn num_eligible(&self, range: Range<usize>) -> usize {
        range.into_iter().filter(|&at| self.is_eligible(at)).count()
    }

    /// Returns the number of pages in a row's page table.
    pub fn num_pages(&self, row: &Row, requests: &Requests) -> usize {
        if row.kind.prefills || row.kind.drafting {
            requests.pages(row.index).len()
        } else {
            self.page_size.count(row.kv_len).to_usize()
        }
    }

    /// Returns a copy of a request's page table, with its buffered pages.
    pub fn page_table(&self, index: Index, requests: &Requests) -> Vec<Page> {
        let mut pages = requests.pages(index).to_vec();
        if let Some(row) = self.find(index).map(|at| self.row(at)) {
            let count = self.num_pages(&row, requests).to_u32();
            self.pages.flush(row.slot, count, &mut pages);
        }
        pages
    }
}

fn row_of(index: Index, requests: &Requests) -> Row {
    let request = requests.get(index);
    debug_assert_ne!(request.last_step, NO_STEP);
    Row {
        req_id: request.req_id,
        index,
        slot: request.slot,
        kv_len: request.kv_len,
        left: request.num_unscheduled(),
        num_pending: request.num_pending,
        last_page: requests.pages(index).last().copied().unwrap_or(0),
        last_token: requests.tokens(index).last().copied().unwrap_or(0),
        last_step: request.last_step.low_u32(),
        kind: RowFlags {
            prefills: request.is_prefilling(),
            awaits_token: requests.awaits_token(index),
            drafting: requests.is_drafting(index),
            has_stop_ids: request.has_stop_ids,
            background: request.background,
        },
    }
}
