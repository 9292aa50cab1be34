//! Connection to an engine process.
//!
//! Invariants: frames stay in the socket until the caller asks for them, so that the engine waits for a gateway that is
//! too slow; nothing here waits for the engine to read.

mod link;
mod watchdog;

#[cfg(test)]
mod tests;

pub use link::{EngineLink, Frames};
pub use watchdog::{WatchTimes, Watchdog};
