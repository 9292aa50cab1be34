//! CPU inference engine in pure Rust: runs step plans of the scheduler on models from GGUF and safetensors files.
//! Arithmetic and memory layouts belong to `minisgl-kernels`.
//!
//! Start with `engine`, which runs one step a call, then `model`, the decoder of all architectures. `files` reads
//! tensors, `weights` packs them, `sampling` turns logits into tokens, `threads` is the pool, `head` serves the torch
//! engine.
//!
//! Invariants: equal input gives equal bits whatever the instruction set (except AMX, whose matmuls sum in another
//! order), the number of threads and the other rows of the step; no input file and no request can crash the process.

#![deny(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod adapters;
pub mod engine;
pub mod error;
pub mod files;
mod head;
mod images;
#[allow(unsafe_code)]
pub mod limits;
pub mod load;
pub mod model;
mod mtp;
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
pub use images::{Ahead, FIRST_VIRTUAL_ID, Features, ImageCounts, PromptImage};
pub use minisgl_kernels::Isa;
pub use model::{Adapter, Pair};
pub use openmp::OpenMp;
pub use pooling::{HeadStep, Heads};
pub use step::{Embedding, PromptLogprobs, Sampled, Step, StepLogprobs};

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;
