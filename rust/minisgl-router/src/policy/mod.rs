//! Placement of requests: which engine gets a request, and when. The reference is `minisgl.routing`.
//!
//! Invariants: integers only, no clock; the same calls give the same placements.

mod config;
mod engines;
mod prefixes;
mod queue;
mod router;

pub use config::{KeyShare, Policy, RouterConfig};
pub use router::{Placed, Router};
