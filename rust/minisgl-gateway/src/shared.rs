//! What the gateway's thread and its owner's threads both see.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::metrics::{Metrics, Windows};
use crate::prepare::Loaded;
use crate::python::lock;

/// An answer to POST /v1/responses that clients may come back to.
#[derive(Debug)]
pub struct KeptAnswer {
    /// Number of its caller's API key.
    pub key: usize,
    /// Its own.
    pub id: String,
    /// The items of its output have them.
    pub item_ids: Vec<String>,
    /// JSON: the whole object.
    pub answer: String,
    /// JSON: `input`, as the client wrote it.
    pub input: String,
}

impl KeptAnswer {
    fn num_bytes(&self) -> usize {
        self.answer.len() + self.input.len()
    }
}

/// What the gateway's thread and its owner's threads share.
#[derive(Default)]
pub struct Shared {
    /// What the gateway measures.
    pub metrics: Metrics,
    /// Requests that the gateway is answering.
    pub num_open: AtomicUsize,
    /// Requests of the gateway in the engine.
    pub num_live: AtomicUsize,
    /// What waits in the gateway: bodies in hand and requests without a row in the engine.
    pub num_waiting: AtomicUsize,
    /// Tokens of the prompts of those in the engine.
    pub num_waiting_tokens: AtomicUsize,
    /// The same of the Python server.
    pub others_waiting: AtomicUsize,
    /// The same of the Python server.
    pub others_waiting_tokens: AtomicUsize,
    /// Requests of the Python server in the engine.
    pub others_live: AtomicUsize,
    adapters: Mutex<HashMap<String, i64>>,
    kept: Mutex<Vec<KeptAnswer>>,
    loaded: Mutex<Option<Arc<Loaded>>>,
    windows: Mutex<Windows>,
    python_beat: Mutex<Option<Instant>>,
}

impl Shared {
    /// What the Python side has waiting and in the engine; and by number of an API key what waits there, and the tokens
    /// that were used there.
    pub fn publish(&self, num_waiting: usize, num_waiting_tokens: usize, num_live: usize, keys: &[(usize, u64)]) {
        self.others_waiting.store(num_waiting, Relaxed);
        self.others_waiting_tokens.store(num_waiting_tokens, Relaxed);
        self.others_live.store(num_live, Relaxed);
        if keys.is_empty() {
            return;
        }
        for (counts, (waiting, tokens)) in self.loaded().iter().flat_map(|one| &one.keys).zip(keys) {
            counts.others_waiting.store(*waiting, Relaxed);
            counts.others_tokens.store(*tokens, Relaxed);
        }
    }

    /// The Python server's event loop runs.
    pub fn beat(&self) {
        *lock(&self.python_beat) = Some(Instant::now());
    }

    /// Whether it ran within so many seconds; until its first beat it is starting.
    pub fn python_runs(&self, silence_s: f64) -> bool {
        lock(&self.python_beat).is_none_or(|beat| beat.elapsed().as_secs_f64() <= silence_s)
    }

    /// Keeps an answer until the Python server takes it, which it does before it looks one up: at most so many, of so
    /// many bytes; beyond that the oldest is forgotten of the key that has most, as there.
    pub fn keep(&self, one: KeptAnswer, max_answers: usize, max_bytes: usize) {
        let kept = &mut *lock(&self.kept);
        kept.push(one);
        while kept.len() > max_answers || kept.iter().map(KeptAnswer::num_bytes).sum::<usize>() > max_bytes {
            let mut weights = HashMap::<usize, usize>::new();
            for one in kept.iter() {
                *weights.entry(one.key).or_default() += one.num_bytes();
            }
            let most = weights
                .into_iter()
                .max_by_key(|&(_, weight)| weight)
                .map(|(key, _)| key);
            let at = kept.iter().position(|one| Some(one.key) == most);
            kept.remove(at.unwrap_or(0));
        }
    }

    /// What was kept since the last time, in order.
    pub fn take_kept(&self) -> Vec<KeptAnswer> {
        std::mem::take(&mut lock(&self.kept))
    }

    /// The adapters that requests may name from now on, with their numbers.
    pub fn set_adapters(&self, found: HashMap<String, i64>) {
        *lock(&self.adapters) = found;
    }

    /// The number of the adapter of this name.
    pub fn adapter(&self, name: &str) -> Option<i64> {
        let adapters = lock(&self.adapters);
        adapters.get(name).copied()
    }

    /// Whether there is any.
    pub fn has_adapters(&self) -> bool {
        !lock(&self.adapters).is_empty()
    }

    /// What the model needs, once it is loaded.
    pub fn loaded(&self) -> Option<Arc<Loaded>> {
        lock(&self.loaded).clone()
    }

    /// From now on.
    pub fn set_loaded(&self, loaded: &Arc<Loaded>) {
        *lock(&self.loaded) = Some(Arc::clone(loaded));
    }

    /// Before the meters are read.
    pub fn turn_windows(&self) {
        if let Some(loaded) = self.loaded() {
            let mut windows = lock(&self.windows);
            windows.turn(&self.metrics, loaded.config.metrics.window_s);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_that_keeps_most_loses_its_oldest_answer() {
        let shared = Shared::default();
        let keep = |key, id: &str, size, most: (usize, usize)| {
            let one = KeptAnswer {
                key,
                id: id.to_owned(),
                item_ids: Vec::new(),
                answer: "x".repeat(size),
                input: String::new(),
            };
            shared.keep(one, most.0, most.1);
        };
        for (key, id) in [(1, "a"), (2, "b"), (2, "c"), (2, "d")] {
            keep(key, id, 10, (3, 1000));
        }
        keep(1, "e", 10, (9, 30));
        let ids: Vec<_> = shared.take_kept().into_iter().map(|one| one.id).collect();
        assert!(ids.len() == 3 && ids.contains(&"e".to_owned()), "{ids:?}");
        assert!(shared.take_kept().is_empty());
        keep(1, "f", 31, (9, 30));
        assert!(shared.take_kept().is_empty(), "larger than all");
    }
}
