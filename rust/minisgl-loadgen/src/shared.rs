//! What a run shares with whoever watches it.

use std::sync::atomic::{AtomicBool, AtomicU64};

/// Counters that others read while a run goes on, and the way to cancel it.
#[derive(Default)]
pub struct Shared {
    /// Set to cancel.
    pub stop: AtomicBool,
    /// Requests that are over.
    pub finished: AtomicU64,
    /// Of these, failed.
    pub failed: AtomicU64,
    /// Requests begun and not over.
    pub in_flight: AtomicU64,
    /// Events with text.
    pub tokens: AtomicU64,
}
