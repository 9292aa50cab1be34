//! What can go wrong, of the kernels and of the engine alike.

pub use minisgl_kernels::error::{Error, Fault, Result};
