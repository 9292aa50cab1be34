//! Counters of waiting choices, which Python reads (`server/core/waiting.py`, `server/core/api_keys.py`).
//!
//! Invariants: a choice counts from the moment in which Python prepared it, so that requests prepared at the same time
//! stay within its limits; it stops counting once, when the engine admits it or its client has disconnected.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Usage counters of one API key. Any thread may read them.
#[derive(Debug, Default)]
pub struct KeyCounts {
    /// Choices of this key that the engine has not admitted.
    pub num_waiting: AtomicUsize,
    /// Prompt tokens of the choices in `num_waiting`.
    pub num_waiting_tokens: AtomicUsize,
    /// Choices that Python prepared for the engine, in total.
    pub num_requests: AtomicU64,
    /// Prompt tokens in total, each prompt counted once per request.
    pub num_prompt: AtomicU64,
    /// Tokens generated for this key, in total.
    pub num_generated: AtomicU64,
}

/// Count of choices that the engine has not admitted, and of their prompt tokens.
#[derive(Debug, Default)]
pub struct Waiting {
    /// Number of choices that the engine has not admitted.
    pub requests: AtomicUsize,
    /// Prompt tokens of the choices that the engine has not admitted.
    pub tokens: AtomicUsize,
}

/// Queue reservation of one choice; dropping it ends the counting.
#[derive(Debug)]
pub struct Reservation {
    waiting: Arc<Waiting>,
    key: Option<Arc<KeyCounts>>,
    tokens: usize,
}

/// Queue reservations of a request's choices.
pub type Reservations = Vec<Reservation>;

impl Reservation {
    /// Counts a choice with a prompt of `tokens` tokens as waiting.
    pub fn take(waiting: &Arc<Waiting>, key: Option<&Arc<KeyCounts>>, tokens: usize) -> Reservation {
        waiting.requests.fetch_add(1, Relaxed);
        waiting.tokens.fetch_add(tokens, Relaxed);
        if let Some(key) = key {
            key.num_waiting.fetch_add(1, Relaxed);
            key.num_waiting_tokens.fetch_add(tokens, Relaxed);
        }
        Reservation {
            waiting: Arc::clone(waiting),
            key: key.cloned(),
            tokens,
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.waiting.requests.fetch_sub(1, Relaxed);
        self.waiting.tokens.fetch_sub(self.tokens, Relaxed);
        if let Some(key) = &self.key {
            key.num_waiting.fetch_sub(1, Relaxed);
            key.num_waiting_tokens.fetch_sub(self.tokens, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_reservation_stops_counting_once() {
        let (waiting, key) = (Arc::<Waiting>::default(), Arc::<KeyCounts>::default());
        let counts = || {
            let waiting = (waiting.requests.load(Relaxed), waiting.tokens.load(Relaxed));
            let key = (&key.num_waiting, &key.num_waiting_tokens);
            (waiting, (key.0.load(Relaxed), key.1.load(Relaxed)))
        };
        let take = |key, tokens| Reservation::take(&waiting, key, tokens);
        let mut reservations = vec![take(Some(&key), 5), take(None, 7)];
        assert_eq!(counts(), ((2, 12), (1, 5)));
        reservations.remove(0);
        assert_eq!(counts(), ((1, 7), (0, 0)));
        drop(reservations);
        assert_eq!(counts(), ((0, 0), (0, 0)));
    }
}
