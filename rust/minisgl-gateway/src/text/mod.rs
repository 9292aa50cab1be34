//! Templates, encoding, decoding, stop strings.
//!
//! Invariants: the same ids and the same text as the Python server's for the same files; where that is not certain, an
//! error says so and the caller passes the request on.

use std::fmt;

mod bytes;
mod cache;
mod decode;
mod normalize;
mod pieces;
mod stop;
mod stream;
mod template;
mod tokenizer;

pub use cache::CacheStats;
pub use decode::Decoder;
pub use stream::TextStream;
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;

/// Why there is no text or there are no ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextError {
    /// The tokenizer's file cannot be read.
    Tokenizer(String),
    /// More tokens than the caller can use; a text that is not encoded to its end has more than this many.
    TooMany(usize),
    /// The tokenizer has no ids for the text.
    NotEncodable(String),
    /// The template, or what it does with these messages, is not certain to be what Python makes of it.
    Template(String),
}

impl fmt::Display for TextError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tokenizer(text) => write!(out, "the tokenizer cannot be read: {text}"),
            Self::TooMany(count) => write!(out, "at least {count} tokens"),
            Self::NotEncodable(text) => write!(out, "the tokenizer has no ids for it: {text}"),
            Self::Template(text) => write!(out, "the chat template: {text}"),
        }
    }
}

impl std::error::Error for TextError {}
