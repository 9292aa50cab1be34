//! Parts of a model's output, and the tool schemas that type its call arguments.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

/// A part of a model's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Chunk of the content.
    Text(String),
    /// Chunk of the reasoning.
    Reasoning(String),
    /// Start of a tool call.
    CallBegun {
        /// Index of the call in the output, from 0.
        index: usize,
        /// Generated id of the call.
        id: String,
        /// Name of the called tool.
        name: String,
    },
    /// Chunk of a call's arguments: the call's index, and JSON text.
    CallArguments(usize, String),
}

/// Tools of a request: the JSON schema of each tool's parameters, by tool name.
#[derive(Debug, Default)]
pub struct Tools(pub HashMap<String, Value>);

impl Tools {
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Returns the JSON types that a tool's schema allows for a value in its arguments. `path`: the keys that lead to
    /// it, `None` for a list item.
    pub(super) fn kinds<'a>(&self, name: &str, path: impl IntoIterator<Item = Option<&'a str>>) -> Kinds {
        let mut kinds = Kinds::default();
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
            all.into_iter().for_each(|one| kinds.add(one));
        }
        kinds
    }

    /// Returns true if the tool's schema lists this argument.
    pub(super) fn names(&self, name: &str, argument: &str) -> bool {
        let properties = self.0.get(name).and_then(|root| root.get("properties"));
        properties.is_some_and(|all| all.get(argument).is_some())
    }

    /// Returns true if the tool's schema lists this argument, or lists no arguments at all.
    pub(super) fn has_argument(&self, name: &str, argument: &str) -> bool {
        let properties = self.0.get(name).and_then(|root| root.get("properties"));
        properties.is_none_or(|all| all.get(argument).is_some())
    }
}

const MAX_DEPTH: usize = 8;

/// Collects `schema` and the schemas that it references or combines (`$ref`, `anyOf` ...), up to `depth`.
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

/// Set of JSON types of a value; empty if unknown.
#[derive(Debug, Default)]
pub(super) struct Kinds(HashSet<String>);

impl Kinds {
    pub(super) fn is_text(&self) -> bool {
        self.0.len() == 1 && self.0.contains("string")
    }

    /// Returns true if the value may be a string.
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

    /// Returns true if a number must be an integer.
    pub(super) fn is_whole(&self) -> bool {
        self.0.contains("integer") && !self.0.contains("number")
    }

    /// Returns true if the value may be a number but not a string.
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
