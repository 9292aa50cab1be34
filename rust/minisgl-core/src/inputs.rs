//! Validation of the scheduler's inputs: events and sampled tokens.
//!
//! Invariants: an event that passes can be applied without an error.

use std::collections::{BTreeMap, BTreeSet};

use crate::api::{CachePolicy, Config, Error, Result, broken};
use crate::numbers::ToUsize;
use crate::state::SchedulerState;
use crate::step::{Arrival, Event, NOT_FINITE};

/// Validated events of one `Scheduler::schedule` call, each checked by `Scheduler::check_event`.
#[derive(Debug, Default)]
pub struct CheckedEvents {
    events: Vec<Event>,
    arrived: BTreeSet<i64>,
    pins: BTreeMap<i64, usize>, // pages to pin, by request id of the arrival
    given_back: BTreeSet<i64>,  // requests whose pins are released by these events
    lost: BTreeSet<i64>,        // requests whose pins a failed forward pass removes
}

impl CheckedEvents {
    /// Validates `event` and appends it. Pages released by an earlier `Abort` or `Unpin` may be pinned again in the
    /// same call; the request id is free only in the next.
    pub(crate) fn add(&mut self, event: Event, state: &SchedulerState, config: &Config) -> Result<()> {
        let index = self.events.len();
        match &event {
            Event::Arrival(arrival) => self.check_arrival(index, arrival, state, config)?,
            Event::ForwardFailed(step) => {
                let oldest = state.in_flight.front();
                check_failed(index, *step, oldest.map(|flight| flight.step))?;
                let ends = |index| oldest.is_some_and(|flight| flight.rows.contains(index));
                let is_lost = |req_id: &i64| state.live.get(req_id).is_none_or(ends);
                self.lost
                    .extend(state.pins.iter().map(|(req_id, _)| req_id).filter(is_lost));
            }
            Event::Unpin(req_id) => self.give_back(*req_id, state),
            Event::Abort(req_id) if state.live.contains_key(req_id) || self.arrived.contains(req_id) => {
                self.give_back(*req_id, state);
            }
            Event::TokenBudget(budget) => {
                let fields = [
                    ("beside_decode", budget.beside_decode),
                    ("prefill_only", budget.prefill_only),
                    ("background", budget.background),
                ];
                check_at_least(index, 1, fields)?;
            }
            Event::PagesRead(read) => {
                let fields = [("stored_from", read.stored_from), ("stored_to", read.stored_to)];
                check_at_least(index, 0, fields)?;
            }
            Event::Draft(draft) if has_negative(&draft.tokens) => return Err(invalid_token_ids(index)),
            Event::Finish(_) | Event::Abort(_) | Event::ClearCache | Event::Draft(_) => {}
        }
        self.events.push(event);
        Ok(())
    }

    fn check_arrival(
        &mut self,
        index: usize,
        arrival: &Arrival,
        state: &SchedulerState,
        config: &Config,
    ) -> Result<()> {
        let req_id = arrival.req_id;
        let refuse = |(field, reason)| Err(Error::Event { index, field, reason });
        if let Some(wrong) = arrival_error(arrival) {
            return refuse(wrong);
        }
        let pins = state.pins.pages_of(req_id).is_some() && !self.lost.contains(&req_id);
        if pins || state.live.contains_key(&req_id) || self.arrived.contains(&req_id) {
            return refuse(("req_id", format!("{req_id} is in use")));
        }
        if arrival.pin {
            let num_pages = usize::try_from(arrival.num_prompt).unwrap_or(0) / config.page_size;
            if let Some(reason) = pin_error(arrival, num_pages, self.num_pinned(state), config) {
                return refuse(("pin", reason));
            }
            self.pins.insert(req_id, num_pages);
        }
        self.arrived.insert(req_id);
        Ok(())
    }

    fn give_back(&mut self, req_id: i64, state: &SchedulerState) {
        self.pins.remove(&req_id);
        if state.pins.pages_of(req_id).is_some() {
            self.given_back.insert(req_id);
        }
    }

    /// Returns the number of pages that are or will be pinned after the events so far.
    fn num_pinned(&self, state: &SchedulerState) -> usize {
        let back = self.given_back.union(&self.lost);
        let back = back.filter_map(|&req_id| state.pins.pages_of(req_id));
        state.pins.num_pages - back.sum::<usize>() + self.pins.values().sum::<usize>()
    }

    pub(crate) fn first(&self) -> Option<&Event> {
        self.events.first()
    }
}

impl IntoIterator for CheckedEvents {
    type Item = Event;
    type IntoIter = std::vec::IntoIter<Event>;

    fn into_iter(self) -> Self::IntoIter {
        self.events.into_iter()
    }
}

