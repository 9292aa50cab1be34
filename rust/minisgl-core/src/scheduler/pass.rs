//! The pass that decides a step: rows of started requests in order, then new ones.
//!
//! Invariants: decode rows come first in the token budget; a failed admission changes nothing; after a retraction no
//! request is admitted; a background row takes nothing from other requests.

use super::Scheduler;
use crate::admission::{self, Chunk};
use crate::api::{CachePolicy, Result, SchedulePolicy};
use crate::metadata::{PrefillRow, write_step};
use crate::numbers::{ToI32, ToI64, ToU32, ToU64, ToUsize};
use crate::ranking::MAX_LOOK_UPS;
use crate::request::{Index, State, Tail};
use crate::retraction;
use crate::step::{FROM_STORE, Plan, RingEntry, UNBOUNDED};

impl Scheduler {
    /// Decides step `step`. Writes the decode rows' columns into `entry`; `write` adds the rest.
    pub(super) fn decide(&mut self, step: i64, entry: &mut RingEntry) -> Result<()> {
        self.decided.begin(step);
        self.prefilling = self.prefilling || self.state.started.num_background() > 0;
        let counts = self.prefilling || !self.state.waiting.is_empty() || self.config.max_draft_len > 0;
        self.prefilling = false;
        let left = self.pass(self.budget(), UNBOUNDED, counts, entry)?;
        if self.config.max_draft_len > 0 {
            self.add_drafts(left.unwrap_or(0))?;
        }
        if let Some(budget) = left
            && counts
            && self.decided.draft_rows.is_empty()
            && self.state.waiting.num_ordinary(&self.state.requests) == 0
        {
            self.background_pass(budget, entry)?;
        }
        if self.decided.prefill_rows.len() > 1 {
            let requests = &self.state.requests;
            self.decided
                .prefill_rows
                .sort_by_key(|row| requests.cold(row.index).order);
        }
        std::mem::swap(&mut self.decided.freed, &mut self.state.slots.freed);
        self.state.started.flush_pages(step, &mut self.state.requests);
        let by_others = self.decided.num_retracted - self.decided.num_gave_way;
        self.state.ratio.after_step(by_others);
        self.enforce_cache_budget()?;
        if self.config.checkpoint_interval > 0 {
            self.save_tails(step, entry)?;
            self.state.tree.settle_checkpoints();
        }
        Ok(())
    }

    /// Saves the state of decoding sequences at every checkpoint interval, in one slot for each request.
    fn save_tails(&mut self, step: i64, entry: &RingEntry) -> Result<()> {
        if self.config.cache == CachePolicy::Naive {
            return Ok(());
        }
        let saved_lens = self.saved_lens;
        let lens = &entry.seq_lens[..self.decided.decode_rows.len()];
        for (part, lens) in lens.chunks(32).enumerate() {
            // most chunks have no row to save; a vectorised test skips them
            if !lens
                .iter()
                .fold(false, |any, len| any | saved_lens.may_have(len.to_u32()))
            {
                continue;
            }
            for (at, &len) in lens.iter().enumerate() {
                if saved_lens.has(len.to_u32()) {
                    self.save_tail(32 * part + at, len.to_u32(), step)?;
                }
            }
        }
        Ok(())
    }

    fn save_tail(&mut self, row: usize, len: u32, step: i64) -> Result<()> {
        let index = self.decided.decode_rows[row];
        let slot = match self.state.requests.cold(index).tail {
            Some(tail) => Some(tail.slot),
            None => self.state.tree.take_slot()?,
        };
        if let Some(slot) = slot {
            self.state.requests.cold_mut(index).tail = Some(Tail { slot, len, step });
            self.decided.tail_saves.push((row, slot));
            self.num_saved += 1;
        }
        Ok(())
    }

