//! Kernels of the CPU engine, as functions of arrays in memory. Models, files and threads belong to `minisgl-cpu`; this
//! crate depends on nothing, so that cargo begins with it.
//!
//! Start with `blocks`, the storage formats of files, and `panels`, the layout that matmuls read; then `kernels`, the
//! computations on each instruction set, `kv` and `attention`. `lanes` are the vectors of generic code.
//!
//! Invariants: the same input gives the same bits whatever the instruction set (except AMX, whose exact matmuls have an
//! order of sums of their own), the number of threads and the other rows of a step.

#![deny(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

#[allow(unsafe_code)]
pub mod attention;
pub mod blocks;
pub mod error;
#[allow(unsafe_code)]
mod kernels;
#[allow(unsafe_code)]
pub mod kv;
#[allow(unsafe_code)]
mod lanes;
#[allow(unsafe_code)]
pub mod memory;
pub mod panels;
mod tensor;

pub use blocks::Kind;
pub use error::{Error, Result};
pub use kernels::scalar::exp;
pub use kernels::{Acts, ActsPtr, Isa, Kernels, Mode, convolution, delta_rule, mamba, plain, softmax};
pub use tensor::TensorView;

// Alias under which `panels/tests/stored.rs` compiles in every crate that includes it.
#[cfg(test)]
extern crate self as minisgl_kernels;
#[cfg(test)]
#[allow(unsafe_code)]
mod tests;
