//! Tests of the switchboard with fake engines and front ends: no sockets, no time.

#![allow(clippy::unwrap_used)]

mod random;
mod rules;
mod told;
mod world;
