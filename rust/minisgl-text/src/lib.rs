//! Text of requests and answers, without HTTP and without an engine: templates, encoding, decoding, stop strings.
//!
//! Invariants: the same ids and the same text as the Python server's for the same files; where that is not certain, an
//! error says so and the caller passes the request on.

#![deny(unsafe_code)]

pub mod answer;
mod bytes;
mod cache;
mod decode;
mod normalize;
mod pieces;
mod stop;
mod template;
mod tokenizer;
pub mod tools;

pub use cache::CacheStats;
pub use decode::{Decoder, TextStream};
pub use normalize::TextError;
pub use template::{ChatTemplate, ChatTemplateSource, ContentShape};
pub use tokenizer::{Tokenizer, TokenizerSource};
