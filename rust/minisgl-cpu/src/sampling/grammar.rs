//! What may come next in a request that has a grammar: asked while logits are computed, told what came when it is drawn.
//!
//! Invariants: a grammar is asked by one thread at a time, in the order of steps; one that cannot go on ends its own
//! request, and no other row notices.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::threads::Counter;

/// A request's place in its grammar. Nothing panics: what goes wrong is its error, for good.
pub trait Grammar: Send + fmt::Debug {
    /// Stand behind these ids, whatever was consumed before.
    fn restart(&mut self, generated: &[i32]);
    /// Set the bits of the tokens that may come next, bit i % 32 of word i / 32, and clear all others; of an end of
    /// sequence alone if it cannot go on.
    fn fill(&mut self, mask: &mut [u32]);
    /// It came.
    fn consume(&mut self, token: u32);
    /// Why it cannot go on, if it cannot.
    fn error(&self) -> Option<String>;
}

/// The request's own, which is bound again where it is taken up again.
pub type SharedGrammar = Arc<Mutex<dyn Grammar>>;

/// A slot's grammar, and the mask of its next token.
#[derive(Debug)]
pub(super) struct Masked {
    grammar: SharedGrammar,
    mask: Vec<u32>,
}

impl Masked {
    /// Behind `generated`; masks of so many words.
    pub fn new(grammar: SharedGrammar, generated: &[i32], words: usize) -> Self {
        let of_it = Arc::clone(&grammar);
        of_it.lock().unwrap_or_else(PoisonError::into_inner).restart(generated);
        Self {
            grammar,
            mask: vec![0; words],
        }
    }

    /// Find what may come next.
    pub fn fill(&mut self) {
        let Self { grammar, mask } = self;
        grammar.lock().unwrap_or_else(PoisonError::into_inner).fill(mask);
    }

    /// As `fill` found it.
    pub fn mask(&self) -> &[u32] {
        &self.mask
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
}

impl<'a> Masks<'a> {
    pub(super) fn of(found: impl Iterator<Item = &'a Mutex<Masked>>) -> Self {
        Self {
            found: found.collect(),
            next: Counter::default(),
        }
    }

    /// Those that no other thread has taken.
    pub fn fill(&self) {
        while let Some(index) = self.next.take(self.found.len()) {
            let mut masked = self.found[index].lock().unwrap_or_else(PoisonError::into_inner);
            masked.fill();
        }
    }
}