    /// Returns the token budget of this step. A decoding request limits it even while it waits for a token, so that no
    /// long step comes between its tokens; a background one does not. A step for background requests alone is as short
    /// as one with decode rows, because a new request waits for its end.
    fn budget(&self) -> i64 {
        let num_ordinary = self.state.started.num_ordinary();
        let mut ordinary = self.state.started.iter().take(num_ordinary);
        let prefills = ordinary.all(|row| row.kind.prefills)
            && (num_ordinary > 0 || self.state.waiting.num_ordinary(&self.state.requests) > 0);
        let budget = if prefills {
            self.budgets.prefill_only
        } else {
            self.budgets.beside_decode
        };
        budget.min(self.config.max_prefill_length.to_i64())
    }

    /// Schedules background requests within their token allowance, if there are any.
    fn background_pass(&mut self, budget: i64, entry: &mut RingEntry) -> Result<()> {
        if self.state.started.num_background() == 0 && self.state.waiting.is_empty() {
            return Ok(());
        }
        let others = self.decided.num_tokens();
        let prefilled = if self.decided.prefill_rows.is_empty() {
            0
        } else {
            others
        };
        let num_ordinary = self.state.started.num_ordinary();
        let limit = self.background.bound(num_ordinary, prefilled.to_i64());
        if limit > 0 {
            self.decided.background = true;
            self.pass(budget, limit, true, entry)?;
        }
        self.decided.num_background = self.decided.num_tokens() - others;
        self.background.spend(self.decided.num_background.to_i64());
        Ok(())
    }

    /// Schedules rows of the background requests or of the others: started ones in order, then new ones. Decode rows
    /// come first in the `budget`, if `counts`, and within `limit` tokens; a prefill gets at least a page if
    /// tokens are left. Returns the budget left, or `None` if a prefill row got no chunk.
    fn pass(&mut self, budget: i64, limit: i64, counts: bool, entry: &mut RingEntry) -> Result<Option<i64>> {
        let mut prefilling = false;
        let mut at = if self.decided.background {
            self.state.started.num_ordinary()
        } else {
            0
        };
        let mut num_decode = limit; // decode rows that fit
        let mut budget = budget;
        if counts {
            num_decode = limit.min(self.state.started.num_eligible(at..self.end_of_pass()).to_i64());
            budget = (budget - num_decode).min((limit - num_decode).max(self.limits.page_size.to_i64()));
        }
        let mut prefills = !counts || num_decode < limit;
        while at < self.end_of_pass() {
            // a retraction removes requests from the end
            let row = self.state.started.row(at);
            if row.kind.prefills {
                if prefills {
                    let used = self.prefill(row.index, budget)?;
                    budget -= used.to_i64();
                    prefills = used > 0;
                }
                prefilling |= self.state.started.row(at).kind.prefills;
                at += 1;
            } else {
                let count = self.decode_from(at, num_decode, entry)?;
                num_decode -= count.to_i64();
                at += count.max(1);
            }
        }
        self.prefilling |= prefilling;
        if !prefills {
            return Ok(None);
        }
        let by_priority = if self.decided.background {
            0
        } else {
            self.decided.num_gave_way
        };
        if self.decided.num_retracted == by_priority {
            budget = self.admit(budget)?;
        }
        Ok(Some(budget))
    }

    /// Returns the end (exclusive) of the decode-set positions in the current pass.
    fn end_of_pass(&self) -> usize {
        if self.decided.background {
            self.state.started.len()
        } else {
            self.state.started.num_ordinary()
        }
    }

    /// Evicts unlocked pages above the configured cache budget.
    fn enforce_cache_budget(&mut self) -> Result<()> {
        let budget = self.config.cache_token_budget;
        if budget == 0 {
            return Ok(());
        }
        let max_pages = budget / self.limits.page_size;
        let excess = self.state.tree.num_evictable().saturating_sub(max_pages);
        self.state.tree.evict(excess)
    }

