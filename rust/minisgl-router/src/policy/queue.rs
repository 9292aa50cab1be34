//! Fair queue of waiting requests: between API keys by their shares, within a key by priority and age.
//!
//! Invariants: of the keys with an eligible request, the key with the least cost so far (tokens divided by its share)
//! goes next; a key gets no credit for the time in which it had no eligible request. A request of priority p is
//! overtaken by at most (p - q) * `AGE` later arrivals of priority q. Requests that were placed before (`again`)
//! precede all others, in the order in which they came back, and are not charged twice.

use std::collections::BTreeMap;

use super::config::{KeyShare, MAX_SHARE};

/// Arrivals that one step of priority is worth, as in the scheduler.
const AGE: i128 = 64;

/// Sort key of a waiting request within its API key: requests placed before first, then priority and age, then arrival.
pub(super) type QueueKey = (bool, i128, u64);

struct Key {
    share: KeyShare,
    num_inflight: usize,
    /// Cost charged to the key so far: tokens times `MAX_SHARE`, divided by its share.
    cost: u128,
    /// The key has a waiting request and is below its limit of requests in flight.
    active: bool,
    waiting: BTreeMap<QueueKey, i64>,
}

pub(super) struct FairQueue {
    keys: Vec<Key>,
    /// Cost at which a key starts that becomes active: what the last served key had been charged before it was served.
    start_cost: u128,
    num_arrivals: u64,
    num_waiting: usize,
}

impl FairQueue {
    pub fn new(shares: &[KeyShare]) -> Self {
        let all = std::iter::once(KeyShare::default()).chain(shares.iter().copied());
        let key = |share| Key {
            share,
            num_inflight: 0,
            cost: 0,
            active: false,
            waiting: BTreeMap::new(),
        };
        Self {
            keys: all.map(key).collect(),
            start_cost: 0,
            num_arrivals: 0,
            num_waiting: 0,
        }
    }

    pub fn num_keys(&self) -> usize {
        self.keys.len()
    }

    pub fn num_waiting(&self) -> usize {
        self.num_waiting
    }

    pub fn push(&mut self, req_id: i64, priority: i64, key: usize, again: bool) -> QueueKey {
        let arrival = self.num_arrivals;
        self.num_arrivals += 1;
        let order = if again {
            i128::from(arrival)
        } else {
            i128::from(priority) * AGE + i128::from(arrival)
        };
        let position = (!again, order, arrival);
        self.keys[key].waiting.insert(position, req_id);
        self.num_waiting += 1;
        self.refresh(key);
        position
    }

    /// Returns the API key and the id of the next request to place, or `None` if no key has an eligible request.
    pub fn first(&self) -> Option<(usize, i64)> {
        let active = || self.keys.iter().enumerate().filter(|(_, key)| key.active);
        let back = active().filter_map(|(at, key)| {
            let (position, &req_id) = key.waiting.first_key_value()?;
            (!position.0).then_some((position.2, at, req_id))
        });
        if let Some((_, at, req_id)) = back.min() {
            return Some((at, req_id));
        }
        let (at, key) = active().min_by_key(|&(at, key)| (key.cost, at))?;
        key.waiting.first_key_value().map(|(_, &req_id)| (at, req_id))
    }

    /// Removes the first request of `key`, which was placed, and charges the key for `prompt_len` tokens once.
    pub fn pop_placed(&mut self, key: usize, prompt_len: usize) {
        let Some(((first, _, _), _)) = self.keys[key].waiting.pop_first() else {
            return;
        };
        self.num_waiting -= 1;
        self.keys[key].num_inflight += 1;
        if first {
            self.start_cost = self.start_cost.max(self.keys[key].cost);
            self.charge(key, prompt_len.max(1));
        }
        self.refresh(key);
    }

    /// Removes a request of `key` that waits at `position`; no-op if it is not there.
    pub fn remove(&mut self, key: usize, position: QueueKey) {
        if self.keys[key].waiting.remove(&position).is_some() {
            self.num_waiting -= 1;
        }
        self.refresh(key);
    }

    /// Counts the end of a placed request of `key`.
    pub fn record_end(&mut self, key: usize) {
        self.keys[key].num_inflight -= 1;
        self.refresh(key);
    }

    pub fn charge(&mut self, key: usize, num_tokens: usize) {
        let key = &mut self.keys[key];
        key.cost += num_tokens as u128 * u128::from(MAX_SHARE) / u128::from(key.share.share);
    }

    fn refresh(&mut self, key: usize) {
        let key = &mut self.keys[key];
        let limit = key.share.max_inflight;
        let active = !key.waiting.is_empty() && (limit == 0 || key.num_inflight < limit);
        if active && !key.active {
            key.cost = key.cost.max(self.start_cost);
        }
        key.active = active;
    }
}
