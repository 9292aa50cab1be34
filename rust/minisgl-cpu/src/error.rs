//! Errors of the engine, which are those of its kernels.

pub use minisgl_kernels::error::{Error, Fault, Result};