    /// Schedules up to `limit` neighbouring rows from `at` on that may decode, given free or evictable pages. If
    /// even the first lacks a page, retracts the request started last. Returns the number of rows; 0 if the row at `at`
    /// waits, because it may not decode or is that last one.
    fn decode_from(&mut self, at: usize, limit: i64, entry: &mut RingEntry) -> Result<usize> {
        loop {
            let end = self.end_of_pass().min(at + usize::try_from(limit).unwrap_or(0));
            let run = self.state.started.run_from(at, end);
            if run.is_empty() {
                return Ok(0);
            }
            let run = self.state.started.limit_to_pages(run, self.state.tree.num_available());
            let to = self.decided.decode_rows.len();
            if !run.is_empty() {
                let rows = &self.state.started.indices()[run.clone()];
                self.decided.decode_rows.extend_from_slice(rows);
                let (step, count) = (self.decided.step, run.len());
                self.state
                    .started
                    .schedule(run, step, &mut self.state.tree, &mut self.state.requests, entry, to)?;
                return Ok(count);
            }
            if !self.retract_for(self.state.started.indices()[at])? {
                return Ok(0);
            }
        }
    }

    fn retract_for(&mut self, index: Index) -> Result<bool> {
        let Some(victim) = retraction::pick_victim(&self.state.started, index) else {
            return Ok(false);
        };
        self.retract(victim)?;
        Ok(true)
    }

    /// Retracts the last started background request for another request. Returns false if there is none.
    pub(super) fn retract_background(&mut self) -> Result<bool> {
        let started = &self.state.started;
        if self.decided.background || started.num_background() == 0 {
            return Ok(false);
        }
        match started.indices().last() {
            Some(&last) => self.retract(last).map(|()| true),
            None => Ok(false),
        }
    }

    /// Schedules the next chunk of a started request and returns its cost in tokens, 0 without a chunk. Retracts
    /// background requests if pages are short, and the request started last if there are none; then sizes again.
    fn prefill(&mut self, index: Index, budget: i64) -> Result<usize> {
        loop {
            let chunk = self.size_chunk(index, budget);
            if chunk.lacks_pages && self.retract_background()? {
                continue;
            }
            if chunk.num_tokens > 0 {
                self.schedule_chunk(index, &chunk)?;
                return Ok(chunk.cost);
            }
            if !(chunk.lacks_pages && self.retract_for(index)?) {
                return Ok(0);
            }
        }
    }

    /// Sizes a chunk. The first prefill of a step gets at least a page, whatever the budget; one page-table entry for
    /// each row is reserved for decode rows.
    fn size_chunk(&self, index: Index, budget: i64) -> Chunk {
        let budget = match self.decided.prefill_rows.len() {
            0 => budget.max(self.limits.page_size.to_i64()),
            _ => budget,
        };
        let room = self.limits.max_page_changes() - self.limits.max_rows - self.decided.num_prefill_page_changes;
        let step = self.decided.step;
        admission::size_chunk(&self.state.requests, index, &self.state.tree, budget, room, step)
    }

    fn schedule_chunk(&mut self, index: Index, chunk: &Chunk) -> Result<()> {
        let first_column = self.state.requests.pages(index).len();
        let begins = self.initial_state(chunk, first_column);
        let (tree, saves) = (&mut self.state.tree, &mut self.decided.saves);
        let (when, first_save) = ((self.config.checkpoint_interval, self.decided.step), saves.len());
        let at = admission::apply_chunk(&mut self.state.requests, index, chunk, tree)?;
        let requests = &self.state.requests;
        let pinned = self.state.pins.take(requests, index, tree)?;
        admission::save_states(requests, index, chunk, tree, at, when, saves)?;
        if pinned {
            self.state.pins.hold(requests.get(index).req_id, tree);
        }
        let saves = (first_save, saves.len());
        self.num_saved += (saves.1 - saves.0).to_u64();
        let request = self.state.requests.get_mut(index);
        let samples = request.kv_len == request.prefill_len;
        request.num_pending += u32::from(samples);
        request.last_step = self.decided.step;
        self.state.started.load(index, &self.state.requests);
        self.decided.prefill_rows.push(PrefillRow {
            index,
            num_tokens: chunk.num_tokens,
            first_column,
            samples,
            num_covered: chunk.num_covered * self.limits.page_size,
            begins,
            saves,
            num_loads: chunk.num_loads,
        });
        self.num_loaded += chunk.num_loads.to_u64();
        self.decided.num_prefill_page_changes += chunk.num_page_changes();
        Ok(())
    }

