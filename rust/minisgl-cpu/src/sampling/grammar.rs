//! What may come next in a request that has a grammar: asked while logits are computed, told what came when it is drawn.
//!
//! Invariants: a grammar is asked by one thread at a time, in the order of steps; one that cannot go on ends its own
//! request, and no other row notices; one whose mask takes long has no token in the step, and holds up nobody.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::threads::Counter;

/// A request's place in its grammar. Nothing panics: what goes wrong is its error, for good.
pub trait Grammar: Send + fmt::Debug {
    /// Stand behind these ids, whatever was consumed before.
    fn restart(&mut self, generated: &[i32]);
    /// Set the bits of the tokens that may come next, bit i % 32 of word i / 32, and clear all others; of an end of
    /// sequence alone if it cannot go on. False if that would take long, or more than little where nothing is `left` of
    /// a step's time for masks: the bits mean nothing then.
    fn try_fill(&mut self, mask: &mut [u32], left: Duration) -> bool;
    /// It came.
    fn consume(&mut self, token: u32);
    /// Why it cannot go on, if it cannot.
    fn error(&self) -> Option<String>;
}

/// The request's own, which is bound again where it is taken up again.
pub type SharedGrammar = Arc<Mutex<dyn Grammar>>;

/// Of a step, for masks that are not quick.
const STEP_TIME: Duration = Duration::from_millis(5);

/// A slot's grammar, and the mask of its next token.
#[derive(Debug)]
pub(super) struct Masked {
    grammar: SharedGrammar,
    mask: Vec<u32>,
    is_late: bool, // its mask took too long: it has no more tokens until it is bound again
}

impl Masked {
    /// Behind `generated`; masks of so many words.
    pub fn new(grammar: SharedGrammar, generated: &[i32], words: usize) -> Self {
        let of_it = Arc::clone(&grammar);
        of_it.lock().unwrap_or_else(PoisonError::into_inner).restart(generated);
        Self {
            grammar,
            mask: vec![0; words],
            is_late: false,
        }
    }

    /// Find what may come next, if there is time.
    fn fill(&mut self, left: Duration) {
        if !self.is_late {
            let mut grammar = self.grammar.lock().unwrap_or_else(PoisonError::into_inner);
            self.is_late = !grammar.try_fill(&mut self.mask, left);
        }
    }

    /// As it was found; none if that would take too long.
    pub fn mask(&self) -> Option<&[u32]> {
        (!self.is_late).then_some(&self.mask)
    }

    /// It came; why it cannot go on, if it cannot.
    pub fn consume(&mut self, token: u32) -> Option<String> {
        let mut grammar = self.grammar.lock().unwrap_or_else(PoisonError::into_inner);
        grammar.consume(token);
        grammar.error()
    }
}

/// Masks that threads fill, each one by whoever comes first.
pub struct Masks<'a> {
    found: Vec<&'a Mutex<Masked>>,
    next: Counter,
    began: OnceLock<Instant>,
}

impl<'a> Masks<'a> {
    pub(super) fn of(found: impl Iterator<Item = &'a Mutex<Masked>>) -> Self {
        Self {
            found: found.collect(),
            next: Counter::default(),
            began: OnceLock::new(),
        }
    }

    /// Those that no other thread has taken.
    pub fn fill(&self) {
        while let Some(index) = self.next.take(self.found.len()) {
            let mut masked = self.found[index].lock().unwrap_or_else(PoisonError::into_inner);
            masked.fill(STEP_TIME.saturating_sub(self.began.get_or_init(Instant::now).elapsed()));
        }
    }
}
