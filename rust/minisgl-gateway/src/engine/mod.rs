//! The connection to an engine process.
//!
//! Invariants: frames are left in the socket until the caller asks for them, so that the engine waits for a gateway that
//! cannot follow; nothing here waits for the engine to read.

mod link;
mod watchdog;

#[cfg(test)]
mod tests;

pub use link::{EngineLink, Frames};
pub use watchdog::{WatchTimes, Watchdog};
