//! Tests of the switchboard with fake engines and front ends: no sockets, no time.

#![allow(clippy::unwrap_used)]

mod broadcast;
mod random;
mod rules;
mod world;
