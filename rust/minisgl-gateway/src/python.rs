//! Questions to the Python server in this process: texts in JSON, of forms and of receipts ([`crate::forms`],
//! [`crate::receipts`]). No client can ask one: they are calls, and have no address.
//!
//! Invariants: never asked by a thread that answers clients.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// The answer to a question; None: there is none.
pub type Ask = Box<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// Whom to ask.
#[derive(Clone)]
pub struct Python(Arc<RwLock<Option<Ask>>>);

impl Python {
    /// Asks by `ask`.
    pub fn new(ask: Ask) -> Python {
        Python(Arc::new(RwLock::new(Some(ask))))
    }

    /// Asks, which may take seconds.
    pub fn ask(&self, question: &str) -> Option<String> {
        let ask = self.0.read().unwrap_or_else(PoisonError::into_inner);
        ask.as_ref().and_then(|ask| ask(question))
    }

    /// Nothing is asked any more, when this returns.
    pub fn close(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Whoever panicked while it was held left it whole.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
