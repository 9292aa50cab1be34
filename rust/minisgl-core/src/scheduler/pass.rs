//! The pass that decides a step: started rows in request order, then new ones.
//!
//! Keeps true: decode rows come before everything else in the token budget; a failed admission changes nothing; after a
//! retraction nobody is admitted.
//! Doesn't know: tokens that were sampled, clients.

use super::Scheduler;
use crate::admission::{self, Chunk};
use crate::error::Result;
use crate::metadata::{Plan, PrefillRow, RingEntry, write_step};
use crate::request::{Index, State};
use crate::retraction;

impl Scheduler {
    /// Decide step `step`. What only the decode rows know of themselves is written into `entry` as they come,
    /// the rest follows in `write`.
    pub(super) fn decide(&mut self, step: i64, entry: &mut RingEntry) -> Result<()> {
        self.decided.begin(step);
        let mut budget = self.budget();
        let mut prefills = true;
        let mut prefilling = false;
        let mut at = 0;
        while at < self.started.len() {
            // a retraction takes requests off its end
            let row = self.started.row(at);
            if row.kind.prefills {
                if prefills {
                    let used = self.prefill(row.index, budget)?;
                    budget -= used as i64;
                    prefills = used > 0;
                }
                prefilling |= self.started.row(at).kind.prefills;
                at += 1;
            } else {
                at += self.decode_from(at, entry)?.max(1);
            }
        }
        self.prefilling = prefilling;
        if prefills && self.decided.num_retracted == 0 {
            self.admit(budget)?;
        }
        if self.decided.prefill_rows.len() > 1 {
            let requests = &self.requests;
            self.decided
                .prefill_rows
                .sort_by_key(|row| requests.detail(row.index).order);
        }
        std::mem::swap(&mut self.decided.freed, &mut self.slots.freed);
        self.ratio.after_step(self.decided.num_retracted);
        Ok(())
    }

    /// Tokens that are left for prefill, decode rows counted first; nobody asks without anyone to prefill.
    fn budget(&self) -> i64 {
        let most = self.config.max_prefill_length as i64;
        if self.waiting.is_empty() && !self.prefilling {
            return most;
        }
        most - self.started.num_eligible() as i64
    }

    /// Schedule the neighbours from `at` on that may decode now and for which there are pages, free ones or evicted ones;
    /// where not even the first has one, the last request started is retracted. Returns their number, 0 if the row at
    /// `at` waits: it may not decode, or is that last one itself.
    fn decode_from(&mut self, at: usize, entry: &mut RingEntry) -> Result<usize> {
        loop {
            let run = self.started.run_from(at);
            if run.is_empty() {
                return Ok(0);
            }
            let run = self.started.cut(run, self.tree.num_available());
            let to = self.decided.decode_rows.len();
            if !run.is_empty() {
                let rows = &self.started.indices()[run.clone()];
                self.decided.decode_rows.extend_from_slice(rows);
                let (step, count) = (self.decided.step, run.len());
                self.started
                    .schedule(run, step, &mut self.tree, &mut self.requests, entry, to)?;
                return Ok(count);
            }
            if !self.retract_for(self.started.indices()[at])? {
                return Ok(0);
            }
        }
    }

    fn retract_for(&mut self, index: Index) -> Result<bool> {
        let Some(victim) = retraction::pick_victim(&self.started, index) else {
            return Ok(false);
        };
        self.retract(victim)?;
        self.decided.num_retracted += 1;
        Ok(true)
    }

    /// The next chunk of a started request; the number of its tokens, 0 if it gets nothing. Where pages lack altogether,
    /// the last request started is retracted, and the chunk is matched and sized again.
    fn prefill(&mut self, index: Index, budget: i64) -> Result<usize> {
        loop {
            let chunk = self.size_chunk(index, budget);
            if chunk.num_tokens > 0 {
                self.take_chunk(index, &chunk)?;
                return Ok(chunk.num_tokens);
            }
            if !(chunk.lacks_pages && self.retract_for(index)?) {
                return Ok(0);
            }
        }
    }

