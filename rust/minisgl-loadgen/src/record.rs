//! What is known of one request after its end.

use std::sync::atomic::{AtomicBool, AtomicU64};

use crate::frame::Usage;

/// How a request failed; its number is its place in `FAILURES`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Failure {
    /// No connection.
    Connect = 1,
    /// A status other than 2xx.
    Status,
    /// The connection broke, or what came was no HTTP.
    Broken,
    /// Not over in time.
    Timeout,
    /// The stream carried an error.
    Error,
    /// The stream ended without `[DONE]`.
    Cut,
    /// The run was cancelled.
    Cancelled,
}

/// The names of the failures, by number; none is 0.
pub const FAILURES: [&str; 8] = [
    "",
    "connect",
    "status",
    "broken",
    "timeout",
    "error",
    "cut",
    "cancelled",
];

/// One request. Times are seconds since the start of the run, None for what did not happen.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Its number: chains in order.
    pub index: usize,
    /// When it was to be sent: its arrival, or in a closed loop the moment in which its client was free.
    pub scheduled: f64,
    /// When its connection was made; None if it was there already.
    pub connected: Option<f64>,
    /// When it was handed to the connection.
    pub sent: Option<f64>,
    /// When the head of the answer was there.
    pub headers: Option<f64>,
    /// When the first text was there.
    pub first: Option<f64>,
    /// When the last text was there.
    pub last: Option<f64>,
    /// When it was over, by success or failure.
    pub end: Option<f64>,
    /// Events with text.
    pub text_events: u32,
    /// All events.
    pub events: u32,
    /// What the server counted.
    pub usage: Usage,
    /// HTTP status, if one came.
    pub status: Option<u16>,
    /// How it failed, if it did.
    pub failure: Option<Failure>,
    /// Why, in words.
    pub error: String,
    /// Bytes of the body.
    pub bytes: usize,
    /// Seconds between one event with text and the next.
    pub gaps: Vec<f32>,
}

impl Record {
    pub(crate) fn new(index: usize, scheduled: f64) -> Self {
        Self {
            index,
            scheduled,
            ..Self::default()
        }
    }

    pub(crate) fn text_at(&mut self, now: f64) {
        match self.last {
            None => self.first = Some(now),
            Some(last) => self.gaps.push(single(now - last)),
        }
        self.last = Some(now);
        self.text_events += 1;
    }
}

/// Seconds in single precision, which is enough for what lies between two events.
#[allow(clippy::as_conversions)]
const fn single(seconds: f64) -> f32 {
    seconds as f32
}

/// Counters that others read while a run goes on, and the way to cancel it.
#[derive(Default)]
pub struct Shared {
    /// Set to cancel.
    pub stop: AtomicBool,
    /// Requests that are over.
    pub finished: AtomicU64,
    /// How many of these failed.
    pub failed: AtomicU64,
    /// Requests begun and not over.
    pub in_flight: AtomicU64,
    /// Events with text.
    pub tokens: AtomicU64,
}
