//! State shared by the gateway's thread and its owner's threads.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use minisgl_text::Tokenizer;

use crate::config::GatewayConfig;
use crate::message::prepared::{Generation, Prepared};
use crate::metrics::{Metrics, Windows};
use crate::questions::{Questions, lock};
use crate::waiting::{KeyCounts, Reservation, Reservations, Waiting};

/// Configuration and tokenizer of a loaded model, with the counters of API keys.
pub struct Loaded {
    /// Configuration of the gateway that Python sent.
    pub config: GatewayConfig,
    /// Tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// Usage counters of the API keys, by index in the key file.
    pub keys: Vec<Arc<KeyCounts>>,
}

impl Loaded {
    /// Makes the state of a model, with all counters 0.
    pub fn new(config: GatewayConfig, tokenizer: Arc<Tokenizer>) -> Loaded {
        let keys = (0..config.num_keys).map(|_| Arc::default()).collect();
        Loaded {
            config,
            tokenizer,
            keys,
        }
    }
}

/// State shared by the gateway's thread and its owner's threads.
pub struct Shared {
    /// Metrics of the gateway.
    pub metrics: Metrics,
    /// Questions to Python.
    pub questions: Arc<Questions>,
    /// Requests that the gateway is answering.
    pub num_open: AtomicUsize,
    /// Choices of the gateway in the engine.
    pub num_live: AtomicUsize,
    /// Prepared choices that the engine has not admitted.
    pub waiting: Arc<Waiting>,
    loaded: Mutex<Option<Arc<Loaded>>>,
    windows: Mutex<Windows>,
    python_beat: Mutex<Option<Instant>>,
}

impl Shared {
    /// Makes the initial state, without a model.
    pub fn new() -> io::Result<Shared> {
        Ok(Shared {
            metrics: Metrics::default(),
            questions: Arc::new(Questions::new()?),
            num_open: AtomicUsize::new(0),
            num_live: AtomicUsize::new(0),
            waiting: Arc::default(),
            loaded: Mutex::default(),
            windows: Mutex::default(),
            python_beat: Mutex::default(),
        })
    }

    /// Answers question `number`. The choices of a generation count as waiting and as used by the caller's API key from
    /// now on. Returns false if the client has disconnected.
    pub fn answer(&self, number: u64, prepared: Prepared) -> bool {
        self.questions.answer(number, || {
            let reserved = match &prepared {
                Prepared::Generation(one) => Some(self.reserve(one)),
                _ => None,
            };
            (prepared, reserved)
        })
    }

    fn reserve(&self, generation: &Generation) -> Reservations {
        let loaded = self.loaded();
        let key = loaded.as_ref().and_then(|one| one.keys.get(generation.key));
        if let Some(counts) = key {
            counts.num_requests.fetch_add(generation.num_choices() as u64, Relaxed);
            counts
                .num_prompt
                .fetch_add(generation.num_prompt_tokens() as u64, Relaxed);
        }
        let prompts = generation.prompts.iter();
        let choices = prompts.flat_map(|prompt| std::iter::repeat_n(prompt.len(), generation.n()));
        choices.map(|len| Reservation::take(&self.waiting, key, len)).collect()
    }

    /// Records that the Python server's event loop is running.
    pub fn beat(&self) {
        *lock(&self.python_beat) = Some(Instant::now());
    }

    /// Returns the seconds since the last `beat`; 0 before the first one, while the server is starting.
    pub fn python_silence_s(&self) -> f64 {
        lock(&self.python_beat).map_or(0.0, |beat| beat.elapsed().as_secs_f64())
    }

    /// Returns the model's configuration and tokenizer, or `None` before it is loaded.
    pub fn loaded(&self) -> Option<Arc<Loaded>> {
        lock(&self.loaded).clone()
    }

    /// Sets the model's configuration and tokenizer.
    pub fn set_loaded(&self, loaded: &Arc<Loaded>) {
        *lock(&self.loaded) = Some(Arc::clone(loaded));
    }

    /// Starts a new window of the meters if it is time. Call it before reading them.
    pub fn turn_windows(&self) {
        if let Some(loaded) = self.loaded() {
            let mut windows = lock(&self.windows);
            windows.turn(&self.metrics, loaded.config.metrics.window_s);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn disconnected_client_keeps_no_reservation() {
        let shared = Shared::new().unwrap();
        let generation = Generation {
            prompts: vec![vec![1, 2, 3], vec![4]],
            ..Generation::default()
        };
        let reservation = shared.reserve(&generation);
        let waiting = || {
            (
                shared.waiting.requests.load(Relaxed),
                shared.waiting.tokens.load(Relaxed),
            )
        };
        assert_eq!((reservation.len(), waiting()), (2, (2, 4)));
        drop(reservation);
        assert_eq!(waiting(), (0, 0));
        assert!(!shared.answer(7, Prepared::Generation(Box::new(generation))));
        assert_eq!(waiting(), (0, 0), "its client has gone");
    }
}
