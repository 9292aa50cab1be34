//! The parts of an answer, and the tools that its calls are of.

use std::collections::HashMap;

use serde_json::Value;

/// More of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// More of its content.
    Text(String),
    /// More of what the model thinks before it answers.
    Reasoning(String),
    /// A tool call begins.
    CallBegun {
        /// It counts the calls of the answer from 0.
        index: usize,
        /// It is new.
        id: String,
        /// Of the tool.
        name: String,
    },
    /// More of the JSON text of a call's arguments, with the call's index.
    CallArguments(usize, String),
}

/// The tools of a request: the JSON schema of each one's parameters, by its name.
#[derive(Debug, Default)]
pub struct Tools(pub HashMap<String, Value>);

impl Tools {
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}
