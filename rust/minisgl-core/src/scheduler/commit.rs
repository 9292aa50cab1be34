//! Commit: distributes the sampled tokens of a step.
//!
//! Every row's token goes to its request once, in row order, together with the end that it causes.

use super::Scheduler;
use crate::api::{Result, broken};
use crate::faulty::{Call, Moment};
use crate::inputs::check_tokens;
use crate::numbers::{ToU32, ToUsize};
use crate::request::{Index, Requests, State};
use crate::retraction;
use crate::state::InFlight;
use crate::step::{CommitEntry, FinishReason, NOT_FINITE, Sampled};

impl Scheduler {
    pub(super) fn commit_alive(&mut self, step: i64, tokens: &[i32], into: &mut Vec<CommitEntry>) -> Result<()> {
        self.faults.point(Call::Commit, step, Moment::Before);
        let done = match self.state.in_flight.front() {
            Some(flight) if flight.step == step => self.state.in_flight.pop_front(),
            _ => None,
        };
        let Some(done) = done else {
            return broken(format!("commit({step}) is not due"));
        };
        let mut not_finite = Vec::new();
        if check_tokens(step, done.rows.len(), &done.sample_rows, tokens)? {
            let others = (0..done.rows.len().to_u32()).filter(|row| done.sample_rows.binary_search(row).is_err());
            not_finite.extend(others.filter(|row| tokens[row.to_usize()] == NOT_FINITE));
        }
        self.state.slots.drain(step);
        into.reserve_exact(self.ends.len() + done.sample_rows.len());
        into.append(&mut self.ends);
        let mut ending = Vec::new(); // ended later, because positions must not change while tokens are taken
        let mut at = 0;
        while at < done.sample_rows.len() {
            let row = done.sample_rows[at];
            if tokens[row.to_usize()] == NOT_FINITE {
                self.drop_token(row, &done, &ending, &mut not_finite);
                at += 1;
                continue;
            }
            if let Some(draft) = done.draft(row) {
                self.take_drafted_token(draft, row, tokens, into, &mut ending);
                at += 1;
                continue;
            }
            let index = done.rows[row.to_usize()];
            at += match self.state.started.find(index) {
                Some(place) => self.take_run(place, &done, at, tokens, into, &mut ending),
                None => self.take_late_token(index, done.sample_rows[at], tokens, into, &mut ending),
            };
        }
        self.state.started.flush_tokens(step, &mut self.state.requests);
        self.faults.point(Call::Commit, step, Moment::Amid);
        let (first_failed, mut has_left) = (ending.len(), Vec::new());
        for row in not_finite {
            let index = done.rows[row.to_usize()];
            let request = self.state.requests.get(index);
            if request.state == State::Ended {
                has_left.push(index); // its pages are in the tree already
            } else if !ending.contains(&index) {
                ending.push(index);
                let token = -1;
                into.push(CommitEntry {
                    req_id: request.req_id,
                    sampled: Some(Sampled { token, row }),
                    reason: Some(FinishReason::Error),
                });
            }
        }
        self.settle(&done, &ending[first_failed..])?;
        let failed = ending.split_off(first_failed);
        for index in ending {
            self.end(index, FinishReason::Stop)?;
        }
        for index in failed {
            self.end(index, FinishReason::Error)?;
        }
        for index in has_left {
            retraction::drop_path(&self.state.requests, index, &mut self.state.tree)?;
        }
        self.propose(&done);
        self.free_ended(step);
        self.spare.push(done);
        self.faults.point(Call::Commit, step, Moment::After);
        Ok(())
    }

    /// Handles a row with non-finite logits: adds it to `not_finite` if its token would belong to the sequence.
    fn drop_token(&mut self, row: u32, done: &InFlight, ending: &[Index], not_finite: &mut Vec<u32>) {
        let index = done.rows[row.to_usize()];
        if let Some(draft) = done.draft(row) {
            let has_left = self.state.requests.get(index).state == State::Ended || ending.contains(&index);
            if has_left || !self.draft_matches(draft) {
                return;
            }
        } else if self.state.started.find(index).is_none() {
            self.state.requests.get_mut(index).num_pending -= 1; // a started request ends, and its count with it
        }
        not_finite.push(row);
    }

    /// Takes the tokens of a run: rows from the `first`-th sampling row on whose requests are neighbours in the decode
    /// set, from position `place`. Returns the number of rows.
    fn take_run(
        &mut self,
        place: usize,
        done: &InFlight,
        first: usize,
        tokens: &[i32],
        into: &mut Vec<CommitEntry>,
        ending: &mut Vec<Index>,
    ) -> usize {
        let row = done.sample_rows[first].to_usize();
        let count = self.len_of_run(place, done, first, &tokens[row..]);
        let tokens = &tokens[row..row + count];
        let start = into.len();
        let req_ids = &self.state.started.req_ids(place)[..count];
        into.extend(
            req_ids
                .iter()
                .zip(tokens)
                .zip(row.to_u32()..)
                .map(|((&req_id, &token), row)| CommitEntry {
                    req_id,
                    sampled: Some(Sampled { token, row }),
                    reason: None,
                }),
        );
        let eos_ids = &self.config.eos_ids;
        let may_end = |requests: &Requests, at: usize, len: u32| {
            let index = done.rows[row + at];
            let reason = requests.end_at(index, tokens[at], len, eos_ids);
            if reason.is_some() {
                into[start + at].reason = reason;
                ending.push(index);
            }
        };
        self.state
            .started
            .take_tokens(place, tokens, eos_ids, &mut self.state.requests, may_end);
        count
    }

    /// Returns the number of rows in the run. A plain decode step is one run, which three array comparisons detect.
    fn len_of_run(&self, place: usize, done: &InFlight, first: usize, tokens: &[i32]) -> usize {
        let (sampling, started) = (&done.sample_rows[first..], &self.state.started.indices()[place..]);
        let row = sampling[0].to_usize();
        let rows = &done.rows[row..];
        let len = sampling.len().min(started.len()).min(rows.len());
        let neighbours = (sampling[len - 1] - sampling[0]).to_usize() == len - 1;
        if neighbours && rows[..len] == started[..len] && !tokens[..len].contains(&NOT_FINITE) {
            return len;
        }
        let same = sampling.iter().zip(row.to_u32()..).zip(rows.iter().zip(started));
        let same = same.take_while(|&((a, b), (c, d))| *a == b && c == d);
        let finite = tokens.iter().take_while(|token| **token != NOT_FINITE);
        same.zip(finite).count()
    }

    /// Takes the token of a request that was retracted, or drops it if the request has ended. Returns 1 (the row).
    fn take_late_token(
        &mut self,
        index: Index,
        row: u32,
        tokens: &[i32],
        into: &mut Vec<CommitEntry>,
        ending: &mut Vec<Index>,
    ) -> usize {
        let token = tokens[row.to_usize()];
        let request = self.state.requests.get_mut(index);
        request.num_pending -= 1;
        if request.state == State::Ended {
            return 1;
        }
        let req_id = request.req_id;
        let reason = self.state.requests.accept(index, token, &self.config.eos_ids);
        into.push(CommitEntry {
            req_id,
            sampled: Some(Sampled { token, row }),
            reason,
        });
        if reason.is_some() {
            ending.push(index);
        }
        1
    }

    /// Frees ended requests whose last row was in `step`.
    fn free_ended(&mut self, step: i64) {
        let requests = &mut self.state.requests;
        self.ended_in_flight.retain(|&(last, index)| {
            if last == step {
                requests.free(index);
            }
            last != step
        });
    }
}
