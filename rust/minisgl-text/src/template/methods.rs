//! Methods of strings and dicts.
//!
//! Invariants: a letter beyond ASCII changes its case by Python's tables only, so that is refused.

use std::sync::Arc;

use super::call::Given;
use super::ops::checked_len;
use super::value::{Dict, Result, SeqKind, Value, refuse};
use crate::is_space;

/// What a text is split into at most; where they are not counted first, its bytes.
const MAX_PARTS: usize = 1 << 20;

/// `value.name(given)`.
pub(super) fn call(value: &Value, name: &str, mut given: Given) -> Result<Value> {
    let found = match value {
        Value::Str(text) => of_str(text, name, &mut given),
        Value::Dict(dict) => of_dict(dict, name, &mut given),
        other => refuse(format!("the method {name} of {}", other.kind())),
    }?;
    given.end()?;
    Ok(found)
}

fn of_dict(dict: &Dict, name: &str, given: &mut Given) -> Result<Value> {
    let view = |items: Vec<Value>| Value::Seq(SeqKind::View, items.into());
    Ok(match name {
        "get" => {
            let key = given.required()?;
            let default = given.next().unwrap_or(Value::None);
            match key {
                Value::Str(key) => dict.get(&key).cloned().unwrap_or(default),
                Value::None | Value::Int(_) | Value::Undefined => default,
                other => return refuse(format!("a key that is {}", other.kind())),
            }
        }
        "items" => view(dict.iter().map(|(key, value)| pair(key, value)).collect()),
        "keys" => view(dict.keys().cloned().map(Value::Str).collect()),
        "values" => view(dict.values().cloned().collect()),
        _ => return refuse(format!("the method {name} of a dict")),
    })
}

pub(super) fn pair(key: &Arc<str>, value: &Value) -> Value {
    Value::tuple(vec![Value::Str(Arc::clone(key)), value.clone()])
}

fn of_str(text: &str, name: &str, given: &mut Given) -> Result<Value> {
    Ok(match name {
        "strip" | "lstrip" | "rstrip" => Value::str(stripped(text, name, given.next())?),
        "split" => return split(text, given),
        "splitlines" if text.len() > MAX_PARTS => return refuse("very many parts of a text"),
        "splitlines" => Value::list(lines(text).into_iter().map(Value::str).collect()),
        "startswith" | "endswith" => Value::Bool(begins_or_ends(text, name == "startswith", &given.required()?)?),
        "removeprefix" => Value::str(text.strip_prefix(&*given.text()?).unwrap_or(text)),
        "removesuffix" => Value::str(text.strip_suffix(&*given.text()?).unwrap_or(text)),
        "replace" => {
            let (old, new) = (given.text()?, given.text()?);
            let count = given.next();
            replaced(text, &old, &new, count.as_ref())?
        }
        "lower" | "upper" | "capitalize" | "title" => Value::Str(with_case(text, name)?.into()),
        "find" => {
            let part = given.text()?;
            let at = text.find(&*part).map(|at| text[..at].chars().count());
            at.map_or(Value::Int(-1), Value::size)
        }
        "count" => {
            let part = given.text()?;
            let count = if part.is_empty() {
                text.chars().count() + 1
            } else {
                text.matches(&*part).count()
            };
            Value::size(count)
        }
        "join" => {
            let mut out = String::new();
            for (at, item) in given.required()?.items()?.iter().enumerate() {
                let Value::Str(item) = item else {
                    return refuse("join of what is no string");
                };
                if at > 0 {
                    out.push_str(text);
                }
                out.push_str(item);
                checked_len(out.len())?;
            }
            Value::Str(out.into())
        }
        _ => return refuse(format!("the method {name} of a string")),
    })
}

