//! Tensors in files: GGUF and safetensors by mmap, one way to ask for both.
//!
//! Invariants: what a `TensorView` says about itself is checked against its bytes, so reading rows of it cannot go
//! beyond them; a file that is damaged is an error that names the tensor or key, never a panic, and costs no memory
//! in proportion to what it claims.
//!
//! A mapped file that somebody shortens while it is mapped ends the process (SIGBUS), as in every program that maps.

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

/// A GGUF file, or a folder of safetensors; of models with two halves the text half.
pub fn open(path: &Path) -> Result<Box<dyn Source>> {
    let source: Box<dyn Source> = if path.is_dir() {
        Box::new(safetensors::Folder::open(path)?)
    } else {
        Box::new(gguf::File::open(path)?)
    };
    Ok(text_half_of(source))
}

/// transformers has written the first and the third (version 4), and the second (5).
const PREFIXES: [(&str, &str); 3] = [
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.", ""),
];
const OTHER_HALF: [&str; 7] = [
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "visual.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
];

/// `source` as it is, unless it has a vision tower: then the tensors of its text model, by the names that a text model's
/// have. `python/minisgl/models/architectures.py` has the same rules.
fn text_half_of(source: Box<dyn Source>) -> Box<dyn Source> {
    let has_two = |name: &&str| {
        // what sees is called so beside a text half whose names have no prefix (Qwen2-VL of transformers 4)
        let prefixes = [PREFIXES[1].0, PREFIXES[2].0, OTHER_HALF[2], OTHER_HALF[3]];
        prefixes.iter().any(|prefix| name.starts_with(prefix))
    };
    if source.architecture().is_some() || !source.names().iter().any(has_two) {
        return source;
    }
    let stored = source
        .names()
        .into_iter()
        .filter_map(|name| Some((own_name(name)?, name.to_owned())))
        .collect();
    Box::new(TextHalf { source, stored })
}

/// None: of the other half.
fn own_name(name: &str) -> Option<String> {
    let inner = name.strip_prefix("model.").unwrap_or(name);
    if OTHER_HALF.iter().any(|part| inner.starts_with(part)) {
        return None;
    }
    for (prefix, own) in PREFIXES {
        if let Some(rest) = name.strip_prefix(prefix) {
            return Some(format!("{own}{rest}"));
        }
    }
    Some(name.to_owned())
}

struct TextHalf {
    source: Box<dyn Source>,
    /// Own name -> the name in the file.
    stored: BTreeMap<String, String>,
}

impl Source for TextHalf {
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
