//! Attributes and items, as jinja's sandbox finds them.
//!
//! Invariants: an attribute that a Python object has, and this does not know, is refused, not undefined.

use std::rc::Rc;
use std::sync::Arc;

use super::ops::slice_places;
use super::value::{Loop, Result, SeqKind, Value, refuse};

/// What an object has by a name.
#[derive(Clone, Copy, PartialEq)]
enum Own {
    Nothing,
    Method,
    /// It is there, and not known here.
    Other,
}

fn of_str(name: &str) -> Own {
    match name {
        "capitalize" | "count" | "endswith" | "find" | "join" | "lower" | "lstrip" | "removeprefix"
        | "removesuffix" | "replace" | "rstrip" | "split" | "splitlines" | "startswith" | "strip" | "title"
        | "upper" => Own::Method,
        "casefold" | "center" | "encode" | "expandtabs" | "format" | "format_map" | "index" | "isalnum" | "isalpha"
        | "isascii" | "isdecimal" | "isdigit" | "isidentifier" | "islower" | "isnumeric" | "isprintable"
        | "isspace" | "istitle" | "isupper" | "ljust" | "maketrans" | "partition" | "rfind" | "rindex" | "rjust"
        | "rpartition" | "rsplit" | "swapcase" | "translate" | "zfill" => Own::Other,
        _ => Own::Nothing,
    }
}

fn of_dict(name: &str) -> Own {
    match name {
        "get" | "items" | "keys" | "values" => Own::Method,
        "clear" | "copy" | "fromkeys" | "pop" | "popitem" | "setdefault" | "update" => Own::Other,
        _ => Own::Nothing,
    }
}

fn of_list(name: &str) -> Own {
    match name {
        "append" | "clear" | "copy" | "count" | "extend" | "index" | "insert" | "pop" | "remove" | "reverse"
        | "sort" => Own::Other,
        _ => Own::Nothing,
    }
}

fn of_number(name: &str) -> Own {
    match name {
        "as_integer_ratio" | "bit_count" | "bit_length" | "conjugate" | "denominator" | "from_bytes"
        | "from_number" | "fromhex" | "hex" | "imag" | "is_integer" | "numerator" | "real" | "to_bytes" => Own::Other,
        _ => Own::Nothing,
    }
}

/// What jinja's `environment.getattr` finds: an attribute, else an item.
pub(super) fn attr(value: &Value, name: &Arc<str>) -> Result<Value> {
    if let Some(found) = own_attr(value, name)? {
        return Ok(found);
    }
    match value {
        Value::Dict(dict) => Ok(dict.get(name).cloned().unwrap_or(Value::Undefined)),
        _ => Ok(Value::Undefined),
    }
}

/// What jinja's `environment.getitem` finds: an item, else an attribute.
pub(super) fn item(value: &Value, key: &Value) -> Result<Value> {
    let found = match (value, key) {
        (Value::Dict(dict), Value::Str(key)) => dict.get(key).cloned(),
        (Value::Seq(SeqKind::List | SeqKind::Tuple, items), Value::Int(at)) => {
            place(items.len(), *at).and_then(|at| items.get(at).cloned())
        }
        (Value::Str(text), Value::Int(at)) => {
            let len = if *at < 0 { text.chars().count() } else { usize::MAX };
            place(len, *at)
                .and_then(|at| text.chars().nth(at))
                .map(|char| Value::str(char.encode_utf8(&mut [0; 4])))
        }
        (Value::Undefined | Value::Seq(SeqKind::View | SeqKind::Generator, _), _) => {
            return refuse(format!("an item of {}", value.kind()));
        }
        (_, Value::Bool(_) | Value::Float(_) | Value::Seq(..) | Value::Dict(_)) => {
            return refuse(format!("an item by {}", key.kind()));
        }
        (Value::Loop(_) | Value::Macro(_) | Value::Method(_) | Value::Function(_), _) => {
            return refuse(format!("an item of {}", value.kind()));
        }
        _ => None,
    };
    match (found, key) {
        (Some(found), _) => Ok(found),
        (None, Value::Str(name)) => Ok(own_attr(value, name)?.unwrap_or(Value::Undefined)),
        (None, _) => Ok(Value::Undefined),
    }
}

fn place(len: usize, at: i128) -> Option<usize> {
    if at >= 0 {
        usize::try_from(at).ok()
    } else {
        len.checked_sub(usize::try_from(-at).ok()?)
    }
}

/// An attribute of the object itself.
fn own_attr(value: &Value, name: &Arc<str>) -> Result<Option<Value>> {
    if name.starts_with('_') {
        return refuse("an attribute with an underscore");
    }
    let own = match value {
        Value::Str(_) => of_str(name),
        Value::Dict(_) => of_dict(name),
        Value::Seq(SeqKind::List | SeqKind::Tuple, _) => of_list(name),
        Value::Bool(_) | Value::Int(_) | Value::Float(_) => of_number(name),
        Value::None => Own::Nothing,
        Value::Namespace(names) => return Ok(names.borrow().get(name).cloned()),
        Value::Loop(this) => return loop_attr(this, name).map(Some),
        _ => return refuse(format!("an attribute of {}", value.kind())),
    };
    match own {
        Own::Nothing => Ok(None),
        Own::Method => Ok(Some(Value::Method(Rc::new((value.clone(), Arc::clone(name)))))),
        Own::Other => refuse(format!("the attribute {name} of {}", value.kind())),
    }
}

fn loop_attr(this: &Loop, name: &str) -> Result<Value> {
    let len = this.items.len();
    let neighbour = |at: Option<usize>| {
        at.and_then(|at| this.items.get(at))
            .cloned()
            .unwrap_or(Value::Undefined)
    };
    Ok(match name {
        "index" => Value::size(this.index0 + 1),
        "index0" => Value::size(this.index0),
        "revindex" => Value::size(len - this.index0),
        "revindex0" => Value::size(len - this.index0 - 1),
        "first" => Value::Bool(this.index0 == 0),
        "last" => Value::Bool(this.index0 + 1 == len),
        "length" => Value::size(len),
        "previtem" => neighbour(this.index0.checked_sub(1)),
        "nextitem" => neighbour(this.index0.checked_add(1)),
        _ => return refuse(format!("loop.{name}")),
    })
}

pub(super) fn slice(value: &Value, bounds: [Option<Value>; 3]) -> Result<Value> {
    let mut places = [None; 3];
    for (place, bound) in places.iter_mut().zip(bounds) {
        *place = match bound {
            None | Some(Value::None) => None,
            Some(Value::Int(at)) => Some(at),
            Some(other) => return refuse(format!("a slice by {}", other.kind())),
        };
    }
    match value {
        Value::Str(text) => {
            let chars: Vec<char> = text.chars().collect();
            let found: String = slice_places(chars.len(), places)?
                .into_iter()
                .map(|at| chars[at])
                .collect();
            Ok(Value::Str(found.into()))
        }
        Value::Seq(kind @ (SeqKind::List | SeqKind::Tuple), items) => {
            let found = slice_places(items.len(), places)?
                .into_iter()
                .map(|at| items[at].clone())
                .collect();
            Ok(Value::Seq(*kind, Rc::new(found)))
        }
        other => refuse(format!("a slice of {}", other.kind())),
    }
}
