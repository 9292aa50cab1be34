//! A load generator for OpenAI-compatible servers: many streaming requests, and the arrival time of each of their
//! tokens. `minisgl.bench` evaluates the times.
//!
//! Open loop (arrival times are given; latencies count from them, so a stalled server cannot hide its stall) or closed
//! loop (each of several clients sends its next request when its last one has ended). Plain HTTP/1.1. Start with `run`.
//!
//! Invariants: a failed request has its reason, and never counts as a fast one; times are seconds since the start; the
//! generator's own cost is measured and part of the outcome.

#![forbid(unsafe_code)]
#![deny(clippy::as_conversions)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod exchange;
mod frame;
mod http;
mod plan;
mod record;
mod run;
mod sse;

pub use frame::{Frame, Usage, classify, usage};
pub use plan::{Arrivals, Plan, Target};
pub use record::{FAILURES, Failure, Record, Shared};
pub use run::{Outcome, monotonic_s, run};
pub use sse::Splitter;
