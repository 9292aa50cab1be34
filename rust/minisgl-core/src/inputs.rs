//! Checks what comes in from outside: events and sampled tokens.
//!
//! Keeps true: an event that passes can be applied without an error.
//! Doesn't know: how events are applied. (Whether a prompt fits is no error of the event: the request is answered.)

use std::collections::BTreeSet;

use crate::api::{Error, Result, broken};
use crate::numbers::ToUsize;
use crate::step::{Arrival, Event};

/// Events that one call of `Scheduler::schedule` can take: each was checked by `Scheduler::check_event`.
#[derive(Debug, Default)]
pub struct CheckedEvents {
    events: Vec<Event>,
    arrived: BTreeSet<i64>,
}

impl CheckedEvents {
    /// Check `event` and add it. `is_live`: whether an id is in use; `oldest_in_flight`: the next step due for its
    /// commit.
    pub(crate) fn add(
        &mut self,
        event: Event,
        is_live: impl Fn(i64) -> bool,
        oldest_in_flight: Option<i64>,
    ) -> Result<()> {
        let is_known = |id| is_live(id) || self.arrived.contains(&id);
        check_event(self.events.len(), &event, is_known, oldest_in_flight)?;
        if let Event::Arrival(arrival) = &event {
            self.arrived.insert(arrival.req_id);
        }
        self.events.push(event);
        Ok(())
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

fn check_event(
    index: usize,
    event: &Event,
    is_known: impl Fn(i64) -> bool,
    oldest_in_flight: Option<i64>,
) -> Result<()> {
    let refuse = |field: &'static str, reason: String| Err(Error::Event { index, field, reason });
    match event {
        Event::Arrival(arrival) => {
            if let Some((field, reason)) = arrival_error(arrival) {
                return refuse(field, reason);
            }
            if is_known(arrival.req_id) {
                return refuse("req_id", format!("{} is in use", arrival.req_id));
            }
            Ok(())
        }
        Event::ForwardFailed(step) => {
            if index > 0 {
                return refuse("step", "a failed forward must be the first event".into());
            }
            if Some(*step) != oldest_in_flight {
                let oldest = oldest_in_flight.map_or("None".into(), |step| step.to_string());
                return refuse("step", format!("{step} is not the oldest step in flight ({oldest})"));
            }
            Ok(())
        }
        Event::Finish(_) | Event::Abort(_) => Ok(()),
    }
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
    None
}

/// The sampled tokens of a step must be there, one a row, and those of sampling rows not negative: such a one would
/// look like a placeholder when it comes back.
pub(crate) fn check_tokens(step: i64, num_rows: usize, sample_rows: &[u32], tokens: &[i32]) -> Result<()> {
    if tokens.len() != num_rows {
        return broken(format!(
            "tokens of step {step}: int32 ({},) for {num_rows} rows",
            tokens.len()
        ));
    }
    if has_negative(tokens) && sample_rows.iter().any(|&row| tokens[row.to_usize()] < 0) {
        return broken(format!("step {step} sampled a negative token"));
    }
    Ok(())
}

/// Looks at all of them, which is faster than a branch each.
fn has_negative(tokens: &[i32]) -> bool {
    tokens.iter().fold(0, |all, &token| all | token) < 0
}
