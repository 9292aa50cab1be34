//! Results of one request.

use std::sync::atomic::{AtomicBool, AtomicU64};

use crate::frame::Usage;

/// Reasons for which a request failed; the discriminant is the index in `FAILURES`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Failure {
    /// The connection could not be established.
    Connect = 1,
    /// The status was not 2xx.
    Status,
    /// The connection broke, or the response was no valid HTTP.
    Broken,
    /// The request was not finished in time.
    Timeout,
    /// The stream contained an error event.
    Error,
    /// The stream ended without `[DONE]`.
    Cut,
    /// The run was cancelled.
    Cancelled,
}

/// Names of the failures by discriminant; index 0 is no failure.
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

/// Results of one request. Times are seconds since the start of the run, `None` for events that did not happen.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Index of the request, counted over the chains in order.
    pub index: usize,
    /// Planned time: its arrival, or in a closed loop the moment at which its client was free.
    pub scheduled: f64,
    /// Time at which its connection was established; `None` if it was reused.
    pub connected: Option<f64>,
    /// Time at which it was handed to the connection.
    pub sent: Option<f64>,
    /// Time at which the head of the response was received.
    pub headers: Option<f64>,
    /// Time of the first event with text.
    pub first: Option<f64>,
    /// Time of the last event with text.
    pub last: Option<f64>,
    /// Time at which it ended, by success or failure.
    pub end: Option<f64>,
    /// Number of events with text.
    pub text_events: u32,
    /// Number of all events.
    pub events: u32,
    /// Token counts that the server reported.
    pub usage: Usage,
    /// HTTP status, if one was received.
    pub status: Option<u16>,
    /// Kind of failure, if it failed.
    pub failure: Option<Failure>,
    /// Error text of the failure.
    pub error: String,
    /// Bytes of the response body.
    pub bytes: usize,
    /// Seconds between successive events with text.
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

/// Converts seconds to single precision, which is enough for the time between two events.
#[allow(clippy::as_conversions)]
const fn single(seconds: f64) -> f32 {
    seconds as f32
}

/// Counters that other threads read while a run goes on, and the flag that cancels it.
#[derive(Default)]
pub struct Shared {
    /// Cancels the run when set.
    pub stop: AtomicBool,
    /// Number of finished requests.
    pub finished: AtomicU64,
    /// Number of finished requests that failed.
    pub failed: AtomicU64,
    /// Number of requests that are begun and not finished.
    pub in_flight: AtomicU64,
    /// Number of events with text.
    pub tokens: AtomicU64,
}
