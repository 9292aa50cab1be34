//! Messages between front ends and the engine process, and their encoding: docs/request.md#messages.
//!
//! Invariants: a frame of another schema version, or one that does not fit the types, is a [`MessageError`], never a
//! wrong message; the encoded bytes are the ones that Python writes for the same messages.

mod codec;
mod packed;
pub mod prepared;
mod types;

#[cfg(test)]
mod tests;

pub(crate) use codec::estimate;
pub use codec::{decode, decode_each, decode_prepared, decode_to_engine, encode, encode_from_engine, list_of};
pub use packed::Pairs;
pub use types::{
    Embedding, EngineReady, EngineStats, FromEngine, Heartbeat, ID_LIMIT, LENGTH_BYTES, LoadProgress, MAX_FRAME_BYTES,
    MessageError, NewRequest, Phase, PromptImage, PromptLogprobs, SCHEMA_VERSION, SamplingParams, StepTokens, ToEngine,
    TokenLogprobs, frame_length,
};
