//! The control plane as a whole: takes events, decides steps, takes tokens.
//!
//! Keeps true: every schedule gets exactly one commit (or the `ForwardFailed` that stands in for it); every accepted
//! request leaves exactly one end; a request slot is not bound again before the last step that holds a row of it is
//! committed; an error in the middle of a call makes every later call an error.
//! Doesn't know: tensors, text, time.
//!
//! One pass makes a step. Started rows go in order of (priority, arrival): each decode row gets its token, prefill rows
//! share what the decode rows leave of the token budget. Then waiting requests are admitted, in the same order, until
//! the first that gets nothing.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, DefaultHasher};

use crate::admission::{self, Chunk, ReserveRatio};
use crate::config::{CachePolicy, Config, Limits, PageSize};
use crate::decode_set;
use crate::error::{Error, Result, broken};
use crate::inputs::{Event, check_event, check_tokens};
use crate::invariants::{TableWatch, check_all};
use crate::metadata::{DecidedStep, Plan, PrefillRow, RingEntry, write_step};
use crate::output::{Entry, FinishReason, Stats};
use crate::page_pool::{Page, PagePool};
use crate::radix::RadixTree;
use crate::request::{Index, Queue, Requests, State};
use crate::retraction;
use crate::slots::SlotTable;

/// A step that was scheduled and not yet committed.
#[derive(Default)]
pub(crate) struct InFlight {
    pub step: i64,
    pub rows: Vec<Index>,
    pub sample_rows: Vec<u32>,
}

type Ids = HashMap<i64, Index, BuildHasherDefault<DefaultHasher>>;

/// The control plane. See `minisgl.scheduler.api.ControlPlane`.
pub struct Scheduler {
    config: Config,
    limits: Limits,
    page_size: PageSize,
    pub(crate) tree: RadixTree,
    pub(crate) slots: SlotTable,
    pub(crate) ratio: ReserveRatio,
    pub(crate) requests: Requests,
    pub(crate) live: Ids,
    pub(crate) waiting: Queue,
    pub(crate) started: Queue,
    pub(crate) in_flight: VecDeque<InFlight>,
    spare: Vec<InFlight>,
    ended_in_flight: Vec<(i64, Index)>, // freed at the commit of the step
    decided: DecidedStep,
    prefilling: bool, // whether the last pass left a started request that prefills
    num_prompt_tokens: u64,
    num_cached_tokens: u64,
    num_retracted: u64,
    num_arrivals: u64,
    last_step: Option<i64>,
    ends: Vec<Entry>,
    watch: TableWatch,
    dead: Option<String>,
}

