//! Packed weight matrices: packed at load, or mapped from the cache file of an earlier load.

mod kept;

pub use kept::{Cache, Keeping, Packer, Packing};

#[cfg(test)]
mod kept_tests;
