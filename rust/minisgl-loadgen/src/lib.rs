//! A load generator for OpenAI-compatible servers: many streaming requests, and when each of their tokens came.
//! What the times mean belongs to `minisgl.bench`.
//!
//! Open loop (arrival times are given; latencies count from them, so a stalled server cannot hide its stall) or closed
//! loop (so many clients, each sends its next request when its last one has ended). Plain HTTP/1.1. Start with `run`.
//!
//! Invariants: a request that failed says so and why, and is never taken for a fast one; times are seconds since the
//! start; what the generator itself costs is measured and part of the outcome.

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