fn check_failed(index: usize, step: i64, oldest_in_flight: Option<i64>) -> Result<()> {
    let field = "step";
    let refuse = |reason: String| Err(Error::Event { index, field, reason });
    if index > 0 {
        return refuse("a failed forward must be the first event".into());
    }
    if Some(step) != oldest_in_flight {
        let oldest = oldest_in_flight.map_or("None".into(), |step| step.to_string());
        return refuse(format!("{step} is not the oldest step in flight ({oldest})"));
    }
    Ok(())
}

/// Returns the error for a draft with invalid token ids (must be unsigned 31-bit integers). `index`: the event's index.
#[must_use]
pub fn invalid_token_ids(index: usize) -> Error {
    let reason = "must be unsigned 31-bit integers".into();
    let field = "tokens";
    Error::Event { index, field, reason }
}

fn check_at_least<const N: usize>(index: usize, low: i64, fields: [(&'static str, i64); N]) -> Result<()> {
    match fields.into_iter().find(|(_, number)| *number < low) {
        None => Ok(()),
        Some((field, _)) => {
            let reason = format!("must be at least {low}");
            Err(Error::Event { index, field, reason })
        }
    }
}

fn pin_error(arrival: &Arrival, num_pages: usize, num_pinned: usize, config: &Config) -> Option<String> {
    let limit = config.max_pinned_pages;
    if config.cache == CachePolicy::Naive {
        return Some("the cache is naive and keeps nothing".into());
    }
    if arrival.no_match {
        return Some("must not come with no_match".into());
    }
    (num_pinned + num_pages > limit)
        .then(|| format!("{num_pages} pages beside {num_pinned} exceed max_pinned_pages {limit}"))
}

fn arrival_error(arrival: &Arrival) -> Option<(&'static str, String)> {
    let (num_prompt, num_generated) = (arrival.num_prompt, arrival.num_generated);
    let length = arrival.tokens.len();
    let too_small = |field, low: i64| Some((field, format!("must be at least {low}")));
    if arrival.req_id == i64::MIN {
        return Some(("req_id", "must be a signed 64-bit integer".into()));
    }
    if length == 0 {
        return Some(("tokens", "must not be empty".into()));
    }
    if has_negative(&arrival.tokens) {
        return Some(("tokens", "must not be negative".into()));
    }
    if num_prompt < 1 {
        return too_small("num_prompt", 1);
    }
    if num_generated < 0 {
        return too_small("num_generated", 0);
    }
    if num_prompt.checked_add(num_generated) != i64::try_from(length).ok() {
        let reason = format!("{num_prompt} and num_generated {num_generated} don't add up to {length} tokens");
        return Some(("num_prompt", reason));
    }
    if arrival.max_tokens < 1 {
        return too_small("max_tokens", 1);
    }
    if arrival.max_tokens <= num_generated {
        return Some(("max_tokens", "must exceed num_generated".into()));
    }
    if arrival.min_tokens < 0 {
        return too_small("min_tokens", 0);
    }
    if arrival.priority.abs() > i64::from(i32::MAX) {
        return Some(("priority", "must be a signed 32-bit integer".into()));
    }
    if !(0..=i64::from(i32::MAX)).contains(&arrival.namespace) {
        return Some(("namespace", "must be an unsigned 31-bit integer".into()));
    }
    if arrival.stored_from < 0 {
        return too_small("stored_from", 0);
    }
    if !usize::try_from(arrival.stored_to).is_ok_and(|pages| pages <= length) {
        let reason = "must be at least 0, and no more pages than tokens".into();
        return Some(("stored_to", reason));
    }
    None
}

/// Validates the sampled tokens of a step: one for each row, those of sampling rows not negative (negative ids are
/// placeholders). Returns true if one is `NOT_FINITE`.
pub(crate) fn check_tokens(step: i64, num_rows: usize, sample_rows: &[u32], tokens: &[i32]) -> Result<bool> {
    if tokens.len() != num_rows {
        return broken(format!(
            "tokens of step {step}: int32 ({},) for {num_rows} rows",
            tokens.len()
        ));
    }
    let is_wrong = |token: i32| token < 0 && token != NOT_FINITE;
    if has_negative(tokens) && sample_rows.iter().any(|&row| is_wrong(tokens[row.to_usize()])) {
        return broken(format!("step {step} sampled a negative token"));
    }
    Ok(has_negative(tokens) && tokens.contains(&NOT_FINITE))
}

/// Returns true if any token is negative. Branchless over all of them, which is faster.
fn has_negative(tokens: &[i32]) -> bool {
    tokens.iter().fold(0, |all, &token| all | token) < 0
}
