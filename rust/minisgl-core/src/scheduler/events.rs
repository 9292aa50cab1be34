//! Effects of events on the state, and the end of a request.
//!
//! Invariants: every accepted request ends exactly once; its pages are released at once, its slot only when no step in
//! flight has a row of it.

use super::Scheduler;
use crate::api::CachePolicy;
use crate::api::{Result, broken};
use crate::numbers::ToUsize;
use crate::request::{self, Index, State};
use crate::retraction;
use crate::step::Event;
use crate::step::{CommitEntry, FinishReason, UNBOUNDED};

impl Scheduler {
    pub(super) fn apply(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Arrival(arrival) => {
                let limit = self.limits.max_seq_len;
                let (req_id, length) = (arrival.req_id, arrival.tokens.len());
                let count = &mut self.num_arrivals[usize::from(arrival.background)];
                let number = *count;
                *count += 1;
                if length >= limit {
                    // a prompt that can never fit is refused at once
                    self.add_end(req_id, FinishReason::Error);
                    return Ok(());
                }
                let caches = self.config.cache != CachePolicy::Naive;
                let pins = arrival.pin;
                let drafts = self.config.max_draft_len;
                let index = self.state.requests.add(arrival, number, limit, caches, drafts);
                self.state.live.insert(req_id, index);
                self.state.waiting.add(index, &self.state.requests);
                if pins {
                    let num_prompt = self.state.requests.get(index).num_prompt.to_usize();
                    self.state.pins.register(req_id, num_prompt / self.limits.page_size);
                }
                Ok(())
            }
            Event::Finish(req_id) => self.end_by_event(req_id, FinishReason::Stop),
            Event::Abort(req_id) => self.end_by_event(req_id, FinishReason::Abort),
            Event::ForwardFailed(_) => self.forward_failed(),
            Event::Unpin(req_id) => self.state.pins.drop(req_id, &mut self.state.tree),
            Event::ClearCache => {
                let num_pages = self.state.tree.num_evictable();
                self.state.tree.evict(num_pages)
            }
            Event::TokenBudget(budget) => {
                self.budgets = budget;
                self.background.gain = budget.background.min(UNBOUNDED);
                Ok(())
            }
            Event::PagesRead(read) => {
                if let Some(&index) = self.state.live.get(&read.req_id)
                    && self.state.requests.get(index).state == State::Waiting
                {
                    self.state.requests.cold_mut(index).stored =
                        (request::length(read.stored_from), request::length(read.stored_to));
                }
                Ok(())
            }
            Event::Draft(draft) => {
                if let Some(&index) = self.state.live.get(&draft.req_id) {
                    self.take_draft(index, &draft);
                }
                Ok(())
            }
        }
    }

    /// Ends the request `req_id` by an event. No-op for an id that is not live: its end is on the way.
    fn end_by_event(&mut self, req_id: i64, reason: FinishReason) -> Result<()> {
        if let Some(&index) = self.state.live.get(&req_id) {
            self.end(index, reason)?;
            self.add_end(req_id, reason);
        }
        Ok(())
    }

    /// Handles a failed forward pass: requests with a row in it end, retracted ones too; all others restart with their
    /// committed tokens. Pages, cache and slots are reset; all slots in use count as freed.
    fn forward_failed(&mut self) -> Result<()> {
        let failed = match self.state.in_flight.front_mut() {
            Some(flight) => std::mem::take(&mut flight.rows),
            None => return broken("no forward is in flight that could fail"),
        };
        self.state.in_flight.clear();
        self.synchronize_all();
        for &index in self.state.started.indices() {
            self.state.requests.forget_pages(index);
            self.state.requests.get_mut(index).state = State::Waiting;
            self.state.waiting.add(index, &self.state.requests);
        }
        self.state.started.clear();
        for &index in self.state.live.values() {
            self.state.requests.get_mut(index).num_pending = 0;
            self.state.requests.cold_mut(index).num_found_pages = None;
        }
        for index in failed {
            if self.state.requests.get(index).state != State::Ended {
                let req_id = self.state.requests.get(index).req_id;
                self.end(index, FinishReason::Error)?;
                self.add_end(req_id, FinishReason::Error);
            }
        }
        for (_, index) in std::mem::take(&mut self.ended_in_flight) {
            self.state.requests.free(index);
        }
        self.state.tree.pool.reset();
        self.state.tree.reset();
        let live = &self.state.live;
        self.state.pins.forget(|req_id| live.contains_key(&req_id));
        self.state.slots.reset();
        Ok(())
    }

    fn add_end(&mut self, req_id: i64, reason: FinishReason) {
        self.ends.push(CommitEntry {
            req_id,
            sampled: None,
            reason: Some(reason),
        });
    }

    fn is_in_flight(&self, index: Index) -> bool {
        self.state
            .in_flight
            .front()
            .is_some_and(|oldest| self.state.requests.get(index).last_step >= oldest.step)
    }

    /// Ends a request. Its pages are released at once, unless its pin stays (after stop or length); its slot and index
    /// as soon as no step in flight has a row of it.
    pub(super) fn end(&mut self, index: Index, reason: FinishReason) -> Result<()> {
        let limit = self.config.cache_max_prompt;
        let request = self.state.requests.get(index);
        let (req_id, has_started) = (request.req_id, request.state == State::Started);
        let too_long = limit > 0 && request.num_prompt.to_usize() > limit;
        if has_started {
            self.stop(index)?;
        } else {
            self.state.waiting.remove(index, &self.state.requests)?;
        }
        if reason == FinishReason::Error {
            if has_started {
                retraction::free_pages(&mut self.state.requests, index, &mut self.state.tree)?;
            }
        } else if too_long {
            retraction::drop_pages(&mut self.state.requests, index, &mut self.state.tree)?;
        } else if has_started {
            retraction::give_up_pages(&mut self.state.requests, index, &mut self.state.tree)?;
        }
        let by_itself = matches!(reason, FinishReason::Stop | FinishReason::Length);
        if !(by_itself && self.state.pins.holds(req_id)) {
            self.state.pins.drop(req_id, &mut self.state.tree)?;
        }
        if reason == FinishReason::Error {
            retraction::drop_path(&self.state.requests, index, &mut self.state.tree)?;
        }
        let in_flight = self.is_in_flight(index);
        let request = self.state.requests.get_mut(index);
        request.state = State::Ended;
        self.state.live.remove(&request.req_id);
        if in_flight {
            self.ended_in_flight.push((request.last_step, index));
        } else {
            self.state.requests.free(index);
        }
        Ok(())
    }

    /// Retracts a started request: returns it to the queue and releases its pages. A token in flight is still taken at
    /// its commit and may end it.
    pub(super) fn retract(&mut self, index: Index) -> Result<()> {
        self.stop(index)?;
        retraction::give_up_pages(&mut self.state.requests, index, &mut self.state.tree)?;
        self.num_retracted += 1;
        self.decided.num_retracted += 1;
        self.decided.num_gave_way += usize::from(self.state.requests.get(index).background);
        self.state.requests.get_mut(index).state = State::Waiting;
        self.state.waiting.add(index, &self.state.requests);
        Ok(())
    }

    /// Removes a started request from the decode set and frees its slot.
    fn stop(&mut self, index: Index) -> Result<()> {
        self.synchronize(index);
        self.state.started.remove(index)?;
        let in_flight = self.is_in_flight(index);
        let request = self.state.requests.get(index);
        self.state
            .slots
            .free(request.slot, in_flight.then_some(request.last_step))
    }

    /// Updates a request's record from its row in the decode set.
    pub(super) fn synchronize(&mut self, index: Index) {
        let now = self.last_step.unwrap_or(0);
        self.state.started.synchronize(index, now, &mut self.state.requests);
    }

    pub(super) fn synchronize_all(&mut self) {
        for at in 0..self.state.started.len() {
            self.synchronize(self.state.started.indices()[at]);
        }
    }
}
