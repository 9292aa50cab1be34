//! Weights as the kernels want them: packed once at load into panels of 16 output rows by blocks of 32 inputs.
//!
//! Invariants: a layout is the same on every instruction set; a stored kind loses nothing on its way into its `Kind`; a
//! matrix is padded with zeros, so kernels know no odd sizes.

mod kept;
mod layout;
mod matrix;
#[allow(unsafe_code)]
pub mod memory;
mod pack;

pub use kept::{Cache, Keeping, Packer, Packing};
pub use layout::{BLOCK, Block, Layout, PANEL};
pub use matrix::Matrix;
pub(crate) use matrix::plain;
pub use pack::Part;

#[cfg(test)]
mod kept_tests;
#[cfg(test)]
pub(crate) mod tests;