impl Scheduler {
    /// `config` has been checked.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let limits = config.limits();
        let rows = limits.max_rows;
        Self {
            tree: RadixTree::new(
                PagePool::new(config.num_pages),
                config.page_size,
                config.cache,
            ),
            slots: SlotTable::new(rows),
            ratio: ReserveRatio::new(),
            requests: Requests::default(),
            live: Ids::default(),
            waiting: Queue::default(),
            started: Queue::default(),
            in_flight: VecDeque::with_capacity(3),
            spare: Vec::with_capacity(3),
            ended_in_flight: Vec::with_capacity(rows),
            decided: DecidedStep::default(),
            prefilling: false,
            num_prompt_tokens: 0,
            num_cached_tokens: 0,
            num_retracted: 0,
            num_arrivals: 0,
            last_step: None,
            ends: Vec::with_capacity(rows),
            watch: TableWatch::default(),
            dead: None,
            page_size: limits.pages(),
            config,
            limits,
        }
    }

    /// The sizes of the step arrays.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Make every later call an error.
    pub fn poison(&mut self, why: String) {
        self.dead.get_or_insert(why);
    }

    // ----------------------------------------------------------------------------------------------------- calls

    /// Check event `index` of the next `schedule`; `arrived` are the ids that arrive before it. Changes nothing.
    ///
    /// # Errors
    /// `Error::Event` if it is malformed, `Error::Broken` if the object is dead.
    pub fn check_event(&self, index: usize, event: &Event, arrived: &HashSet<i64>) -> Result<()> {
        self.require_alive()?;
        let oldest = self.in_flight.front().map(|flight| flight.step);
        let is_known = |id| self.live.contains_key(&id) || arrived.contains(&id);
        check_event(index, event, is_known, oldest)
    }

    /// Take in `events`, which were all checked, decide step `step`, write its arrays into `entry`. The first call may
    /// name any step; the others go on from there.
    ///
    /// # Errors
    /// `Error::Broken`; the object is dead then.
    pub fn schedule(
        &mut self,
        step: i64,
        events: Vec<Event>,
        entry: &mut RingEntry,
        ring_index: usize,
    ) -> Result<Plan> {
        self.require_alive()?;
        let result = self.schedule_alive(step, events, entry, ring_index);
        self.remember(result, || format!("schedule({step})"))
    }

    /// Take the tokens of `step`, one a row; the entries for the clients are appended to `into`. First the slots that
    /// waited for this step get free, then the rows in order.
    ///
    /// # Errors
    /// `Error::Broken`; the object is dead then.
    pub fn commit(&mut self, step: i64, tokens: &[i32], into: &mut Vec<Entry>) -> Result<()> {
        self.require_alive()?;
        let result = self.commit_alive(step, tokens, into);
        self.remember(result, || format!("commit({step})"))
    }

    /// Counts of this moment.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let held = self.started.iter().map(|index| {
            self.requests.num_pages(index) - self.requests.detail(index).num_tree_pages
        });
        Stats {
            num_waiting: self.waiting.len(),
            num_running: self.started.len(),
            num_draining: self.slots.num_draining(),
            num_free_pages: self.tree.pool.num_free(),
            num_evictable_pages: self.tree.num_evictable(),
            num_protected_pages: self.tree.num_protected(),
            num_held_pages: held.sum(),
            num_retracted_total: self.num_retracted,
            num_prompt_tokens_total: self.num_prompt_tokens,
            num_cached_tokens_total: self.num_cached_tokens,
        }
    }

    /// Check every invariant. O(everything).
    ///
    /// # Errors
    /// `Error::Broken` at the first that does not hold; the object is dead then.
    pub fn check(&mut self) -> Result<()> {
        self.require_alive()?;
        for at in 0..self.started.len() {
            self.requests.settle(self.started.get(at));
        }
        let mut watch = std::mem::take(&mut self.watch);
        let result = check_all(self).and_then(|()| watch.check(self));
        self.watch = watch;
        self.remember(result, || "check()".into())
    }

    // ------------------------------------------------------------------------------------------------- for tests

    /// Each cached page, with all tokens from the start of the sequence to the page's end.
    #[must_use]
    pub fn tree_pages(&self) -> Vec<(Vec<i32>, Page)> {
        let size = self.limits.page_size;
        let mut found = Vec::new();
        for id in self.tree.ids() {
            let (tokens, pages) = self.tree.path(id);
            let own = self.tree.node(id).pages.len();
            for column in pages.len() - own..pages.len() {
                found.push((tokens[..(column + 1) * size].to_vec(), pages[column]));
            }
        }
        found
    }

    /// The pages of a live request, by column; empty while it waits. None if it isn't live.
    #[must_use]
    pub fn page_table(&self, req_id: i64) -> Option<Vec<Page>> {
        let index = *self.live.get(&req_id)?;
        Some(self.requests.page_table(index))
    }

    /// The stack of free pages, the next to be given out last.
    #[must_use]
    pub fn free_pages(&self) -> &[Page] {
        self.tree.pool.free_pages()
    }

    /// The reserve ratio, in 1/1024. Tests set it to provoke retractions.
    pub fn reserve_ratio_mut(&mut self) -> &mut usize {
        &mut self.ratio.value
    }

    // ---------------------------------------------------------------------------------------------------- events

    fn schedule_alive(
        &mut self,
        step: i64,
        events: Vec<Event>,
        entry: &mut RingEntry,
        ring_index: usize,
    ) -> Result<Plan> {
        let failed = matches!(events.first(), Some(Event::ForwardFailed(_)));
        if let Some(last) = self.last_step
            && step != last + 1
        {
            return broken(format!("schedule({step}) came after schedule({last})"));
        }
        if self.in_flight.len() > 1 && !failed {
            let oldest = self.in_flight[0].step;
            return broken(format!("schedule({step}) came before commit({oldest})"));
        }
        self.last_step = Some(step);
        for event in events {
            self.apply(event)?;
        }
        self.decide(step)?;
        Ok(self.write(entry, ring_index))
    }

    fn apply(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Arrival(arrival) => {
                let limit = self.limits.max_seq_len;
                let (req_id, length) = (arrival.req_id, arrival.tokens.len());
                let count = self.num_arrivals;
                self.num_arrivals += 1;
                if length >= limit {
                    // a prompt that could never fit is answered at once
                    self.tell_end(req_id, FinishReason::Error);
                    return Ok(());
                }
                let caches = self.config.cache != CachePolicy::Naive;
                let index = self.requests.add(arrival, count, limit, caches);
                self.live.insert(req_id, index);
                self.waiting.add(index, &self.requests);
                Ok(())
            }
            Event::Finish(req_id) => self.end_by_event(req_id, FinishReason::Stop),
            Event::Abort(req_id) => self.end_by_event(req_id, FinishReason::Abort),
            Event::ForwardFailed(_) => self.forward_failed(),
        }
    }

    /// No-op for an id that isn't live: it has ended, and its end is on the way.
    fn end_by_event(&mut self, req_id: i64, reason: FinishReason) -> Result<()> {
        if let Some(&index) = self.live.get(&req_id) {
            self.end(index)?;
            self.tell_end(req_id, reason);
        }
        Ok(())
    }

    /// The requests with a row in the failed step end, retracted ones too; everyone else starts from zero, with its
    /// committed tokens; pages, cache and slots are as at start. All slots in use count as released.
    fn forward_failed(&mut self) -> Result<()> {
        let failed = match self.in_flight.front_mut() {
            Some(flight) => std::mem::take(&mut flight.rows),
            None => return broken("no forward is in flight that could fail"),
        };
        self.in_flight.clear();
        for at in 0..self.started.len() {
            let index = self.started.get(at);
            self.requests.forget_pages(index);
            self.requests.get_mut(index).state = State::Waiting;
            self.waiting.add(index, &self.requests);
        }
        self.started.clear();
        for &index in self.live.values() {
            self.requests.get_mut(index).num_pending = 0;
        }
        for index in failed {
            if self.requests.get(index).state != State::Ended {
                let req_id = self.requests.get(index).req_id;
                self.end(index)?;
                self.tell_end(req_id, FinishReason::Error);
            }
        }
        for (_, index) in std::mem::take(&mut self.ended_in_flight) {
            self.requests.free(index);
        }
        self.tree.pool.reset();
        self.tree.reset();
        self.slots.reset();
        Ok(())
    }

    fn tell_end(&mut self, req_id: i64, reason: FinishReason) {
        self.ends.push(Entry {
            req_id,
            token: -1,
            reason,
            row: -1,
        });
    }

    // ------------------------------------------------------------------------------------------ ends, retraction

    fn is_in_flight(&self, index: Index) -> bool {
        self.in_flight
            .front()
            .is_some_and(|oldest| self.requests.get(index).last_step >= oldest.step)
    }

    /// Pages go at once; the slot, and the index, as soon as no step in flight holds a row of the request.
    fn end(&mut self, index: Index) -> Result<()> {
        if self.requests.get(index).state == State::Started {
            self.started.remove(index, &self.requests)?;
            self.release_slot(index)?;
            retraction::give_up_pages(&mut self.requests, index, &mut self.tree)?;
        } else {
            self.waiting.remove(index, &self.requests)?;
        }
        let in_flight = self.is_in_flight(index);
        let request = self.requests.get_mut(index);
        request.state = State::Ended;
        self.live.remove(&request.req_id);
        if in_flight {
            self.ended_in_flight.push((request.last_step, index));
        } else {
            self.requests.free(index);
        }
        Ok(())
    }

    /// Back to its place in the queue. A token in flight is still taken at its commit, and may end it there.
    fn retract(&mut self, index: Index) -> Result<()> {
        self.started.remove(index, &self.requests)?;
        self.release_slot(index)?;
        retraction::give_up_pages(&mut self.requests, index, &mut self.tree)?;
        self.num_retracted += 1;
        self.requests.get_mut(index).state = State::Waiting;
        self.waiting.add(index, &self.requests);
        Ok(())
    }

    fn release_slot(&mut self, index: Index) -> Result<()> {
        let in_flight = self.is_in_flight(index);
        let request = self.requests.get(index);
        self.slots
            .release(request.slot, in_flight.then_some(request.last_step))
    }

    // -------------------------------------------------------------------------------------------------- the pass

    fn decide(&mut self, step: i64) -> Result<()> {
        self.decided.begin(step);
        let mut budget = self.budget();
        let mut prefills = true;
        let mut prefilling = false;
        let mut at = 0;
        while at < self.started.len() {
            // a retraction takes requests off its end
            let index = self.started.get(at);
            at += 1;
            let request = self.requests.get(index);
            if request.is_prefilling() {
                if prefills {
                    let used = self.prefill(index, budget)?;
                    budget -= used as i64;
                    prefills = used > 0;
                }
                prefilling |= self.requests.get(index).is_prefilling();
            } else if decode_set::is_eligible(request) && self.get_decode_page(index)? {
                decode_set::schedule_row(self.requests.get_mut(index), step);
                self.decided.decode_rows.push(index);
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
        std::mem::swap(&mut self.decided.released, &mut self.slots.released);
        self.ratio.after_step(self.decided.num_retracted);
        Ok(())
    }

    /// Tokens that are left for prefill, decode rows counted first; nobody asks without anyone to prefill.
    fn budget(&self) -> i64 {
        let most = self.config.max_prefill_length as i64;
        if self.waiting.is_empty() && !self.prefilling {
            return most;
        }
        let started = self.started.iter().map(|index| self.requests.get(index));
        most - started
            .filter(|request| decode_set::is_eligible(request))
            .count() as i64
    }

    /// Give the row the page that its next token needs, if it needs one: a free one, else an evicted one, else one of the
    /// last request started, which is retracted. False if that would be the row itself: it waits.
    fn get_decode_page(&mut self, index: Index) -> Result<bool> {
        if self.page_size.split(self.requests.get(index).kv_len).1 != 0 {
            return Ok(true);
        }
        while self.tree.num_available() == 0 {
            if !self.retract_for(index)? {
                return Ok(false);
            }
        }
        let page = self.tree.take_one()?;
        self.requests.push_page(index, page);
        self.requests.get_mut(index).last_page = page;
        Ok(true)
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
        self.requests.settle(index);
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
        let first_column = self.requests.num_pages(index);
        admission::apply_chunk(&mut self.requests, index, chunk, &mut self.tree)?;
        let request = self.requests.get_mut(index);
        let samples = request.kv_len == request.prefill_len;
        request.num_pending += u8::from(samples);
        request.last_step = self.decided.step;
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
        let size = self.limits.page_size;
        let mut needed: Option<usize> = None;
        while let Some(index) = self.waiting.first() {
            if self.slots.num_free() == 0 || (budget <= 0 && !self.decided.prefill_rows.is_empty())
            {
                return Ok(());
            }
            self.requests.settle(index);
            let chunk = self.size_chunk(index, budget);
            if chunk.num_tokens == 0 {
                return Ok(());
            }
            let by_started = needed.unwrap_or_else(|| {
                let each = self.started.iter();
                each.map(|one| admission::needed_pages(&self.requests, one, &self.ratio, size))
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
                )
            };
            if !self.started.is_empty() && !fits() {
                return Ok(());
            }
            self.start(index, &chunk)?;
            budget -= chunk.num_tokens as i64;
            needed = Some(
                by_started + admission::needed_pages(&self.requests, index, &self.ratio, size),
            );
        }
        Ok(())
    }

    fn start(&mut self, index: Index, chunk: &Chunk) -> Result<()> {
        self.waiting.remove(index, &self.requests)?;
        let slot = self.slots.take()?;
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
        self.decided.bound.push((index, cached_len));
        self.take_chunk(index, chunk)?;
        self.prefilling |= self.requests.get(index).is_prefilling();
        self.started.add(index, &self.requests);
        Ok(())
    }

    fn write(&mut self, entry: &mut RingEntry, ring_index: usize) -> Plan {
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

    // ---------------------------------------------------------------------------------------------------- commit

    fn commit_alive(&mut self, step: i64, tokens: &[i32], into: &mut Vec<Entry>) -> Result<()> {
        let done = match self.in_flight.front() {
            Some(flight) if flight.step == step => self.in_flight.pop_front(),
            _ => None,
        };
        let Some(done) = done else {
            return broken(format!("commit({step}) is not due"));
        };
        check_tokens(step, done.rows.len(), &done.sample_rows, tokens)?;
        self.slots.drain(step);
        into.reserve_exact(self.ends.len() + done.sample_rows.len());
        into.append(&mut self.ends);
        for &row in &done.sample_rows {
            let index = done.rows[row as usize];
            let token = tokens[row as usize];
            let request = self.requests.get_mut(index);
            request.num_pending -= 1;
            if request.state == State::Ended {
                continue;
            }
            let req_id = request.req_id;
            let reason = self.requests.accept(index, token, &self.config.eos_ids);
            into.push(Entry {
                req_id,
                token,
                reason,
                row: row as i32,
            });
            if reason != FinishReason::None {
                self.end(index)?;
            }
        }
        self.free_ended(step);
        self.spare.push(done);
        Ok(())
    }

    /// Nothing holds a row of those that waited for `step` any more.
    fn free_ended(&mut self, step: i64) {
        let requests = &mut self.requests;
        self.ended_in_flight.retain(|&(last, index)| {
            if last == step {
                requests.free(index);
            }
            last != step
        });
    }

    // ---------------------------------------------------------------------------------------------------- errors

    fn require_alive(&self) -> Result<()> {
        match &self.dead {
            None => Ok(()),
            Some(why) => broken(format!("the control plane is dead: {why}")),
        }
    }

    /// Whatever goes wrong in a call leaves the state half changed: the object is dead from then on.
    fn remember<T>(&mut self, result: Result<T>, call: impl FnOnce() -> String) -> Result<T> {
        if let Err(Error::Broken(what)) = &result {
            self.dead = Some(format!("{}: {what}", call()));
        }
        result
    }
}
