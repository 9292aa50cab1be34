//! Several engines behind one socket. `policy` decides which engine a request goes to, and when; `pool` carries
//! messages between front ends and engines, and moves the requests of a lost engine to another one.
//!
//! HTTP and text belong to `minisgl-gateway`. Start with `policy`, whose reference is `minisgl.routing`.
//!
//! Invariants: the same events give the same placements (`policy` uses integers only); every request ends exactly once.

#![forbid(unsafe_code)]

pub mod policy;
pub mod pool;
