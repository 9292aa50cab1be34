//! Arguments of a call.
//!
//! Invariants: an argument that is not asked for makes the call refused.

use std::sync::Arc;

use super::print::to_str;
use super::value::{Result, Value, refuse};

/// What is given, and not taken yet.
#[derive(Clone, Default)]
pub(super) struct Given {
    pub(super) by_place: std::collections::VecDeque<Value>,
    pub(super) by_name: Vec<(Arc<str>, Value)>,
}

impl Given {
    pub(super) fn next(&mut self) -> Option<Value> {
        self.by_place.pop_front()
    }

    pub(super) fn required(&mut self) -> Result<Value> {
        self.next().map_or_else(|| refuse("an argument is missing"), Ok)
    }

    /// A string that must be one.
    pub(super) fn text(&mut self) -> Result<Arc<str>> {
        match self.required()? {
            Value::Str(text) => Ok(text),
            other => refuse(format!("{} for a string", other.kind())),
        }
    }

    pub(super) fn named(&mut self, name: &str) -> Option<Value> {
        let at = self.by_name.iter().position(|(known, _)| **known == *name)?;
        Some(self.by_name.swap_remove(at).1)
    }

    pub(super) fn named_or_next(&mut self, name: &str) -> Option<Value> {
        self.next().or_else(|| self.named(name))
    }

    /// The same as text, whatever it is.
    pub(super) fn shown_or(&mut self, name: &str, default: &str) -> Result<String> {
        self.named_or_next(name)
            .map_or_else(|| Ok(default.to_owned()), |value| to_str(&value))
    }

    pub(super) fn end(&self) -> Result<()> {
        if self.by_place.is_empty() && self.by_name.is_empty() {
            Ok(())
        } else {
            refuse("an argument too many")
        }
    }
}
