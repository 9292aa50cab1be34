//! A pool of engines. Front ends see it as one engine process; engine processes see it as one front end.
//!
//! Invariants: a request is in one engine or queued, never in two engines; each of its tokens reaches its front end
//! once, in order, whichever engine computed it; every request ends exactly once, except in a pool that has failed.
//!
//! - [`Switchboard`]: state of the pool and handling of events. No I/O, no clock.
//! - `engine_events`: the handling of engines' events; `requests`, `engines`, `steps`: parts of the state.
//! - `io`, `follow`: sockets and timers around it.
//! - [`EnginePool`]: the thread of a pool, as its owner sees it.

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
