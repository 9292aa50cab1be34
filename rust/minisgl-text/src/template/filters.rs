//! Jinja's filters and tests.
//!
//! Invariants: a filter whose result can be gone through once gives a generator.

use std::rc::Rc;
use std::sync::Arc;

use super::attrs;
use super::call::Given;
use super::ir::{Filter, Test};
use super::methods::{lines, pair, replaced, stripped, with_case};
use super::ops::{checked_len, compare};
use super::print::{Json, push_str, to_str};
use super::value::{Result, SeqKind, Value, refuse};

/// `value | filter(given)`.
pub(super) fn filter(filter: Filter, value: &Value, mut given: Given) -> Result<Value> {
    let found = match filter {
        Filter::Capitalize => Value::Str(with_case(&to_str(value)?, "capitalize")?.into()),
        Filter::Lower => Value::Str(with_case(&to_str(value)?, "lower")?.into()),
        Filter::Upper => Value::Str(with_case(&to_str(value)?, "upper")?.into()),
        Filter::Trim => Value::str(stripped(&to_str(value)?, "strip", given.named_or_next("chars"))?),
        Filter::Safe | Filter::String => Value::Str(to_str(value)?.into()),
        Filter::Default => default(value, &mut given),
        Filter::DictSort => sorted(value)?,
        Filter::First => value.items()?.first().cloned().unwrap_or(Value::Undefined),
        Filter::Last => last(value)?,
        Filter::Length => Value::size(value.len()?),
        Filter::List => Value::Seq(SeqKind::List, value.items()?),
        Filter::Int => int(value, &mut given)?,
        Filter::Float => float(value)?,
        Filter::Indent => match value {
            Value::Str(text) => indented(text, &mut given)?,
            other => return refuse(format!("{} is indented", other.kind())),
        },
        Filter::Items => items(value)?,
        Filter::Join => join(value, &mut given)?,
        Filter::Replace => {
            let (old, new) = (to_str(&given.required()?)?, to_str(&given.required()?)?);
            let count = given.named_or_next("count");
            replaced(&to_str(value)?, &old, &new, count.as_ref())?
        }
        Filter::Reverse => match value {
            Value::Str(text) => Value::Str(text.chars().rev().collect::<String>().into()),
            Value::Seq(SeqKind::List | SeqKind::Tuple, items) => {
                Value::generator(items.iter().rev().cloned().collect())
            }
            other => return refuse(format!("the reverse of {}", other.kind())),
        },
        Filter::ToJson => to_json(value, &mut given)?,
        Filter::Map => map(value, &mut given)?,
        Filter::Select => select(value, &mut given, false, true)?,
        Filter::Reject => select(value, &mut given, false, false)?,
        Filter::SelectAttr => select(value, &mut given, true, true)?,
        Filter::RejectAttr => select(value, &mut given, true, false)?,
    };
    given.end()?;
    Ok(found)
}

fn default(value: &Value, given: &mut Given) -> Value {
    let other = given.named_or_next("default_value").unwrap_or_else(|| Value::str(""));
    let of_false = given.named_or_next("boolean").is_some_and(|value| value.is_true());
    if value.is_undefined() || (of_false && !value.is_true()) {
        other
    } else {
        value.clone()
    }
}

fn last(value: &Value) -> Result<Value> {
    match value {
        Value::Str(_) | Value::Seq(SeqKind::List | SeqKind::Tuple, _) => {
            Ok(value.items()?.last().cloned().unwrap_or(Value::Undefined))
        }
        other => refuse(format!("the last of {}", other.kind())),
    }
}

/// By key, letters of both cases alike.
fn sorted(value: &Value) -> Result<Value> {
    let Value::Dict(dict) = value else {
        return refuse(format!("{} is sorted", value.kind()));
    };
    let mut entries: Vec<_> = Vec::new();
    for (key, value) in dict.iter() {
        entries.push((with_case(key, "lower")?, pair(key, value)));
    }
    entries.sort_by(|one, other| one.0.cmp(&other.0));
    Ok(Value::list(entries.into_iter().map(|(_, pair)| pair).collect()))
}

