//! The switchboard with engines and front ends that are a few lines each: no sockets, no time.

#![allow(clippy::unwrap_used)]

mod random;
mod rules;
mod told;
mod world;
