//! Matrices of a model: packed into panels at load, or taken from the file that an earlier load has kept.

mod kept;

pub use kept::{Cache, Keeping, Packer, Packing};

#[cfg(test)]
mod kept_tests;
