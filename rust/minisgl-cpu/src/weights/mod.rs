//! Weights as the kernels want them: packed once at load into panels of 16 output rows by blocks of 32 inputs.
//!
//! Invariants: a layout is the same on every instruction set; what a stored kind loses on its way into a `Form` is
//! written at `Form` and nowhere more; a matrix is padded with zeros, so kernels know no odd sizes.

mod matrix;
#[allow(unsafe_code)]
pub mod memory;
mod pack;

pub use matrix::{BLOCK, Form, Matrix, PANEL};
pub use pack::Part;

#[cfg(test)]
mod tests;
