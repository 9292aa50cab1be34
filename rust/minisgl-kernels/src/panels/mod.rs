//! Weights as the kernels want them: packed once at load into panels of 16 output rows by blocks of 32 inputs.
//!
//! Invariants: a layout is the same on every instruction set; a stored kind loses nothing on its way into its `Kind`; a
//! matrix is padded with zeros, so kernels know no odd sizes.

mod layout;
mod matrix;
mod pack;

pub use layout::PANEL;
pub(crate) use layout::{BLOCK, Block, Layout};
pub(crate) use matrix::plain;
pub use matrix::{Matrix, Panels, Shape};
pub use pack::{Part, packed, shape_of};

#[cfg(test)]
pub(crate) mod tests;
