//! Requests of the gateway in the engine (as in `frontend/output_processor.py` and `engine_client.py`).
//!
//! Invariants: ids are never reused; every submitted request ends exactly once, also when the engine exits; a
//! generation is notified once for all updates of its choices in a batch of messages.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::rc::Rc;
use std::time::Instant;

use crate::answer::choice::Finish;
use crate::answer::generation::Generation;
use crate::message::StepTokens;
use crate::metrics::Metrics;
use crate::waiting::Reservation;

/// Hasher for consecutive integer ids: one multiplication.
#[derive(Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.wrapping_mul(0x100).wrapping_add(u64::from(byte));
        }
    }
    fn write_i64(&mut self, id: i64) {
        self.write_u64(id as u64);
    }
    fn write_u64(&mut self, id: u64) {
        self.0 = id.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

struct LiveRequest {
    generation: Rc<Generation>,
    choice: usize,
    sent: Instant,
    reservation: Option<Reservation>, // `None` once admitted
}

/// Table of the gateway's requests in the engine, by request id.
#[derive(Default)]
pub struct Live {
    entries: HashMap<i64, LiveRequest, BuildHasherDefault<IdHasher>>,
    next_id: i64,
}

impl Live {
    /// Returns the number of requests.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if there is no request.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds a request for one choice, with its queue reservation, and returns its id.
    pub fn add(&mut self, generation: &Rc<Generation>, choice: usize, reservation: Option<Reservation>) -> i64 {
        let id = self.next_id;
        self.next_id += 1;
        let entry = LiveRequest {
            generation: Rc::clone(generation),
            choice,
            sent: Instant::now(),
            reservation,
        };
        self.entries.insert(id, entry);
        id
    }

    /// Removes a request; later output for it is dropped. Returns false if it has ended already.
    pub fn remove(&mut self, id: i64) -> bool {
        self.entries.remove(&id).is_some()
    }

    /// Removes all requests and returns their generations, one for each request: the engine has exited.
    pub fn take_all(&mut self) -> Vec<Rc<Generation>> {
        self.entries.drain().map(|(_, entry)| entry.generation).collect()
    }

    /// Applies a step's output to the choices. Appends to `due` the generations that must be notified.
    pub fn process(&mut self, step: &mut StepTokens, metrics: &Metrics, due: &mut Vec<Rc<Generation>>) {
        for &(id, cached_len) in &step.admitted {
            if let Some(entry) = self.entries.get_mut(&id) {
                entry
                    .generation
                    .update(entry.choice, |choice| choice.cached_len = Some(cached_len));
                metrics.queue.observe(entry.sent.elapsed().as_secs_f64(), 1);
                entry.reservation = None;
            }
        }
        for logprobs in step.logprobs.drain(..) {
            let entry = step.req_ids.get(logprobs.index).and_then(|id| self.entries.get(id));
            if let Some(entry) = entry {
                entry.generation.update(entry.choice, |one| one.add_scored(logprobs));
            }
        }
        for ((&id, &token), &reason) in step.req_ids.iter().zip(&step.tokens).zip(&step.reasons) {
            let Some(entry) = self.entries.get(&id) else { continue }; // removed already, before the engine knew
            let reason = Finish::from_reason(reason);
            let error = reason.and_then(|_| {
                let at = step.errors.0.iter().position(|(one, _)| *one == id)?;
                Some(step.errors.0.swap_remove(at).1)
            });
            let generation = &entry.generation;
            generation.update(entry.choice, |choice| choice.add(token, reason, error));
            if !generation.is_due.replace(true) {
                due.push(Rc::clone(generation));
            }
            if reason.is_some() {
                self.remove(id);
            }
        }
    }
}
