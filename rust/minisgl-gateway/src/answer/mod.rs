//! Bodies, generations, and the shapes of answers: what the Python server's `server/` does, for the requests that the
//! gateway is sure of.
//!
//! - [`fields`], [`plan`]: from the bytes of a body to what is to be generated.
//! - [`choice`], [`parsed`], [`generation`]: what came from the engine, its text, and the parts of that.
//! - [`shape`], [`logprobs`], [`errors`]: how that is shown.
//! - [`log`]: the access log.

pub mod choice;
pub mod embedding;
pub mod errors;
#[allow(missing_docs)] // the names of fields are OpenAI's
pub mod fields;
pub mod generation;
pub mod json;
pub mod log;
pub mod logprobs;
pub mod message_shape;
pub mod messages;
pub mod parsed;
pub mod plan;
pub mod response_shape;
pub mod responses;
pub mod sections;
pub mod shape;
