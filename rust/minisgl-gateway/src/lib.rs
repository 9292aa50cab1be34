//! HTTP in front of an engine process: connections of clients, and every token of an answer. What happens once a request
//! is Python's: it says what is to be generated for a POST, or what the whole answer is, or answers it itself.
//!
//! Start with [`worker`], all steps of a request; [`http`] has connections, [`answer`] generations and the shapes of answers,
//! [`engine`] the connection to an engine process, [`questions`] what Python is asked, [`server`] what its owner sees.
//!
//! Invariants: a request is answered by exactly one of the two sides; a slow Python stops no stream; a panic in one request
//! is that request's error only.

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
