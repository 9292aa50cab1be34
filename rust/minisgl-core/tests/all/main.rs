//! Tests of the scheduler through its interface, in one binary.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;
mod random_events;
mod sequences;
mod warm_decode_step_allocates_nothing;
