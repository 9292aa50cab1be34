//! What the gateway's thread and its owner's threads both see.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use minisgl_text::Tokenizer;

use crate::config::GatewayConfig;
use crate::message::prepared::{Generation, Prepared};
use crate::metrics::{Metrics, Windows};
use crate::questions::{Questions, lock};
use crate::waiting::{KeyCounts, Reserved, Room, Waiting};

/// What the answers of a model need.
pub struct Loaded {
    /// What Python told.
    pub config: GatewayConfig,
    /// The model's.
    pub tokenizer: Arc<Tokenizer>,
    /// What API keys of a file use, by number.
    pub keys: Vec<Arc<KeyCounts>>,
}

impl Loaded {
    /// With no key that has used anything.
    pub fn new(config: GatewayConfig, tokenizer: Arc<Tokenizer>) -> Loaded {
        let keys = (0..config.num_keys).map(|_| Arc::default()).collect();
        Loaded {
            config,
            tokenizer,
            keys,
        }
    }
}

/// What the gateway's thread and its owner's threads share.
pub struct Shared {
    /// What the gateway measures.
    pub metrics: Metrics,
    /// What Python is asked.
    pub questions: Arc<Questions>,
    /// Requests that the gateway is answering.
    pub num_open: AtomicUsize,
    /// Choices of the gateway in the engine.
    pub num_live: AtomicUsize,
    /// Prepared choices without a row in the engine.
    pub waiting: Arc<Waiting>,
    loaded: Mutex<Option<Arc<Loaded>>>,
    windows: Mutex<Windows>,
    python_beat: Mutex<Option<Instant>>,
}

impl Shared {
    /// Nothing has happened.
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

    /// Answers the question of this number. What is to be generated waits, and is used by its caller's key, from now on.
    /// False: nobody waits for it any more.
    pub fn answer(&self, number: u64, prepared: Prepared) -> bool {
        self.questions.answer(number, || {
            let reserved = match &prepared {
                Prepared::Generation(one) => Some(self.reserve(one)),
                _ => None,
            };
            (prepared, reserved)
        })
    }

    fn reserve(&self, generation: &Generation) -> Reserved {
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
        choices.map(|tokens| Room::take(&self.waiting, key, tokens)).collect()
    }

    /// The Python server's event loop runs.
    pub fn beat(&self) {
        *lock(&self.python_beat) = Some(Instant::now());
    }

    /// For how long it has not run, in seconds; 0 before its first beat, when it is starting.
    pub fn python_silence_s(&self) -> f64 {
        lock(&self.python_beat).map_or(0.0, |beat| beat.elapsed().as_secs_f64())
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
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_nobody_waits_for_keeps_no_room() {
        let shared = Shared::new().unwrap();
        let generation = Generation {
            prompts: vec![vec![1, 2, 3], vec![4]],
            ..Generation::default()
        };
        let room = shared.reserve(&generation);
        let waiting = || {
            (
                shared.waiting.requests.load(Relaxed),
                shared.waiting.tokens.load(Relaxed),
            )
        };
        assert_eq!((room.len(), waiting()), (2, (2, 4)));
        drop(room);
        assert_eq!(waiting(), (0, 0));
        assert!(!shared.answer(7, Prepared::Generation(Box::new(generation))));
        assert_eq!(waiting(), (0, 0), "its client has gone");
    }
}
