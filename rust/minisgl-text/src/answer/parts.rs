//! The parts of an answer, and the tools that its calls are of.

use std::collections::{HashMap, HashSet};

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
        /// The tool has it.
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

    /// What an argument of a tool may be, as its schema says.
    pub(super) fn kinds(&self, name: &str, argument: &str) -> Kinds {
        let mut found = Kinds::default();
        if let Some(root) = self.0.get(name) {
            found.add(root, root.get("properties").and_then(|all| all.get(argument)), 8);
        }
        found
    }
}

/// JSON's types of a value; none: nothing is known.
#[derive(Debug, Default)]
pub(super) struct Kinds(HashSet<String>);

impl Kinds {
    pub(super) fn is_text(&self) -> bool {
        self.0.len() == 1 && self.0.contains("string")
    }

    pub(super) fn allow(&self, value: &Value) -> bool {
        let kinds: &[&str] = match value {
            Value::Null => &["null"],
            Value::Bool(_) => &["boolean"],
            Value::Number(_) => &["number", "integer"],
            Value::String(_) => &["string"],
            Value::Array(_) => &["array"],
            Value::Object(_) => &["object"],
        };
        self.0.is_empty() || kinds.iter().any(|kind| self.0.contains(*kind))
    }

    fn add(&mut self, root: &Value, schema: Option<&Value>, depth: usize) {
        let (Some(schema), Some(depth)) = (schema, depth.checked_sub(1)) else {
            return;
        };
        match schema.get("type") {
            Some(Value::String(one)) => self.0.extend([one.clone()]),
            Some(Value::Array(some)) => self.0.extend(some.iter().filter_map(Value::as_str).map(str::to_owned)),
            _ => {}
        }
        for options in ["anyOf", "oneOf", "allOf"] {
            for one in schema.get(options).and_then(Value::as_array).into_iter().flatten() {
                self.add(root, Some(one), depth);
            }
        }
        let named = schema
            .get("$ref")
            .and_then(Value::as_str)
            .and_then(|path| path.strip_prefix('#'));
        self.add(root, named.and_then(|path| root.pointer(path)), depth);
        let values = schema.get("enum").and_then(Value::as_array);
        let values = values.into_iter().flatten().chain(schema.get("const"));
        if schema.get("type").is_none() && values.clone().next().is_some() && values.clone().all(Value::is_string) {
            self.0.insert("string".to_owned());
        }
    }
}