fn int(value: &Value, given: &mut Given) -> Result<Value> {
    let default = given.named_or_next("default").unwrap_or(Value::Int(0));
    match value {
        Value::Bool(value) => Ok(Value::Int(i128::from(*value))),
        Value::Int(_) => Ok(value.clone()),
        Value::None => Ok(default),
        Value::Str(text) if !text.is_empty() && text.len() < 19 && text.bytes().all(|byte| byte.is_ascii_digit()) => {
            text.parse()
                .map(Value::Int)
                .or_else(|_| refuse("a string as an integer"))
        }
        other => refuse(format!("{} as an integer", other.kind())),
    }
}

fn float(value: &Value) -> Result<Value> {
    match value {
        Value::Float(_) => Ok(value.clone()),
        other => refuse(format!("{} as a float", other.kind())),
    }
}

fn items(value: &Value) -> Result<Value> {
    match value {
        Value::Undefined => Ok(Value::generator(Vec::new())),
        Value::Dict(dict) => Ok(Value::generator(
            dict.iter().map(|(key, value)| pair(key, value)).collect(),
        )),
        other => refuse(format!("the items of {}", other.kind())),
    }
}

fn join(value: &Value, given: &mut Given) -> Result<Value> {
    let separator = given.shown_or("d", "")?;
    let attribute = given.named_or_next("attribute");
    let mut out = String::new();
    for (at, item) in value.items()?.iter().enumerate() {
        if at > 0 {
            out.push_str(&separator);
        }
        match &attribute {
            None | Some(Value::None) => push_str(item, &mut out)?,
            Some(Value::Str(path)) => push_str(&by_path(item, path)?, &mut out)?,
            Some(other) => return refuse(format!("an attribute that is {}", other.kind())),
        }
        checked_len(out.len())?;
    }
    Ok(Value::Str(out.into()))
}

/// `a.b.0` of a value: jinja takes items before attributes here.
fn by_path(value: &Value, path: &str) -> Result<Value> {
    let mut found = value.clone();
    for part in path.split('.') {
        let key = match part.parse() {
            Ok(at) if part.bytes().all(|byte| byte.is_ascii_digit()) => Value::Int(at),
            _ => Value::str(part),
        };
        found = attrs::item(&found, &key)?;
    }
    Ok(found)
}

fn indented(text: &str, given: &mut Given) -> Result<Value> {
    let indent = indent_of(&given.named_or_next("width").unwrap_or(Value::Int(4)))?;
    let first = given.named_or_next("first").is_some_and(|value| value.is_true());
    let blank = given.named_or_next("blank").is_some_and(|value| value.is_true());
    let text = format!("{text}\n");
    let all = lines(&text);
    checked_len(text.len().saturating_add(all.len().saturating_mul(indent.len())))?;
    let mut out = String::new();
    for (at, line) in all.into_iter().enumerate() {
        if at > 0 {
            out.push('\n');
        }
        if (at == 0 && first) || (at > 0 && (blank || !line.is_empty())) {
            out.push_str(&indent);
        }
        out.push_str(line);
    }
    Ok(Value::Str(out.into()))
}

/// So many spaces, or a text.
fn indent_of(given: &Value) -> Result<String> {
    match given {
        Value::Int(width) => {
            let width = usize::try_from((*width).max(0)).unwrap_or(usize::MAX);
            checked_len(width)?;
            Ok(" ".repeat(width))
        }
        Value::Str(indent) => Ok(indent.to_string()),
        other => refuse(format!("an indent of {}", other.kind())),
    }
}

fn to_json(value: &Value, given: &mut Given) -> Result<Value> {
    let ensure_ascii = given.named_or_next("ensure_ascii").is_some_and(|value| value.is_true());
    let indent = match given.named_or_next("indent") {
        None | Some(Value::None) => None,
        Some(given) => Some(indent_of(&given)?),
    };
    let (item_separator, key_separator) = match given.named_or_next("separators") {
        None | Some(Value::None) => ((if indent.is_some() { "," } else { ", " }).into(), ": ".into()),
        Some(Value::Seq(SeqKind::List | SeqKind::Tuple, both)) => match both.as_slice() {
            [Value::Str(item), Value::Str(key)] => (item.to_string(), key.to_string()),
            _ => return refuse("unusual separators"),
        },
        Some(_) => return refuse("unusual separators"),
    };
    let sort_keys = given.named_or_next("sort_keys").is_some_and(|value| value.is_true());
    let mut out = String::new();
    Json {
        ensure_ascii,
        indent,
        item_separator,
        key_separator,
        sort_keys,
    }
    .push(value, 0, &mut out)?;
    checked_len(out.len())?;
    Ok(Value::Str(out.into()))
}