    /// Returns the source of the row's initial state: a checkpoint slot, `FROM_STORE`, or -1 for an empty state. `None`
    /// if the request continues with its own state.
    fn initial_state(&mut self, chunk: &Chunk, num_pages: usize) -> Option<i32> {
        if chunk.begins_stored {
            return Some(FROM_STORE);
        }
        let tree = &mut self.state.tree;
        let has_match = !chunk.matched.pages.is_empty();
        if tree.checkpoints.is_none() || (num_pages > 0 && !has_match) {
            return None;
        }
        let node = chunk.matched.end().filter(|_| has_match);
        Some(node.map_or(-1, |node| {
            tree.use_checkpoint(node);
            tree.node(node).checkpoint.to_i32()
        }))
    }

    /// Admits waiting requests in ranked order until the first that lacks a slot, budget or pages, or exceeds the
    /// estimate. Returns the budget left. With no started request, the next may start whatever the estimate. Background
    /// requests are retracted one by one for a slot, pages or the estimate. If memory alone is lacking, small requests
    /// may overtake, except under fcfs.
    fn admit(&mut self, mut budget: i64) -> Result<i64> {
        let mut needed = None; // estimated pages that started requests will yet take
        while budget > 0 || self.decided.prefill_rows.is_empty() {
            let first = self.state.waiting.first();
            let first = first.filter(|&at| self.state.requests.get(at).background == self.decided.background);
            if first.is_none() {
                break;
            }
            if self.state.slots.num_free() == 0 {
                let awaits_slot =
                    self.state.slots.num_draining() >= self.state.waiting.num_ordinary(&self.state.requests);
                if awaits_slot || !self.retract_background()? {
                    break;
                }
                continue;
            }
            let Some(index) = self.next_in_rank() else { break };
            let chunk = self.size_chunk(index, budget);
            if chunk.num_tokens == 0 && !chunk.lacks_pages {
                break;
            }
            let by_started = *needed.get_or_insert_with(|| self.needed_by_started());
            let missing = self.num_missing(index, &chunk, by_started);
            let fits = self.end_of_pass() == 0 || missing == 0;
            if (chunk.lacks_pages || !fits) && self.retract_background()? {
                continue;
            }
            if !fits && self.state.ranking.policy != SchedulePolicy::Fcfs {
                let wait = self.steps_until_free(missing);
                return self.admit_small(index, wait, by_started, budget);
            }
            if chunk.num_tokens == 0 || !fits {
                break;
            }
            self.start(index, &chunk)?;
            budget -= chunk.cost.to_i64();
            needed = Some(by_started + self.needed_by(index));
        }
        Ok(budget)
    }

    fn next_in_rank(&mut self) -> Option<Index> {
        let (state, step) = (&mut self.state, self.decided.step);
        state
            .ranking
            .next(&state.waiting, &mut state.requests, &state.tree, step)
    }

    fn needed_by_started(&self) -> usize {
        let (state, size) = (&self.state, self.page_size);
        let started = state.started.iter().take(self.end_of_pass());
        started
            .map(|row| admission::needed_pages(&state.requests, &row, &state.ratio, size))
            .sum()
    }

    /// Estimates the pages that a request just started will yet take.
    fn needed_by(&self, index: Index) -> usize {
        let state = &self.state;
        let row = state.started.find(index).map(|at| state.started.row(at));
        row.map_or(0, |row| {
            admission::needed_pages(&state.requests, &row, &state.ratio, self.page_size)
        })
    }

    fn steps_until_free(&self, missing: usize) -> u32 {
        let (state, size) = (&self.state, self.page_size);
        let started = state.started.iter().take(self.end_of_pass());
        let pages_of = |row| {
            state.started.num_pages(&row, &state.requests)
                + admission::needed_pages(&state.requests, &row, &state.ratio, size)
        };
        admission::steps_until_free(missing, started.map(|row| (row.left, pages_of(row))).collect())
    }

