//! Tensors in mapped files: one interface (`Source`) for GGUF and safetensors.
//!
//! Invariants: shape and type of a `TensorView` are checked against its bytes, so reads stay in bounds; a damaged file
//! is an error that names the tensor or key, never a panic, and costs no memory in proportion to its claims.
//!
//! A file that is truncated while it is mapped ends the process (SIGBUS), as in every program that maps files.

pub mod cache;
pub mod gguf;
pub(crate) mod kept;
#[allow(unsafe_code)]
mod mapping;
pub mod quantize;
pub mod safetensors;
mod source;

use std::collections::BTreeMap;
use std::path::Path;

use crate::Result;

pub use mapping::Mapping;
pub use minisgl_kernels::{Kind, TensorView, blocks};
pub(crate) use source::Entry;
pub use source::Source;

/// Opens a GGUF file or a folder of safetensors. Of models with a vision or audio tower only the text part is visible.
pub fn open(path: &Path) -> Result<Box<dyn Source>> {
    let source: Box<dyn Source> = if path.is_dir() {
        Box::new(safetensors::Folder::open(path)?)
    } else {
        Box::new(gguf::File::open(path)?)
    };
    Ok(text_model_of(source))
}

/// Name prefixes of a language model within a larger one, and their replacements (1 and 3: transformers 4, 2: 5; 4:
/// Idefics 3).
const PREFIXES: [(&str, &str); 4] = [
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.", ""),
    ("model.text_model.", "model."),
];
const OTHER_TOWERS: [&str; 8] = [
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "visual.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "connector.",
];

/// Returns `source`, or for a model with a vision tower a view of its language model with that model's usual tensor
/// names. Mirrors the rules of `python/minisgl/models/architectures.py`.
fn text_model_of(source: Box<dyn Source>) -> Box<dyn Source> {
    let has_two = |name: &&str| {
        // in Qwen2-VL checkpoints of transformers 4 the vision tower has a prefix, the language model has none
        let prefixes = [
            PREFIXES[1].0,
            PREFIXES[2].0,
            PREFIXES[3].0,
            OTHER_TOWERS[2],
            OTHER_TOWERS[3],
        ];
        prefixes.iter().any(|prefix| name.starts_with(prefix))
    };
    if source.architecture().is_some() || !source.names().iter().any(has_two) {
        return source;
    }
    let stored = source
        .names()
        .into_iter()
        .filter_map(|name| Some((text_model_name(name)?, name.to_owned())))
        .collect();
    Box::new(TextModel { source, stored })
}

/// Returns the language model's name for a stored tensor, `None` if that belongs to a vision or audio tower.
fn text_model_name(name: &str) -> Option<String> {
    let inner = name.strip_prefix("model.").unwrap_or(name);
    if OTHER_TOWERS.iter().any(|part| inner.starts_with(part)) {
        return None;
    }
    for (prefix, own) in PREFIXES {
        if let Some(rest) = name.strip_prefix(prefix) {
            return Some(format!("{own}{rest}"));
        }
    }
    Some(name.to_owned())
}

struct TextModel {
    source: Box<dyn Source>,
    /// Tensor names of the language model, mapped to the names in the file.
    stored: BTreeMap<String, String>,
}

impl Source for TextModel {
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (own, stored) = self.stored.get_key_value(name)?;
        Some(self.source.tensor(stored)?.renamed(own))
    }

    fn mappings(&self) -> &[Mapping] {
        self.source.mappings()
    }

    fn names(&self) -> Vec<&str> {
        self.stored.keys().map(String::as_str).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests;
