//! Weights as the kernels want them: packed once at load into panels of 16 output rows by blocks of 32 inputs.
//!
//! Invariants: a layout is the same on every instruction set; a stored kind loses nothing on its way into its `Form`; a
//! matrix is padded with zeros, so kernels know no odd sizes.

mod form;
mod matrix;
#[allow(unsafe_code)]
pub mod memory;
mod pack;

pub use form::{BLOCK, Block, Form, Layout, PANEL};
pub use matrix::Matrix;
pub(crate) use matrix::plain;
pub use pack::Part;

#[cfg(test)]
pub(crate) mod tests;
