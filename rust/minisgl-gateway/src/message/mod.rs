//! The messages of the engine process, and their bytes: docs/protocol.md.
//!
//! Invariants: a frame of another schema version, or one that does not fit the types, is a [`MessageError`], never a
//! wrong message; what this side writes is byte for byte what Python writes for the same messages.

mod codec;
mod types;

#[cfg(test)]
mod tests;

use std::fmt;

pub(crate) use codec::estimate;
pub use codec::{decode, decode_each, decode_to_engine, encode, encode_from_pool};
pub use types::{
    Embedding, EngineReady, EngineStats, FromEngine, FromPool, Heartbeat, LoadProgress, Phase, PromptLogprobs,
    SamplingParams, StepTokens, ToEngine, TokenLogprobs,
};

/// Both sides must agree on it.
pub const SCHEMA_VERSION: u16 = 10;
/// Request ids are a front end's own, from 0 to below this.
pub const ID_LIMIT: i64 = 1 << 40;
/// In front of each frame: its length, little-endian.
pub const LENGTH_BYTES: usize = 4;
/// Far above any frame: a length beyond it is none.
pub const MAX_FRAME_BYTES: usize = 1 << 30;
/// Set in the version of a frame that says when it was sent.
const STAMPED: u16 = 0x8000;

/// A frame that this version cannot read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessageError {
    /// It has another schema version.
    Version(u16),
    /// It does not fit the types.
    Malformed(String),
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(got) => {
                write!(f, "schema version {got}, this side speaks {SCHEMA_VERSION}")
            }
            Self::Malformed(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for MessageError {}

/// The length of the next frame, if its front is here. The frame follows after [`LENGTH_BYTES`].
pub fn frame_length(bytes: &[u8]) -> Result<Option<usize>, MessageError> {
    let Some(front) = bytes.first_chunk::<LENGTH_BYTES>() else {
        return Ok(None);
    };
    let length = u32::from_le_bytes(*front) as usize;
    if length > MAX_FRAME_BYTES {
        return Err(MessageError::Malformed(format!(
            "a frame of {length} bytes is too long: the limit is {MAX_FRAME_BYTES}"
        )));
    }
    Ok(Some(length))
}
