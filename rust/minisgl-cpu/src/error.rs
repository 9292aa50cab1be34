//! Error types of the engine, re-exported from `minisgl-kernels`.

pub use minisgl_kernels::error::{Error, Fault, Result};
