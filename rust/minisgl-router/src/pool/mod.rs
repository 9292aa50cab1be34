//! A pool of engines: to front ends one engine process, to engine processes one front end.
//!
//! Invariants: a request is in one engine or in line, never in two; every token of it reaches its front end once, in
//! order, whichever engines made it; every request ends exactly once, but for those of a pool that has failed.
//!
//! - [`Switchboard`]: what is known, and what becomes of it. No I/O, no clock.
//! - `engine_events`: its other half; `requests`, `engines`, `steps`: its parts.
//! - `io`, `follow`: sockets and time around it.
//! - [`EnginePool`]: its thread, as its owner sees it.

mod engine_events;
mod engines;
mod follow;
mod io;
mod requests;
mod server;
mod steps;
mod switchboard;
#[cfg(test)]
mod tests;

pub use server::{EnginePool, PoolConfig};
pub use switchboard::{Out, Readings, Switchboard};
