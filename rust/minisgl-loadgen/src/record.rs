//! What is known of one request after its end.

use crate::frame::Usage;

/// How a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Failure {
    /// It did not.
    None,
    /// No connection.
    Connect,
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

/// The names of the failures, by number.
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

/// One request. Times are seconds since the start of the run, NaN for what did not happen.
#[derive(Clone, Debug)]
pub struct Record {
    /// Its number: chains in order.
    pub index: usize,
    /// When it was to be sent: its arrival, or in a closed loop the moment in which its client was free.
    pub scheduled: f64,
    /// When its connection was made; NaN if it was there already.
    pub connected: f64,
    /// When it was handed to the connection.
    pub sent: f64,
    /// When the head of the answer was there.
    pub headers: f64,
    /// When the first text was there.
    pub first: f64,
    /// When the last text was there.
    pub last: f64,
    /// When it was over, by success or failure.
    pub end: f64,
    /// Events with text.
    pub text_events: u32,
    /// All events.
    pub events: u32,
    /// What the server counted.
    pub usage: Usage,
    /// HTTP status, 0 without one.
    pub status: u16,
    /// How it failed.
    pub failure: Failure,
    /// Why, in words.
    pub error: String,
    /// Bytes of the body.
    pub bytes: u64,
    /// Seconds between one event with text and the next.
    pub gaps: Vec<f32>,
}

impl Record {
    pub(crate) fn new(index: usize, scheduled: f64) -> Self {
        Self {
            index,
            scheduled,
            connected: f64::NAN,
            sent: f64::NAN,
            headers: f64::NAN,
            first: f64::NAN,
            last: f64::NAN,
            end: f64::NAN,
            text_events: 0,
            events: 0,
            usage: Usage::UNKNOWN,
            status: 0,
            failure: Failure::None,
            error: String::new(),
            bytes: 0,
            gaps: Vec::new(),
        }
    }

    pub(crate) fn text_at(&mut self, now: f64) {
        if self.text_events == 0 {
            self.first = now;
        } else {
            self.gaps.push((now - self.last) as f32);
        }
        self.last = now;
        self.text_events += 1;
    }
}
