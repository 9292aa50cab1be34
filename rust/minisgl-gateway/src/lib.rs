//! HTTP in front of an engine process. A request that the gateway is sure of it answers by itself;
//! every other request, every error and every rare route goes on, unchanged, to the Python server.
//!
//! Invariants: what it answers is what the Python server would have answered; a request is answered by exactly one of
//! the two; a panic in one request is that request's error only.
//!
//! - [`message`]: the messages of the engine process, and their bytes.
//! - [`engine`]: the connection to an engine process.
//! - [`http`]: connections of clients, and passing requests on.
//! - [`answer`]: bodies, generations, and the shapes of answers.
//! - [`callers`], [`prepare`], [`forms`], [`receipts`], [`python`], [`pool`], [`live`], [`lengths`], [`keys`]: the steps of a request; [`worker`]: all of them.
//! - [`server`]: the gateway as its owner sees it, [`shared`] and [`metrics`]: what both see.

#![deny(unsafe_code)]

pub mod answer;
pub mod callers;
#[allow(missing_docs)] // of fields that Python describes
pub mod config;
pub mod engine;
pub mod forms;
pub mod http;
pub mod keys;
pub mod lengths;
pub mod live;
pub mod message;
pub mod metrics;
pub mod pool;
pub mod prepare;
pub mod python;
pub mod receipts;
pub mod server;
pub mod shared;
pub mod worker;
