//! Normalizers, but for texts that they leave as they are: the Unicode forms change no ASCII, and looking for what they
//! might change is a sixth of encoding it.

use serde::{Deserialize, Serialize};
use tokenizers::tokenizer::{NormalizedString, Normalizer, Result, TokenizerImpl};
use tokenizers::{DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

/// The library's tokenizer with these normalizers.
pub(super) type Backend =
    TokenizerImpl<ModelWrapper, Normalize, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// See the module.
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
