//! HTTP in front of an engine process: connections of clients, and every token of an answer. What happens once a request
//! is Python's: it says what is to be generated for a POST, or what the whole answer is, or answers it itself.
//!
//! Invariants: a request is answered by exactly one of the two sides; a slow Python stops no stream; a panic in one request
//! is that request's error only.
//!
//! - [`message`]: the messages of the engine process and of Python, and their bytes.
//! - [`engine`]: the connection to an engine process.
//! - [`http`]: connections of clients, and passing requests on.
//! - [`questions`]: what Python is asked; [`waiting`]: what waits, for Python's limits.
//! - [`answer`]: generations, and the shapes of answers; [`live`]: those in the engine; [`worker`]: all steps of a request.
//! - [`server`]: the gateway as its owner sees it, [`shared`] and [`metrics`]: what both see.

#![deny(unsafe_code)]

pub mod answer;
pub mod callers;
#[allow(missing_docs)] // of fields that Python describes
pub mod config;
pub mod engine;
pub mod http;
pub mod live;
pub mod message;
pub mod metrics;
pub mod questions;
pub mod server;
pub mod shared;
pub mod waiting;
pub mod worker;
