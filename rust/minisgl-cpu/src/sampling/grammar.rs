//! Grammars that constrain sampling: masks are filled while logits are computed, then each token is consumed.
//!
//! Invariants: one thread at a time uses a grammar, in the order of steps; a grammar that fails ends its own request,
//! and no other row is affected; a row whose mask takes too long gets no token in the step, and delays no other row.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::threads::Counter;

/// State of one request in its grammar. Methods never panic: a failure is stored as the error, permanently.
pub trait Grammar: Send + fmt::Debug {
    /// Resets the state to after these generated ids, whatever was consumed before.
    fn restart(&mut self, generated: &[i32]);
    /// Sets the bits of the tokens that may come next (bit i % 32 of word i / 32) and clears all others; after a
    /// failure only an end-of-sequence id is allowed. Returns false, with undefined bits, if filling takes too long;
    /// when no time is `left` in the step, only quick masks succeed.
    fn try_fill(&mut self, mask: &mut [u32], left: Duration) -> bool;
    /// Advances the state by one sampled token.
    fn consume(&mut self, token: u32);
    /// Returns why the grammar cannot continue, `None` if it can.
    fn error(&self) -> Option<String>;
}

/// Grammar state that a request keeps when it is moved to another slot.
pub type SharedGrammar = Arc<Mutex<dyn Grammar>>;

/// Time limit per step for masks that are not quick.
const STEP_TIME: Duration = Duration::from_millis(5);

/// Grammar of a slot, with the mask of its next token.
#[derive(Debug)]
pub(super) struct Masked {
    grammar: SharedGrammar,
    mask: Vec<u32>,
    is_late: bool, // true if the mask took too long: no tokens until the slot is bound again
}

impl Masked {
    /// Resets the grammar to after `generated`. `words` is the mask size in 32-bit words.
    pub fn new(grammar: SharedGrammar, generated: &[i32], words: usize) -> Self {
        let shared = Arc::clone(&grammar);
        shared.lock().unwrap_or_else(PoisonError::into_inner).restart(generated);
        Self {
            grammar,
            mask: vec![0; words],
            is_late: false,
        }
    }

    /// Fills the mask if there is time. Otherwise the slot gets no more tokens until it is bound again.
    fn fill(&mut self, left: Duration) {
        if !self.is_late {
            let mut grammar = self.grammar.lock().unwrap_or_else(PoisonError::into_inner);
            self.is_late = !grammar.try_fill(&mut self.mask, left);
        }
    }

    /// Returns the mask, `None` if filling it took too long.
    pub fn mask(&self) -> Option<&[u32]> {
        (!self.is_late).then_some(&self.mask)
    }

    /// Advances the grammar by `token`. Returns why it cannot continue, `None` if it can.
    pub fn consume(&mut self, token: u32) -> Option<String> {
        let mut grammar = self.grammar.lock().unwrap_or_else(PoisonError::into_inner);
        grammar.consume(token);
        grammar.error()
    }
}

/// Masks of a step that all threads fill together; each mask is filled by one thread.
pub struct Masks<'a> {
    masks: Vec<&'a Mutex<Masked>>,
    next: Counter,
    began: OnceLock<Instant>,
}

impl<'a> Masks<'a> {
    pub(super) fn new(masks: impl Iterator<Item = &'a Mutex<Masked>>) -> Self {
        Self {
            masks: masks.collect(),
            next: Counter::default(),
            began: OnceLock::new(),
        }
    }

    /// Fills the masks that no other thread has claimed.
    pub fn fill(&self) {
        while let Some(index) = self.next.claim(self.masks.len()) {
            let mut masked = self.masks[index].lock().unwrap_or_else(PoisonError::into_inner);
            masked.fill(STEP_TIME.saturating_sub(self.began.get_or_init(Instant::now).elapsed()));
        }
    }
}
