//! Which waiting request starts next: the schedule policies.
//!
//! A policy is a rank, a small function of a request. Of the *candidates* the one with the smallest rank goes first, of
//! those with the smallest priority; the first in line if there are several. Candidates are the first in line and those
//! behind it, in the background as it is or not, whose age is less than AGE above its own (with fcfs the first alone).
//!
//! *Nobody starves.* Of later arrivals of its own priority at most AGE - 1 start before a request, with any policy;
//! `reference/ranking.py` has the proof.
//!
//! What is cached of a request is looked up when it becomes a candidate, and then remembered: a step looks it up again,
//! of all candidates, if a request has started since, or after `MATCH_STEPS` steps. So a step in which nobody can start
//! walks no tree, however many wait. What is remembered decides who goes first, never what it gets.

use crate::admission::cached_len;
use crate::api::SchedulePolicy;
use crate::numbers::ToI64;
use crate::radix::RadixTree;
use crate::request::{AGE, Index, NO_STEP, OrderKey, Queue, Requests};

const MAX_CANDIDATES: usize = 64; // of several priorities there could be more
const MATCH_STEPS: i64 = 16;

fn longest_prefix(requests: &Requests, index: Index) -> i64 {
    -requests.cold(index).cached_len.to_i64()
}

fn shortest_prefill(requests: &Requests, index: Index) -> i64 {
    i64::from(requests.get(index).len) - requests.cold(index).cached_len.to_i64()
}

pub(crate) struct Ranking {
    pub policy: SchedulePolicy,
    pub last_start: i64, // the last step in which a request has started
}

impl Ranking {
    pub fn new(policy: SchedulePolicy) -> Self {
        Self {
            policy,
            last_start: NO_STEP,
        }
    }

    /// Of those that wait, the one that starts next.
    pub fn next(&self, waiting: &Queue, requests: &mut Requests, tree: &RadixTree, step: i64) -> Option<Index> {
        let rank = match self.policy {
            SchedulePolicy::Fcfs => return waiting.first(),
            SchedulePolicy::Lpm => longest_prefix,
            SchedulePolicy::Srpf => shortest_prefill,
        };
        let mut best: Option<((i64, i64, OrderKey), Index)> = None;
        for index in waiting.iter().take(num_candidates(waiting, requests)) {
            if self.is_due(requests.cold(index).matched_in, step) {
                let found = cached_len(requests, index, tree, step);
                let cold = requests.cold_mut(index);
                (cold.cached_len, cold.matched_in) = (found, step);
            }
            let cold = requests.cold(index);
            let key = (cold.priority, rank(requests, index), cold.order);
            if best.is_none_or(|(least, _)| key < least) {
                best = Some((key, index));
            }
        }
        best.map(|(_, index)| index)
    }

    /// Whether what is cached of a candidate is to be looked up. Once a step is enough.
    fn is_due(&self, then: i64, step: i64) -> bool {
        then == NO_STEP || (then < step && (then <= self.last_start || step - then >= MATCH_STEPS))
    }
}

/// How many there are, from the first in line on.
pub(crate) fn num_candidates(waiting: &Queue, requests: &Requests) -> usize {
    let Some(first) = waiting.first() else { return 0 };
    let (of_first, first, _) = requests.cold(first).order;
    let may_go_first = |&index: &Index| {
        let (background, age, _) = requests.cold(index).order;
        background == of_first && age < first + AGE
    };
    waiting.iter().take(MAX_CANDIDATES).take_while(may_go_first).count()
}
