//! Generations and the shapes of their responses, for chat, completions and `/generate` (as in Python's `server/`).
//!
//! - [`choice`], [`parsed`], [`generation`]: tokens from the engine, their text, and its parts.
//! - [`shape`], [`logprobs`], [`errors`], [`json`]: how responses show them.
//! - [`log`]: the access log.

pub mod choice;
pub mod errors;
pub mod generation;
pub mod json;
pub mod log;
pub mod logprobs;
pub mod parsed;
pub mod shape;
