//! Weights in the layout of the kernels: packed once at load into panels of 16 output rows by blocks of 32 inputs.
//!
//! Invariants: a layout is the same on every instruction set; packing loses nothing of a stored kind; a matrix is
//! padded with zeros, so kernels see no partial blocks or panels.

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