    /// Starts small requests ahead of `head`, which may lack memory for `wait` steps: candidates whose whole prompt
    /// fits in this step and whose token limit ends them before that, so that `head` is not delayed.
    fn admit_small(&mut self, head: Index, wait: u32, mut needed: usize, mut budget: i64) -> Result<i64> {
        let size = self.limits.page_size;
        let (waiting, requests) = (&self.state.waiting, &self.state.requests);
        let limit = self.state.ranking.num_candidates(waiting, requests).min(MAX_LOOK_UPS);
        let candidates: Vec<Index> = waiting.iter().take(limit).collect();
        for index in candidates {
            let request = self.state.requests.get(index);
            if index == head || request.num_unscheduled() > wait {
                continue;
            }
            if budget <= 0 || self.state.slots.num_free() == 0 {
                break;
            }
            let len = request.len.to_usize();
            let rest = (len - self.state.requests.cold(index).cached_len).div_ceil(size);
            if needed + rest > self.state.tree.num_available() {
                continue; // by the remembered cached length
            }
            let chunk = self.size_chunk(index, budget);
            let done = (chunk.matched.pages.len() + chunk.num_loads) * size + chunk.num_tokens == len;
            if done && self.num_missing(index, &chunk, needed) == 0 {
                self.start(index, &chunk)?;
                budget -= chunk.cost.to_i64();
                needed += self.needed_by(index);
            }
        }
        Ok(budget)
    }

    /// Estimates how many pages are missing to start a waiting request.
    fn num_missing(&self, index: Index, chunk: &Chunk, needed_by_started: usize) -> usize {
        let (state, size) = (&self.state, self.page_size);
        let request = state.requests.get(index);
        let rest = size.count(request.len).to_usize() - chunk.matched.pages.len();
        let reserve = state.ratio.reserve_pages(request.num_unscheduled(), size);
        (rest + reserve + needed_by_started).saturating_sub(state.tree.num_available() - chunk.matched.num_unlocked)
    }

    /// Starts a waiting request: assigns a slot and its first chunk.
    fn start(&mut self, index: Index, chunk: &Chunk) -> Result<()> {
        self.state.waiting.remove(index, &self.state.requests)?;
        self.state.ranking.last_start = self.decided.step;
        let slot = self.state.slots.assign()?;
        let request = self.state.requests.get_mut(index);
        request.state = State::Started;
        request.slot = slot;
        request.prefill_len = request.len;
        let length = u64::from(request.len);
        let matched_len = chunk.matched.pages.len() * self.limits.page_size;
        let cached_len = matched_len + chunk.num_loads * self.limits.page_size;
        let cold = self.state.requests.cold_mut(index);
        cold.num_admissions += 1;
        cold.num_found_pages.get_or_insert(chunk.num_found);
        if cold.num_admissions == 1 {
            self.num_prompt_tokens += length;
            self.num_cached_tokens += cached_len.to_u64();
            self.num_hits += u64::from(cached_len > 0);
            self.num_misses += u64::from(cached_len == 0);
            let found_len = chunk.num_found * self.limits.page_size;
            self.num_cut_short += u64::from(found_len > matched_len);
            self.num_computed_again += (found_len - matched_len).to_u64();
        }
        self.state.requests.reserve_pages(index, self.limits.page_size);
        self.decided.assigned.push((index, cached_len));
        self.schedule_chunk(index, chunk)?;
        self.prefilling |= self.state.requests.get(index).is_prefilling();
        self.state.started.add(index, &self.state.requests);
        Ok(())
    }

    pub(super) fn write(&mut self, entry: &mut RingEntry, ring_index: usize) -> Plan {
        let mut flight = self.spare.pop().unwrap_or_default();
        flight.step = self.decided.step;
        flight.first_draft_row = self.decided.decode_rows.len();
        flight.drafts.clone_from(&self.decided.draft_rows);
        let mut plan = write_step(
            &self.decided,
            &self.state.requests,
            entry,
            &self.limits,
            &self.config.graph_sizes,
            &mut flight.rows,
            &mut flight.sample_rows,
        );
        plan.ring_index = ring_index;
        plan.num_free_pages = self.state.tree.pool.num_free();
        plan.num_evictable_pages = self.state.tree.num_evictable();
        self.state.in_flight.push_back(flight);
        plan
    }
}
