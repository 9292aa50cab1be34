//! Tests of the gateway through its public interfaces, in one binary.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;
mod http;
mod http_cuts;
mod http_descriptors;
mod http_load;
mod http_relay;
mod http_time;