/// `chars`: None, or the characters to take away.
pub(super) fn stripped<'a>(text: &'a str, name: &str, chars: Option<Value>) -> Result<&'a str> {
    let chars: Option<Vec<char>> = match chars {
        None | Some(Value::None) => None,
        Some(Value::Str(chars)) => Some(chars.chars().collect()),
        Some(other) => return refuse(format!("{name} of {}", other.kind())),
    };
    let is_away = |char: char| {
        chars
            .as_ref()
            .map_or_else(|| is_space(char), |chars| chars.contains(&char))
    };
    let text = if name == "rstrip" {
        text
    } else {
        text.trim_start_matches(is_away)
    };
    Ok(if name == "lstrip" {
        text
    } else {
        text.trim_end_matches(is_away)
    })
}

fn split(text: &str, given: &mut Given) -> Result<Value> {
    let separator = given.named_or_next("sep");
    let most = match given.named_or_next("maxsplit") {
        None => usize::MAX,
        Some(Value::Int(most)) => usize::try_from(most).map_or(usize::MAX, |most| most.saturating_add(1)),
        Some(other) => return refuse(format!("split by {}", other.kind())),
    };
    let count = match &separator {
        Some(Value::Str(separator)) if !separator.is_empty() => text.matches(&**separator).count(),
        _ => text.len(),
    };
    if count > MAX_PARTS {
        return refuse("very many parts of a text");
    }
    let parts: Vec<Value> = match separator {
        Some(Value::Str(separator)) if !separator.is_empty() => {
            text.splitn(most, &*separator).map(Value::str).collect()
        }
        None | Some(Value::None) => {
            if most != usize::MAX {
                return refuse("split at white space with a limit");
            }
            text.split(is_space)
                .filter(|part| !part.is_empty())
                .map(Value::str)
                .collect()
        }
        Some(other) => return refuse(format!("split by {}", other.kind())),
    };
    Ok(Value::list(parts))
}

/// Lines without their ends, as `str.splitlines` sees them.
pub(super) fn lines(text: &str) -> Vec<&str> {
    let is_end = |char| {
        matches!(
            char,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut found = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(is_end).unwrap_or(rest.len());
        found.push(&rest[..end]);
        let after = &rest[end..];
        let len = if after.starts_with("\r\n") {
            2
        } else {
            after.chars().next().map_or(0, char::len_utf8)
        };
        rest = &after[len..];
    }
    found
}

fn begins_or_ends(text: &str, at_begin: bool, parts: &Value) -> Result<bool> {
    match parts {
        Value::Str(part) => Ok(if at_begin {
            text.starts_with(&**part)
        } else {
            text.ends_with(&**part)
        }),
        Value::Seq(SeqKind::Tuple, parts) => {
            for part in parts.iter() {
                if matches!(part, Value::Seq(..)) {
                    return refuse("a tuple in a tuple");
                }
                if begins_or_ends(text, at_begin, part)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        other => refuse(format!("startswith or endswith of {}", other.kind())),
    }
}

pub(super) fn replaced(text: &str, old: &str, new: &str, count: Option<&Value>) -> Result<Value> {
    let most = match count {
        None => usize::MAX,
        Some(Value::Int(most)) => usize::try_from(*most).unwrap_or(usize::MAX),
        Some(other) => return refuse(format!("replace with a limit of {}", other.kind())),
    };
    let count = if old.is_empty() {
        text.len() + 1
    } else {
        text.matches(old).count()
    };
    checked_len(text.len().saturating_add(count.min(most).saturating_mul(new.len())))?;
    Ok(Value::Str(text.replacen(old, new, most).into()))
}

pub(super) fn with_case(text: &str, name: &str) -> Result<String> {
    if !text.is_ascii() {
        return refuse("the case of letters beyond ASCII");
    }
    Ok(match name {
        "lower" => text.to_ascii_lowercase(),
        "upper" => text.to_ascii_uppercase(),
        "capitalize" => {
            let mut text = text.to_ascii_lowercase();
            if let Some(first) = text.get_mut(..1) {
                first.make_ascii_uppercase();
            }
            text
        }
        _ => {
            let mut after_letter = false;
            let mut cased = |char: char| {
                let new = if after_letter {
                    char.to_ascii_lowercase()
                } else {
                    char.to_ascii_uppercase()
                };
                after_letter = char.is_ascii_alphabetic();
                new
            };
            text.chars().map(&mut cased).collect()
        }
    })
}
