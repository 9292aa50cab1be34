//! Models that see and read: the tensors of their text half, by the names that a text model's have.
//!
//! Invariants: only tensors whose names are known to be of the other half are left out. python/minisgl/models/architectures.py
//! has the same rules.

use std::collections::BTreeMap;

use super::{Source, TensorView};

/// transformers has written the first and the third (version 4), and the second (5).
const PREFIXES: [(&str, &str); 3] = [
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.", ""),
];
const OTHER_HALF: [&str; 2] = ["vision_tower.", "multi_modal_projector."];

/// `source` as it is, unless it has two halves.
pub fn text_half_of(source: Box<dyn Source>) -> Box<dyn Source> {
    let has_two = |name: &&str| name.starts_with(PREFIXES[1].0) || name.starts_with(PREFIXES[2].0);
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

    fn names(&self) -> Vec<&str> {
        self.stored.keys().map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::own_name;

    #[test]
    fn names_of_both_versions_become_those_of_a_text_model() {
        for (stored, own) in [
            ("language_model.model.norm.weight", Some("model.norm.weight")),
            ("model.language_model.norm.weight", Some("model.norm.weight")),
            ("language_model.lm_head.weight", Some("lm_head.weight")),
            ("lm_head.weight", Some("lm_head.weight")),
            ("vision_tower.ln_pre.weight", None),
            ("model.vision_tower.ln_pre.weight", None),
            ("model.multi_modal_projector.norm.weight", None),
            ("model.audio_tower.norm.weight", Some("model.audio_tower.norm.weight")),
        ] {
            assert_eq!(own_name(stored).as_deref(), own, "{stored}");
        }
    }
}
