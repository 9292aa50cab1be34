//! Text processing of requests and outputs, without HTTP and without an engine: encoding, decoding, stop strings,
//! parsing of outputs. Chat templates are rendered in Python (`minisgl.tokenizer`). Start with `tokenizer`, then
//! `decode` and `answer`.
//!
//! Invariants: the same ids and the same text as transformers gives for the same files.

#![deny(unsafe_code)]

pub mod answer;
mod bound;
mod bytes;
mod cache;
mod decode;
mod guarded;
mod normalize;
mod pieces;
mod space;
mod stop;
mod tokenizer;
pub mod tools;

pub use bytes::{byte_token, char_to_byte, flat_steps, type_of};
pub use cache::{CacheStats, Recent};
pub use decode::{Decoder, TextStream};
pub use normalize::TextError;
pub use space::is_space;
pub use tokenizer::{Tokenizer, TokenizerSource};
