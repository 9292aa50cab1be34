//! What the CPU engine computes with, as functions of numbers in memory: they know no model, no file and no thread.
//!
//! `blocks` is how files store numbers, `tensor` a view of stored ones, `panels` how products want them, `kernels` what is
//! computed on whatever instruction set there is, `lanes` the vectors that what is written once is compiled for, `kv` pages of
//! keys and values, `attention` what reads them, `memory` where all of it lies.
//!
//! Invariants: the same input gives the same bits whatever the instruction set (but AMX, whose exact products have
//! an order of sums of their own), the number of threads and the other rows of a step.

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

// By this name `panels/tests/stored.rs` is the same for who includes it.
#[cfg(test)]
extern crate self as minisgl_kernels;
#[cfg(test)]
#[allow(unsafe_code)]
mod tests;
