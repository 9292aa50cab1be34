//! Normalizers with a fast path: the Unicode normal forms change no ASCII, and checking what they might change takes a
//! sixth of the encoding time.

use std::fmt;

use serde::{Deserialize, Serialize};
use tokenizers::tokenizer::{NormalizedString, Normalizer, Result, TokenizerImpl};
use tokenizers::{DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

/// Tokenizer of the tokenizers library, with the normalizer of this module.
pub(super) type Backend =
    TokenizerImpl<ModelWrapper, Normalize, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Normalizer that skips ASCII text where the result is the same.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(transparent)]
pub(super) struct Normalize(NormalizerWrapper);

impl Normalizer for Normalize {
    fn normalize(&self, text: &mut NormalizedString) -> Result<()> {
        let keeps_ascii = matches!(
            self.0,
            NormalizerWrapper::NFC(_)
                | NormalizerWrapper::NFD(_)
                | NormalizerWrapper::NFKC(_)
                | NormalizerWrapper::NFKD(_)
        );
        if keeps_ascii && text.get().is_ascii() {
            return Ok(());
        }
        self.0.normalize(text)
    }
}

/// Error of encoding text to token ids, or of decoding ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextError {
    /// The tokenizer file cannot be read.
    Tokenizer(String),
    /// The text has more tokens than the caller accepts.
    TooMany {
        /// Token count when the limit was exceeded; exact unless `at_least`.
        count: usize,
        /// Whether encoding stopped before the end of the text, so that `count` is a lower bound.
        at_least: bool,
    },
    /// The tokenizer cannot encode the text.
    NotEncodable(String),
}

impl fmt::Display for TextError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tokenizer(text) => write!(out, "the tokenizer cannot be read: {text}"),
            Self::TooMany { count, .. } => write!(out, "at least {count} tokens"),
            Self::NotEncodable(text) => write!(out, "the tokenizer has no ids for it: {text}"),
        }
    }
}

impl std::error::Error for TextError {}