    /// The first prefill of a step has at least a page, whatever the budget. Of the page-table entries of a step, one per
    /// row is kept for decode rows.
    fn size_chunk(&self, index: Index, budget: i64) -> Chunk {
        let budget = match self.decided.prefill_rows.len() {
            0 => budget.max(self.limits.page_size as i64),
            _ => budget,
        };
        let room = self.limits.max_page_changes()
            - self.limits.max_rows
            - self.decided.num_prefill_page_changes;
        admission::size_chunk(&self.requests, index, &self.tree, budget, room)
    }

    fn take_chunk(&mut self, index: Index, chunk: &Chunk) -> Result<()> {
        let first_column = self.requests.pages(index).len();
        admission::apply_chunk(&mut self.requests, index, chunk, &mut self.tree)?;
        let request = self.requests.get_mut(index);
        let samples = request.kv_len == request.prefill_len;
        request.num_pending += u32::from(samples);
        request.last_step = self.decided.step;
        self.started.load(index, &self.requests);
        self.decided.prefill_rows.push(PrefillRow {
            index,
            num_tokens: chunk.num_tokens,
            first_column,
            samples,
        });
        self.decided.num_prefill_page_changes += chunk.num_page_changes();
        Ok(())
    }

    /// Start waiting requests in order, to the first that gets nothing: no slot, no budget, no pages, or more than the
    /// estimate allows. With nothing started the first in line may start whatever the estimate says.
    fn admit(&mut self, mut budget: i64) -> Result<()> {
        let size = self.page_size;
        let mut needed: Option<usize> = None;
        while let Some(index) = self.waiting.first() {
            if self.slots.num_free() == 0 || (budget <= 0 && !self.decided.prefill_rows.is_empty())
            {
                return Ok(());
            }
            let chunk = self.size_chunk(index, budget);
            if chunk.num_tokens == 0 {
                return Ok(());
            }
            let by_started = needed.unwrap_or_else(|| {
                let each = self.started.iter();
                each.map(|row| admission::needed_pages(&self.requests, &row, &self.ratio, size))
                    .sum()
            });
            let fits = || {
                admission::fits(
                    &self.requests,
                    index,
                    &chunk.found,
                    by_started,
                    &self.ratio,
                    &self.tree,
                    size,
                )
            };
            if !self.started.is_empty() && !fits() {
                return Ok(());
            }
            self.start(index, &chunk)?;
            budget -= chunk.num_tokens as i64;
            let row = self.started.find(index).map(|at| self.started.row(at));
            let own =
                row.map(|row| admission::needed_pages(&self.requests, &row, &self.ratio, size));
            needed = Some(by_started + own.unwrap_or(0));
        }
        Ok(())
    }

    fn start(&mut self, index: Index, chunk: &Chunk) -> Result<()> {
        self.waiting.remove(index, &self.requests)?;
        let slot = self.slots.assign()?;
        let request = self.requests.get_mut(index);
        request.state = State::Started;
        request.slot = slot;
        request.prefill_len = request.len;
        let length = u64::from(request.len);
        let cached_len = chunk.found.pages.len() * self.limits.page_size;
        let detail = self.requests.detail_mut(index);
        detail.num_admissions += 1;
        if detail.num_admissions == 1 {
            self.num_prompt_tokens += length;
            self.num_cached_tokens += cached_len as u64;
        }
        self.requests.reserve_pages(index, self.limits.page_size);
        self.decided.assigned.push((index, cached_len));
        self.take_chunk(index, chunk)?;
        self.prefilling |= self.requests.get(index).is_prefilling();
        self.started.add(index, &self.requests);
        Ok(())
    }

    pub(super) fn write(&mut self, entry: &mut RingEntry, ring_index: usize) -> Plan {
        let mut flight = self.spare.pop().unwrap_or_default();
        flight.step = self.decided.step;
        let mut plan = write_step(
            &self.decided,
            &self.requests,
            entry,
            &self.limits,
            &self.config.graph_sizes,
            &mut flight.rows,
            &mut flight.sample_rows,
        );
        plan.ring_index = ring_index;
        plan.num_free_pages = self.tree.pool.num_free();
        plan.num_evictable_pages = self.tree.num_evictable();
        self.in_flight.push_back(flight);
        plan
    }
}
