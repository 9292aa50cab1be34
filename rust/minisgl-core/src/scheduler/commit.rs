//! Taking the tokens of a step.
//!
//! Keeps true: every row's token goes to its request once, in row order; an end that it makes comes with it.
//! Doesn't know: how the step was decided.

use super::Scheduler;
use crate::error::{Result, broken};
use crate::inputs::check_tokens;
use crate::output::{Entry, FinishReason};
use crate::request::{Index, State};

impl Scheduler {
    pub(super) fn commit_alive(
        &mut self,
        step: i64,
        tokens: &[i32],
        into: &mut Vec<Entry>,
    ) -> Result<()> {
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
        let mut next = 0; // the place of the next row, if nobody left or joined since
        let mut ending = Vec::new();
        for &row in &done.sample_rows {
            let (index, token) = (done.rows[row as usize], tokens[row as usize]);
            let place = match self.started.rows().get(next) {
                Some(one) if one.index == index => Some(next),
                _ => self.started.find(index),
            };
            let (req_id, reason) = if let Some(at) = place {
                next = at + 1;
                self.take_token(at, token)
            } else if let Some(found) = self.take_late_token(index, token) {
                found
            } else {
                continue;
            };
            into.push(Entry {
                req_id,
                token,
                reason,
                row: row as i32,
            });
            if reason != FinishReason::None {
                ending.push(index); // places stay as they are until all tokens are taken
            }
        }
        for index in ending {
            self.end(index)?;
        }
        self.free_ended(step);
        self.spare.push(done);
        Ok(())
    }

    /// The token of the decode row at `at`; whose it is, and whether it ends it.
    fn take_token(&mut self, at: usize, token: i32) -> (i64, FinishReason) {
        let (row, len) = self.started.push_token(at, token, &mut self.requests);
        let may_end = row.has_stop_ids
            || row.left + u32::from(row.num_pending) == 0
            || self.config.eos_ids.contains(&token);
        let reason = if may_end {
            self.requests
                .end_at(row.index, token, len, &self.config.eos_ids)
        } else {
            FinishReason::None
        };
        (row.req_id, reason)
    }

    /// The token of a request that is not started any more: None if it has ended.
    fn take_late_token(&mut self, index: Index, token: i32) -> Option<(i64, FinishReason)> {
        let request = self.requests.get_mut(index);
        request.num_pending -= 1;
        if request.state == State::Ended {
            return None;
        }
        let req_id = request.req_id;
        let reason = self.requests.accept(index, token, &self.config.eos_ids);
        Some((req_id, reason))
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
}
