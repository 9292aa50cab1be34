//! Text of requests and answers, without HTTP and without an engine: templates, encoding, decoding, stop strings.
//!
//! Invariants: the same ids and the same text as transformers' for the same files. Where it is not certain that a chat
//! template means here what it means in Python, an error says so and the caller passes the request on.

#![deny(unsafe_code)]

pub mod answer;
mod bound;
mod bytes;
mod cache;
mod decode;
mod normalize;
mod pieces;
mod stop;
mod template;
mod tokenizer;
pub mod tools;

/// A system text without the lines at its beginning that agents write for a provider's accounts. They say nothing to a
/// model, and change with every request: no prefix of the conversation would be found in a cache.
pub fn without_billing_header(mut system: &str) -> &str {
    const HEADER: &str = "x-anthropic-billing-header:";
    while system
        .get(..HEADER.len())
        .is_some_and(|begin| begin.eq_ignore_ascii_case(HEADER))
    {
        system = system.split_once('\n').map_or("", |(_, rest)| rest);
    }
    system
}

/// What Python calls white space.
pub fn is_space(char: char) -> bool {
    char.is_whitespace() || matches!(char, '\u{1c}'..='\u{1f}')
}

pub use bytes::{byte_token, char_to_byte, flat_steps, type_of};
pub use cache::{CacheStats, Recent};
pub use decode::{Decoder, TextStream};
pub use normalize::TextError;
pub use template::{ChatTemplate, ChatTemplateSource, ContentShape, MAX_STEPS};
pub use tokenizer::{Tokenizer, TokenizerSource};
