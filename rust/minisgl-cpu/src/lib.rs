//! The CPU engine as pure Rust: it runs step plans of the scheduler on models from GGUF and safetensors files. What is
//! computed on numbers, and how they lie in memory, belongs to `minisgl-kernels`.
//!
//! Start with `engine`, the whole behind one call a step, then `model`, the one decoder of all architectures. `files` are
//! read, `weights` packed once, `sampling` turns logits into tokens, `threads` is the pool; `head` serves the torch engine.
//!
//! Invariants: the same input gives the same bits whatever the instruction set (but AMX, whose exact products have
//! an order of sums of their own), the number of threads and the other rows of the step; no input file and no request can crash the process.

#![deny(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod adapters;
pub mod engine;
pub mod error;
pub mod files;
mod head;
#[allow(unsafe_code)]
pub mod limits;
pub mod load;
pub mod model;
mod openmp;
mod pooling;
pub mod sampling;
pub mod states;
pub mod step;
pub mod threads;
pub mod weights;

pub use engine::Engine;
pub use error::{Error, Result};
pub use head::{Head, Team};
pub use minisgl_kernels::Isa;
pub use model::{Adapter, Pair};
pub use openmp::OpenMp;
pub use pooling::{HeadStep, Heads};
pub use step::{Embedding, PromptLogprobs, Sampled, Step, StepLogprobs};

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;
