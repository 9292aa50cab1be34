//! Normalizers, but for texts that they leave as they are: the Unicode forms change no ASCII, and looking for what they
//! might change is a sixth of encoding it.

use std::fmt;

use serde::{Deserialize, Serialize};
use tokenizers::tokenizer::{NormalizedString, Normalizer, Result, TokenizerImpl};
use tokenizers::{DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

/// The library's tokenizer with these normalizers.
pub(super) type Backend =
    TokenizerImpl<ModelWrapper, Normalize, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// A normalizer that leaves ASCII alone where it may.
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

/// Why there is no text or there are no ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextError {
    /// The tokenizer's file cannot be read.
    Tokenizer(String),
    /// More tokens than the caller can use: as many as `count`, or more if the text was not encoded to its end.
    TooMany {
        /// At the moment when that was known.
        count: usize,
        /// The text was not encoded to its end.
        at_least: bool,
    },
    /// The tokenizer has no ids for the text.
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
