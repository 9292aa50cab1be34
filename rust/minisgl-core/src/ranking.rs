//! Schedule policies: which waiting request starts next.
//!
//! A policy is a rank, a small function of a request. Of the *candidates*, those with the smallest priority value go
//! first, then the smallest rank, then queue order. Candidates are the first of the queue and later ones of its kind
//! (background or not) whose age is less than the policy's window above its own.
//!
//! *No request starves.* Fewer later arrivals of its own priority than the window start before a request;
//! `reference/ranking.py` has the proof.
//!
//! A request's cached length is looked up when it becomes a candidate, and remembered: a step looks it up again after
//! `MATCH_STEPS` steps, with lpm also if a request has started since, `MAX_LOOK_UPS` at once. So a step in which no
//! request can start does few tree lookups. The remembered length decides the order only, never what a request gets.

use crate::admission::cached_len;
use crate::api::SchedulePolicy;
use crate::numbers::ToI64;
use crate::radix::RadixTree;
use crate::request::{AGE, Index, NO_STEP, OrderKey, Queue, Requests};

const SHORT: i64 = 1024; // tokens; longer prefills rank alike
const MATCH_STEPS: i64 = 16;
pub(crate) const MAX_LOOK_UPS: usize = 64;

fn longest_prefix(requests: &Requests, index: Index) -> i64 {
    -requests.cold(index).cached_len.to_i64()
}

/// Returns the rank under srpf: the tokens to compute, capped at `SHORT`, so that all long prompts rank alike.
fn shortest_prefill(requests: &Requests, index: Index) -> i64 {
    SHORT.min(i64::from(requests.get(index).len) - requests.cold(index).cached_len.to_i64())
}

pub(crate) struct Ranking {
    pub policy: SchedulePolicy,
    pub last_start: i64, // last step in which a request started
}

impl Ranking {
    pub fn new(policy: SchedulePolicy) -> Self {
        Self {
            policy,
            last_start: NO_STEP,
        }
    }

    /// Returns the waiting request to start next, or `None` if none waits. Updates the remembered cached lengths.
    pub fn next(&self, waiting: &Queue, requests: &mut Requests, tree: &RadixTree, step: i64) -> Option<Index> {
        let rank = match self.policy {
            SchedulePolicy::Fcfs => return waiting.first(),
            SchedulePolicy::Lpm => longest_prefix,
            SchedulePolicy::Srpf => shortest_prefill,
        };
        let mut best: Option<((i64, i64, OrderKey), Index)> = None;
        let mut num_look_ups = 0;
        for index in waiting.iter().take(self.num_candidates(waiting, requests)) {
            if num_look_ups < MAX_LOOK_UPS && self.is_due(requests.cold(index).matched_in, step) {
                num_look_ups += 1;
                let cached = cached_len(requests, index, tree, step);
                let cold = requests.cold_mut(index);
                (cold.cached_len, cold.matched_in) = (cached, step);
            }
            let cold = requests.cold(index);
            let key = (cold.priority, rank(requests, index), cold.order);
            if best.is_none_or(|(least, _)| key < least) {
                best = Some((key, index));
            }
        }
        best.map(|(_, index)| index)
    }

    /// Returns true if a candidate's cached length, last looked up in step `then`, must be looked up again in `step`.
    fn is_due(&self, then: i64, step: i64) -> bool {
        let follows = self.policy == SchedulePolicy::Lpm && then <= self.last_start;
        then == NO_STEP || (then < step && (follows || step - then >= MATCH_STEPS))
    }

    /// Returns the number of candidates, which are the first requests of the queue.
    pub fn num_candidates(&self, waiting: &Queue, requests: &Requests) -> usize {
        let Some(first) = waiting.first() else { return 0 };
        let (of_first, first, _) = requests.cold(first).order;
        let (window, max_candidates) = window(self.policy);
        let may_go_first = |&index: &Index| {
            let (background, age, _) = requests.cold(index).order;
            background == of_first && age < first + window
        };
        waiting.iter().take(max_candidates).take_while(may_go_first).count()
    }
}

/// Returns a policy's window (in ages) and its maximum number of candidates, as several priorities could have more.
fn window(policy: SchedulePolicy) -> (i64, usize) {
    match policy {
        SchedulePolicy::Fcfs => (1, 1),
        SchedulePolicy::Lpm => (AGE, 64),
        SchedulePolicy::Srpf => (16 * AGE, 1024),
    }
}
