//! Runs of decode rows: scheduling them and committing their tokens.
//!
//! Invariants: a row is scheduled only if its new token is within the request's limits, which is known before the token
//! is; its input is the last token of the sequence, committed or in flight.

use std::ops::Range;

use super::DecodeSet;
use crate::api::Result;
use crate::numbers::{LowBits, ToI32, ToU32, ToUsize};
use crate::radix::RadixTree;
use crate::request::Requests;
use crate::step::RingEntry;

impl DecodeSet {
    /// Returns true if the row at `at` may decode now. False while it prefills, when its last token is in flight, and
    /// for a row that awaits its tokens while any is in flight.
    pub(super) fn is_eligible(&self, at: usize) -> bool {
        let (rows, at) = (&self.rows, self.head + at);
        let kind = rows.kind[at];
        rows.left[at] > 0 && !kind.prefills && !(kind.awaits_token && rows.num_pending[at] > 0)
    }

    /// Returns the longest run of rows from `at` on, before `to`, that may decode now.
    pub fn run_from(&self, at: usize, to: usize) -> Range<usize> {
        let left = &self.rows.left[self.head + at..self.head + to];
        // fast path of a plain decode step: no branch for each row
        if self.num_special == 0 && !left.iter().fold(false, |any, &left| any | (left == 0)) {
            return at..to;
        }
        let eligible = (at..to).take_while(|&at| self.is_eligible(at));
        at..at + eligible.count()
    }

    /// Shortens a run to the rows for which `num_pages` pages suffice, one for each row that begins a page.
    pub fn limit_to_pages(&self, run: Range<usize>, num_pages: usize) -> Range<usize> {
        if num_pages >= run.len() {
            return run;
        }
        let mut left = num_pages;
        for at in run.clone() {
            if self.begins_page(at) {
                if left == 0 {
                    return run.start..at;
                }
                left -= 1;
            }
        }
        run
    }

    fn begins_page(&self, at: usize) -> bool {
        self.page_size.split(self.rows.kv_len[self.head + at]).1 == 0
    }

    /// Schedules a run: every row computes the KV of its last token and samples the next. Rows that begin a page take
    /// one from `tree`, in order; it must have enough. Writes into `entry`, from row `to` on, input, slot, length and
    /// (as `out_loc`) the last page; `write_step` does the rest.
    ///
    /// A token that is not committed yet is encoded as -(slot + 1): the engine reads it from its own last_token[slot].
    pub fn schedule(
        &mut self,
        run: Range<usize>,
        step: i64,
        tree: &mut RadixTree,
        requests: &mut Requests,
        entry: &mut RingEntry,
        to: usize,
    ) -> Result<()> {
        self.take_pages(run.clone(), tree, requests)?;
        let n = run.len();
        let run = self.head + run.start..self.head + run.end;
        let rows = &mut self.rows;
        rows.last_step[run.clone()].fill(step.low_u32());
        for left in &mut rows.left[run.clone()] {
            *left -= 1;
        }
        let slots = &rows.slot[run.clone()];
        let pending = &mut rows.num_pending[run.clone()];
        let ids = entry.input_ids[to..to + n].iter_mut();
        let places = entry.req_slots[to..to + n].iter_mut();
        let last_token = &rows.last_token[run.clone()];
        for ((((id, place), pending), &slot), &last_token) in ids.zip(places).zip(pending).zip(slots).zip(last_token) {
            *id = if *pending == 0 { last_token } else { -slot.to_i32() - 1 };
            *place = slot.to_i32();
            *pending += 1;
        }
        let lens = entry.seq_lens[to..to + n].iter_mut();
        for (kv_len, len) in rows.kv_len[run.clone()].iter_mut().zip(lens) {
            *kv_len += 1;
            *len = kv_len.to_i32();
        }
        let out_loc = entry.out_loc[to..to + n].iter_mut();
        for (&page, out) in rows.last_page[run].iter().zip(out_loc) {
            *out = page.to_i32();
        }
        Ok(())
    }

    fn take_pages(&mut self, run: Range<usize>, tree: &mut RadixTree, requests: &mut Requests) -> Result<()> {
        self.new_pages.clear();
        let size = self.page_size;
        let run = self.head + run.start..self.head + run.end;
        let rows = &mut self.rows;
        if size.size() == 1 {
            tree.take_each(run.len(), &mut self.new_pages)?;
            rows.last_page[run.clone()].copy_from_slice(&self.new_pages);
            let (slots, kv_lens) = (&rows.slot[run.clone()], &rows.kv_len[run.clone()]);
            self.pages.push(slots, kv_lens.iter().copied(), &self.new_pages);
            return Ok(());
        }
        self.new_rows.clear();
        let begins = |&at: &usize| size.split(rows.kv_len[at]).1 == 0;
        self.new_rows.extend(run.filter(begins).map(|at| at.to_u32()));
        tree.take_each(self.new_rows.len(), &mut self.new_pages)?;
        for (&at, &page) in self.new_rows.iter().zip(&self.new_pages) {
            let at = at.to_usize();
            rows.last_page[at] = page;
            requests.sequence_mut(rows.index[at]).pages.push(page);
        }
        Ok(())
    }

    /// Appends `tokens` to the rows from `at` on, one each. Calls `may_end` for each row that its token may end, in
    /// order, with the index into `tokens` and the sequence's length in tokens.
    pub fn take_tokens(
        &mut self,
        at: usize,
        tokens: &[i32],
        eos_ids: &[i32],
        requests: &mut Requests,
        mut may_end: impl FnMut(&Requests, usize, u32),
    ) {
        let run = self.head + at..self.head + at + tokens.len();
        let rows = &mut self.rows;
        rows.last_token[run.clone()].copy_from_slice(tokens);
        let pending = &mut rows.num_pending[run.clone()];
        let left = &rows.left[run.clone()];
        let mut suspicious = self.num_stopping > 0;
        for (pending, &left) in pending.iter_mut().zip(left) {
            *pending -= 1;
            suspicious |= *pending + left == 0;
        }
        for eos in eos_ids {
            suspicious |= tokens.contains(eos);
        }
        let (slots, kv_lens) = (&rows.slot[run.clone()], &rows.kv_len[run.clone()]);
        let places = kv_lens
            .iter()
            .zip(&*pending)
            .map(|(&kv_len, &pending)| kv_len - pending);
        self.tokens.push(slots, places, tokens);
        if suspicious {
            for (row, token) in tokens.iter().enumerate() {
                let of = rows.get(run.start + row);
                let used_up = of.left + of.num_pending == 0;
                if used_up || of.kind.has_stop_ids || eos_ids.contains(token) {
                    may_end(requests, row, of.len());
                }
            }
        }
    }

    /// Returns the clients' request ids of the rows from `at` on.
    pub fn req_ids(&self, at: usize) -> &[i64] {
        &self.rows.req_id[self.head + at..]
    }
}
