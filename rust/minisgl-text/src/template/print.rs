//! Values as text: `str`, `repr` and `json.dumps` of Python.
//!
//! Invariants: what Python's text is not certain of is refused.

use std::fmt::Write as _;

use super::ops::checked_len;
use super::value::{Result, SeqKind, Value, refuse};

/// `str(value)`, appended.
pub(super) fn push_str(value: &Value, out: &mut String) -> Result<()> {
    match value {
        Value::Undefined => Ok(()),
        Value::Str(text) => {
            out.push_str(text);
            Ok(())
        }
        other => push_repr(other, out),
    }
}

pub(super) fn to_str(value: &Value) -> Result<String> {
    let mut out = String::new();
    push_str(value, &mut out)?;
    Ok(out)
}

fn push_repr(value: &Value, out: &mut String) -> Result<()> {
    match value {
        Value::None => out.push_str("None"),
        Value::Bool(value) => out.push_str(if *value { "True" } else { "False" }),
        Value::Int(value) => push_int(*value, out),
        Value::Float(value) => push_float(*value, out),
        Value::Str(text) => return push_quoted(text, out),
        Value::Seq(SeqKind::List, items) => {
            out.push('[');
            push_all(items, out)?;
            out.push(']');
        }
        Value::Seq(SeqKind::Tuple, items) => {
            out.push('(');
            push_all(items, out)?;
            out.push_str(if items.len() == 1 { ",)" } else { ")" });
        }
        Value::Dict(dict) => {
            out.push('{');
            for (at, (key, value)) in dict.iter().enumerate() {
                if at > 0 {
                    out.push_str(", ");
                }
                push_quoted(key, out)?;
                out.push_str(": ");
                push_repr(value, out)?;
                checked_len(out.len())?;
            }
            out.push('}');
        }
        other => return refuse(format!("{} is shown", other.kind())),
    }
    Ok(())
}

fn push_all(items: &[Value], out: &mut String) -> Result<()> {
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            out.push_str(", ");
        }
        push_repr(item, out)?;
        checked_len(out.len())?;
    }
    Ok(())
}

fn push_int(value: i128, out: &mut String) {
    let _ = write!(out, "{value}"); // a String takes everything
}

/// `repr` of a float: the shortest digits that mean it, with an exponent where Python writes one.
pub(super) fn push_float(value: f64, out: &mut String) {
    if value.is_nan() {
        return out.push_str("nan");
    }
    if value.is_infinite() {
        return out.push_str(if value > 0.0 { "inf" } else { "-inf" });
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        out.push_str(&plain);
        if !plain.contains('.') {
            out.push_str(".0");
        }
        return;
    }
    out.push_str(mantissa);
    let _ = write!(out, "e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs());
}

/// `repr` of a string. Which characters beyond ASCII Python shows as they are depends on its Unicode version.
fn push_quoted(text: &str, out: &mut String) -> Result<()> {
    if !text.is_ascii() {
        return refuse("a string beyond ASCII is shown with quotes");
    }
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for char in text.chars() {
        match char {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            char if char == quote => out.extend(['\\', char]),
            ' '..='~' => out.push(char),
            char => {
                let _ = write!(out, "\\x{:02x}", u32::from(char));
            }
        }
    }
    out.push(quote);
    Ok(())
}

/// The options of `json.dumps` that templates use.
pub(super) struct Json {
    pub(super) ensure_ascii: bool,
    pub(super) indent: Option<String>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) sort_keys: bool,
}

impl Json {
    /// `json.dumps(value)`, appended.
    pub(super) fn push(&self, value: &Value, depth: usize, out: &mut String) -> Result<()> {
        match value {
            Value::None => out.push_str("null"),
            Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Value::Int(value) => push_int(*value, out),
            Value::Float(value) if value.is_finite() => push_float(*value, out),
            Value::Str(text) => self.push_text(text, out),
            Value::Seq(SeqKind::List | SeqKind::Tuple, items) => {
                self.push_items('[', ']', items.len(), depth, out, |at, out| {
                    self.push(&items[at], depth + 1, out)
                })?;
            }
            Value::Dict(dict) => {
                let mut entries: Vec<_> = dict.iter().collect();
                if self.sort_keys {
                    entries.sort_by(|one, other| one.0.cmp(other.0));
                }
                self.push_items('{', '}', entries.len(), depth, out, |at, out| {
                    let (key, value) = entries[at];
                    self.push_text(key, out);
                    out.push_str(&self.key_separator);
                    self.push(value, depth + 1, out)
                })?;
            }
            other => return refuse(format!("{} as JSON", other.kind())),
        }
        Ok(())
    }

    fn push_items(
        &self,
        open: char,
        close: char,
        count: usize,
        depth: usize,
        out: &mut String,
        mut push: impl FnMut(usize, &mut String) -> Result<()>,
    ) -> Result<()> {
        out.push(open);
        for at in 0..count {
            if at > 0 {
                out.push_str(&self.item_separator);
            }
            self.push_line(depth + 1, out);
            push(at, out)?;
            checked_len(out.len())?;
        }
        if count > 0 {
            self.push_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn push_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn push_text(&self, text: &str, out: &mut String) {
        let written = serde_json::Value::from(text).to_string();
        if !self.ensure_ascii {
            return out.push_str(&written);
        }
        for char in written.chars() {
            if matches!(char, ' '..='~') {
                out.push(char);
            } else {
                for unit in char.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
}