fn map(value: &Value, given: &mut Given) -> Result<Value> {
    let items = value.items()?;
    let mut found = Vec::with_capacity(items.len());
    if let Some(attribute) = given.named("attribute") {
        let default = given.named("default");
        let Value::Str(path) = attribute else {
            return refuse("an attribute that is no string");
        };
        for item in items.iter() {
            let one = by_path(item, &path)?;
            found.push(match &default {
                Some(default) if one.is_undefined() => default.clone(),
                _ => one.nameable()?,
            });
        }
        return Ok(Value::generator(found));
    }
    let name = given.text()?;
    let Some(inner) = Filter::of(&name) else {
        return refuse(format!("the filter {name}"));
    };
    let args = std::mem::take(given);
    for item in items.iter() {
        found.push(filter(inner, item, args.clone())?.nameable()?);
    }
    Ok(Value::generator(found))
}

/// Those that pass a test, or do not; of attributes, if so.
fn select(value: &Value, given: &mut Given, by_attribute: bool, wanted: bool) -> Result<Value> {
    let items = value.items()?;
    let path = if by_attribute { Some(given.text()?) } else { None };
    let name: Option<Arc<str>> = if given.by_place.is_empty() {
        None
    } else {
        Some(given.text()?)
    };
    let args = std::mem::take(given);
    let mut found = Vec::new();
    for item in items.iter() {
        let asked = match &path {
            Some(path) => by_path(item, path)?,
            None => item.clone(),
        };
        let passes = match &name {
            None => asked.is_true(),
            Some(name) => {
                let Some(one) = Test::of(name) else {
                    return refuse(format!("the test {name}"));
                };
                test(one, &asked, args.clone())?
            }
        };
        if passes == wanted {
            found.push(item.clone());
        }
    }
    if name.is_none() {
        args.end()?;
    }
    Ok(Value::Seq(SeqKind::Generator, Rc::new(found)))
}

/// `value is test(given)`.
pub(super) fn test(test: Test, value: &Value, mut given: Given) -> Result<bool> {
    let found = match test {
        Test::Boolean => matches!(value, Value::Bool(_)),
        Test::Compare(op) => compare(op, value, &given.required()?)?,
        Test::Defined => !value.is_undefined(),
        Test::Undefined => value.is_undefined(),
        Test::True => matches!(value, Value::Bool(true)),
        Test::False => matches!(value, Value::Bool(false)),
        Test::None => matches!(value, Value::None),
        Test::Float => matches!(value, Value::Float(_)),
        Test::Integer => matches!(value, Value::Int(_)),
        Test::Number => matches!(value, Value::Bool(_) | Value::Int(_) | Value::Float(_)),
        Test::String => matches!(value, Value::Str(_)),
        Test::Mapping => matches!(value, Value::Dict(_)),
        Test::Iterable => match value {
            Value::Undefined | Value::Str(_) | Value::Seq(..) | Value::Dict(_) => true,
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => false,
            other => return refuse(format!("whether {} is iterable", other.kind())),
        },
        Test::Sequence => match value {
            Value::Str(_) | Value::Seq(SeqKind::List | SeqKind::Tuple, _) | Value::Dict(_) => true,
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => false,
            other => return refuse(format!("whether {} is a sequence", other.kind())),
        },
        Test::Even => remainder(value, &Value::Int(2))? == 0,
        Test::Odd => remainder(value, &Value::Int(2))? == 1,
        Test::DivisibleBy => remainder(value, &given.required()?)? == 0,
    };
    given.end()?;
    Ok(found)
}

fn remainder(value: &Value, by: &Value) -> Result<i128> {
    match (value, by) {
        (Value::Int(value), Value::Int(by)) if *by > 0 => Ok(value.rem_euclid(*by)),
        _ => refuse("a remainder of what is no positive integer"),
    }
}
