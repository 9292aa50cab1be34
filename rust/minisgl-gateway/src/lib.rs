//! HTTP server in front of an engine process: client connections, and the streams of generated tokens. Python handles
//! each request once: for a POST it returns what to generate, or the whole response, or it serves the request through
//! the proxy.
//!
//! Start with [`worker`], all steps of a request; [`http`] has connections, [`answer`] the shapes of responses,
//! [`engine`] the connection to an engine process, [`questions`] the requests to Python, [`server`] the interface for
//! the owner.
//!
//! Invariants: each request is answered by exactly one of the two servers; a slow Python stops no stream; a panic in
//! one request is an error of that request only.

#![deny(unsafe_code)]

pub mod answer;
pub mod callers;
#[allow(missing_docs)] // `server/gateway_config.py` describes the fields
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
