//! Chat templates, rendered as the Python server renders them (`tokenizer/chat_template.py`).
//!
//! minijinja parses a template; what its parser reads otherwise than jinja's is refused (`source`, `lower`). It is not
//! run by minijinja, whose values print, compare and compute otherwise than Python's in places that nobody sees
//! (`true`, tuples, dicts, mixed comparisons, names set in loops): `run` and `eval` are Python's way for what templates use, and
//! refuse the rest. So what is rendered here is what Python renders, and all other requests are left to it.
//!
//! Invariants: the text of a request is never a template's source; output and work are bounded.

mod attrs;
mod call;
mod eval;
mod filters;
mod functions;
mod ir;
mod lower;
mod lower_expr;
mod methods;
mod ops;
mod print;
mod run;
mod source;
mod symbols;
mod value;

use std::collections::BTreeMap;
use std::rc::Rc;

use serde::Deserialize;
use serde_json::{Map, Value as Json};

use self::ir::Program;
pub use self::run::MAX_STEPS;
use self::value::{Dict, Refused, Value, refuse};
use super::TextError;

/// A chat template and the shape in which it takes a message's content (`tokenizer/chat_template.py`).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChatTemplateSource {
    /// The jinja source.
    pub source: String,
    /// What it does with a message's content.
    pub content: ContentShape,
}

/// In what shape a chat template takes a message's content.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum ContentShape {
    /// One string.
    String,
    /// A list of parts.
    Parts,
    /// Both.
    Either,
}

/// One template with the special tokens it may name (`bos_token`, `eos_token`, ...).
pub struct ChatTemplate {
    program: Program,
    special_tokens: BTreeMap<String, String>,
    content: ContentShape,
}

impl ChatTemplate {
    /// Err: it is beyond what is rendered here.
    pub fn new(source: &ChatTemplateSource, special_tokens: &BTreeMap<String, String>) -> Result<Self, TextError> {
        let program = lower::program(&source.source);
        Ok(Self {
            program: program.map_err(|Refused(why)| TextError::Template(why))?,
            special_tokens: special_tokens.clone(),
            content: source.content,
        })
    }

    /// The prompt of a conversation; Err: it is not certain to be what Python renders. `variables` are further ones of
    /// the template. It takes [`MAX_STEPS`] at most, or fewer.
    pub fn render(
        &self,
        messages: &[Json],
        variables: &Map<String, Json>,
        add_generation_prompt: bool,
        most_steps: u64,
    ) -> Result<String, TextError> {
        let given = self.given(messages, variables, add_generation_prompt);
        let rendered = given.and_then(|given| run::run(&self.program, &given, most_steps));
        rendered.map_err(|Refused(why)| TextError::Template(why))
    }

    fn given(&self, messages: &[Json], variables: &Map<String, Json>, adds_prompt: bool) -> value::Result<Dict> {
        if messages.is_empty() {
            return refuse("no messages");
        }
        let mut given = Dict::new();
        for (name, text) in &self.special_tokens {
            given.insert(name.as_str().into(), Value::str(text));
        }
        for (name, value) in variables {
            if matches!(
                name.as_str(),
                "messages" | "add_generation_prompt" | "continue_final_message"
            ) {
                return refuse(format!("the variable {name}"));
            }
            given.insert(name.as_str().into(), Value::of_json(value)?);
        }
        let shaped = messages
            .iter()
            .map(|message| shaped(message, self.content))
            .collect::<value::Result<_>>()?;
        let tools = match variables.get("tools") {
            None | Some(Json::Null) => Value::None,
            Some(Json::Array(tools)) if tools.is_empty() => Value::None,
            Some(Json::Array(_)) => given.get("tools").cloned().unwrap_or(Value::None),
            Some(_) => return refuse("tools that are no list"),
        };
        given.insert("messages".into(), Value::list(shaped));
        given.insert("tools".into(), tools);
        given.insert("documents".into(), Value::None);
        given.insert("add_generation_prompt".into(), Value::Bool(adds_prompt));
        Ok(given)
    }
}

/// A message as the template takes it: keys with the value None count as missing, arguments of calls are parsed.
fn shaped(message: &Json, content: ContentShape) -> value::Result<Value> {
    let Json::Object(message) = message else {
        return refuse("a message that is no object");
    };
    let mut shaped = Dict::new();
    for (key, value) in message.iter().filter(|(_, value)| !value.is_null()) {
        let new = match (key.as_str(), value, content) {
            ("content", Json::Array(parts), ContentShape::String) => Value::str(&joined(parts)?),
            ("content", Json::String(text), ContentShape::Parts) => {
                let part = [("type".into(), Value::str("text")), ("text".into(), Value::str(text))];
                Value::list(vec![Value::Dict(Rc::new(part.into_iter().collect()))])
            }
            ("tool_calls", Json::Array(calls), _) => {
                Value::list(calls.iter().map(with_parsed_arguments).collect::<value::Result<_>>()?)
            }
            ("tool_calls", _, _) => return refuse("calls that are no list"),
            _ => Value::of_json(value)?,
        };
        shaped.insert(key.as_str().into(), new);
    }
    Ok(Value::Dict(Rc::new(shaped)))
}

fn joined(parts: &[Json]) -> value::Result<String> {
    let texts: Option<Vec<_>> = parts
        .iter()
        .map(|part| part.as_object()?.get("text")?.as_str())
        .collect();
    match texts {
        Some(texts) => Ok(texts.join("\n")),
        None => refuse("a part without text"),
    }
}

/// `OpenAI` carries arguments as a JSON string, templates expect the object.
fn with_parsed_arguments(call: &Json) -> value::Result<Value> {
    let function = call.as_object().and_then(|call| call.get("function")?.as_object());
    let Some(arguments) = function.and_then(|function| function.get("arguments")?.as_str()) else {
        return Value::of_json(call);
    };
    let parsed = match serde_json::from_str::<Json>(arguments) {
        Ok(parsed) => parsed,
        Err(_) if is_no_json(arguments) => return Value::of_json(call),
        Err(_) => return refuse("arguments that only one of two parsers may take"),
    };
    let mut call = call.clone();
    call["function"]["arguments"] = parsed;
    Value::of_json(&call)
}

/// Whether no parser takes it: Python's knows `NaN`, `Infinity` and lone surrogates too.
fn is_no_json(text: &str) -> bool {
    let text = text.trim_start_matches([' ', '\t', '\n', '\r']);
    !text.starts_with(|char: char| char.is_ascii_digit() || "{[\"-tfnNI".contains(char))
}
