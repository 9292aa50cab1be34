//! Generations, and the shapes of their answers: what the Python server's `server/` does, for chat, completions and
//! `/generate`.
//!
//! - [`choice`], [`parsed`], [`generation`]: what came from the engine, its text, and the parts of that.
//! - [`shape`], [`logprobs`], [`errors`], [`json`]: how that is shown.
//! - [`log`]: the access log.

pub mod choice;
pub mod errors;
pub mod generation;
pub mod json;
pub mod log;
pub mod logprobs;
pub mod parsed;
pub mod shape;
