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

    /// What a value within the arguments of a tool may be, as its schema says; `path`: the keys that lead to it, None for
    /// an item of a list.
    pub(super) fn kinds<'a>(&self, name: &str, path: impl IntoIterator<Item = Option<&'a str>>) -> Kinds {
        let mut found = Kinds::default();
        if let Some(root) = self.0.get(name) {
            let mut schemas = vec![root];
            for key in path {
                let mut all = Vec::new();
                schemas
                    .into_iter()
                    .for_each(|one| alternatives(root, one, MAX_DEPTH, &mut all));
                schemas = all.into_iter().filter_map(|one| child(one, key)).collect();
            }
            let mut all = Vec::new();
            schemas
                .into_iter()
                .for_each(|one| alternatives(root, one, MAX_DEPTH, &mut all));
            all.into_iter().for_each(|one| found.add(one));
        }
        found
    }

    /// Whether the schema of a tool names this argument.
    pub(super) fn names(&self, name: &str, argument: &str) -> bool {
        let properties = self.0.get(name).and_then(|root| root.get("properties"));
        properties.is_some_and(|all| all.get(argument).is_some())
    }

    /// Whether a tool may have an argument of this name.
    pub(super) fn has_argument(&self, name: &str, argument: &str) -> bool {
        let properties = self.0.get(name).and_then(|root| root.get("properties"));
        properties.is_none_or(|all| all.get(argument).is_some())
    }
}

const MAX_DEPTH: usize = 8;

/// A schema with those that it refers to or is made of.
fn alternatives<'a>(root: &'a Value, schema: &'a Value, depth: usize, found: &mut Vec<&'a Value>) {
    let Some(depth) = depth
        .checked_sub(1)
        .filter(|_| !found.iter().any(|one| std::ptr::eq(*one, schema)))
    else {
        return;
    };
    found.push(schema);
    for options in ["anyOf", "oneOf", "allOf"] {
        for one in schema.get(options).and_then(Value::as_array).into_iter().flatten() {
            alternatives(root, one, depth, found);
        }
    }
    let named = schema.get("$ref").and_then(Value::as_str);
    if let Some(one) = named.and_then(|path| root.pointer(path.strip_prefix('#')?)) {
        alternatives(root, one, depth, found);
    }
}

fn child<'a>(schema: &'a Value, key: Option<&str>) -> Option<&'a Value> {
    let Some(key) = key else { return schema.get("items") };
    let property = schema.get("properties").and_then(|all| all.get(key));
    property.or_else(|| schema.get("additionalProperties"))
}

/// JSON's types of a value; none: nothing is known.
#[derive(Debug, Default)]
pub(super) struct Kinds(HashSet<String>);

impl Kinds {
    pub(super) fn is_text(&self) -> bool {
        self.0.len() == 1 && self.0.contains("string")
    }

    /// It may be a text.
    pub(super) fn has_text(&self) -> bool {
        self.0.contains("string")
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

    /// A number must have no fraction.
    pub(super) fn is_whole(&self) -> bool {
        self.0.contains("integer") && !self.0.contains("number")
    }

    /// It may be a number, and no text.
    pub(super) fn is_number(&self) -> bool {
        (self.0.contains("integer") || self.0.contains("number")) && !self.has_text()
    }

    fn add(&mut self, schema: &Value) {
        if schema.get("nullable") == Some(&Value::Bool(true)) {
            self.0.insert("null".to_owned());
        }
        match schema.get("type") {
            Some(Value::String(one)) => self.0.extend([one.clone()]),
            Some(Value::Array(some)) => self.0.extend(some.iter().filter_map(Value::as_str).map(str::to_owned)),
            _ => {}
        }
        let values = schema.get("enum").and_then(Value::as_array);
        let values = values.into_iter().flatten().chain(schema.get("const"));
        if schema.get("type").is_none() && values.clone().next().is_some() && values.clone().all(Value::is_string) {
            self.0.insert("string".to_owned());
        }
    }
}
