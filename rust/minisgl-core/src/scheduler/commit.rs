//! Taking the tokens of a step.
//!
//! Every row's token goes to its request once, in row order; an end that it makes comes with it.

use super::Scheduler;
use crate::api::{Result, broken};
use crate::faulty::{Call, Moment};
use crate::inputs::check_tokens;
use crate::numbers::{ToU32, ToUsize};
use crate::request::{Index, Requests, State};
use crate::state::InFlight;
use crate::step::{Entry, Sampled};

impl Scheduler {
    pub(super) fn commit_alive(&mut self, step: i64, tokens: &[i32], into: &mut Vec<Entry>) -> Result<()> {
        self.faults.point(Call::Commit, step, Moment::Before);
        let done = match self.state.in_flight.front() {
            Some(flight) if flight.step == step => self.state.in_flight.pop_front(),
            _ => None,
        };
        let Some(done) = done else {
            return broken(format!("commit({step}) is not due"));
        };
        check_tokens(step, done.rows.len(), &done.sample_rows, tokens)?;
        self.state.slots.drain(step);
        into.reserve_exact(self.ends.len() + done.sample_rows.len());
        into.append(&mut self.ends);
        let mut ending = Vec::new(); // places stay as they are until all tokens are taken
        let mut at = 0;
        while at < done.sample_rows.len() {
            let row = done.sample_rows[at];
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
        self.faults.point(Call::Commit, step, Moment::Amid);
        self.settle(&done)?;
        for index in ending {
            self.end(index, true)?;
        }
        self.propose(&done);
        self.free_ended(step);
        self.spare.push(done);
        self.faults.point(Call::Commit, step, Moment::After);
        Ok(())
    }

    /// The tokens of neighbouring rows of the step, from the `first`-th sampling one on, whose requests are neighbours
    /// in the decode set, from `place` on. Returns their number.
    fn take_run(
        &mut self,
        place: usize,
        done: &InFlight,
        first: usize,
        tokens: &[i32],
        into: &mut Vec<Entry>,
        ending: &mut Vec<Index>,
    ) -> usize {
        let row = done.sample_rows[first].to_usize();
        let sampling = done.sample_rows[first..].iter().zip(row.to_u32()..);
        let rows = done.rows[row..].iter().zip(&self.state.started.indices()[place..]);
        let same = sampling.zip(rows);
        let count = same.take_while(|&((a, b), (c, d))| *a == b && c == d).count();
        let tokens = &tokens[row..row + count];
        let start = into.len();
        let req_ids = &self.state.started.req_ids(place)[..count];
        into.extend(
            req_ids
                .iter()
                .zip(tokens)
                .zip(row.to_u32()..)
                .map(|((&req_id, &token), row)| Entry {
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

    /// The token of a request that is not started any more: nobody's if it has ended. Returns 1.
    fn take_late_token(
        &mut self,
        index: Index,
        row: u32,
        tokens: &[i32],
        into: &mut Vec<Entry>,
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
        into.push(Entry {
            req_id,
            sampled: Some(Sampled { token, row }),
            reason,
        });
        if reason.is_some() {
            ending.push(index);
        }
        1
    }

    /// Nothing holds a row of those that waited for `step` any more.
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
