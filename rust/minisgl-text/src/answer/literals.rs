//! Argument values as JSON: strings, objects and Python's literals.

use std::collections::HashSet;
use std::fmt::Write as _;

use serde::de::IgnoredAny;
use serde_json::{Number, Value};

use super::parts::Kinds;

const MAX_DEPTH: usize = 64;

/// Returns the value of a JSON string, or `None` if it is not valid. Raw control characters are accepted.
pub(super) fn json_string(text: &str) -> Option<String> {
    serde_json::from_str(&escaped_controls(text)).ok()
}

/// Returns true for a JSON number, true, false or null, and for Python's True, False and None.
pub(super) fn is_scalar(text: &str) -> bool {
    matches!(text, "True" | "False" | "None") || (!text.starts_with(['"', '{', '[']) && is_json(text))
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

fn escaped_controls(text: &str) -> std::borrow::Cow<'_, str> {
    if !text.bytes().any(|byte| byte < b' ') {
        return text.into();
    }
    let (mut found, mut in_string, mut is_escaped) = (String::with_capacity(text.len()), false, false);
    for one in text.chars() {
        if in_string && one < ' ' {
            let _ = write!(found, "\\u{:04x}", u32::from(one));
        } else {
            found.push(one);
        }
        in_string ^= one == '"' && !is_escaped;
        is_escaped = in_string && one == '\\' && !is_escaped;
    }
    found.into()
}

/// Returns an untyped value as JSON of one of the types `kinds`. A string keeps its white space.
pub(super) fn typed(text: &str, kinds: &Kinds) -> String {
    let inner = text.trim();
    let spelled = match inner.to_ascii_lowercase().as_str() {
        value @ ("true" | "false" | "null") => value.to_owned(),
        "none" => "null".to_owned(),
        _ => inner.to_owned(),
    };
    let mut literals = Literals { rest: inner };
    match serde_json::from_str::<Value>(&spelled) {
        Ok(Value::Number(value)) if kinds.is_whole() => whole(&value).unwrap_or(spelled),
        Ok(value) if kinds.allow(&value) || !kinds.has_text() => spelled,
        Ok(_) => quoted(text),
        Err(_) if inner.starts_with(['{', '[']) => {
            let value = literals.literal(MAX_DEPTH).filter(|_| literals.rest.trim().is_empty());
            value.unwrap_or_else(|| quoted(text))
        }
        Err(_) if kinds.is_number() => {
            let sign = if inner.starts_with('-') { "-" } else { "" };
            let body = inner.strip_prefix(['-', '+']).unwrap_or(inner);
            let digits = body.trim_start_matches('0'); // Python has no decimal numbers with leading zeros
            literals.rest = match digits.chars().next() {
                None if !body.is_empty() => "0",
                Some('.' | '0'..='9') => digits,
                _ => body,
            };
            let has_one_sign = !body.starts_with(['-', '+']);
            let value = literals.number().filter(|_| literals.rest.is_empty() && has_one_sign);
            value.map_or_else(|| quoted(text), |value| format!("{sign}{value}"))
        }
        Err(_) => quoted(text),
    }
}

/// Returns a float without a fraction, written as an integer. `None` for other numbers.
fn whole(number: &Number) -> Option<String> {
    let value = number.as_f64().filter(|_| number.is_f64())?;
    (value.fract() == 0.0 && value.abs() < 9e15).then(|| format!("{value:.0}"))
}

/// Returns the JSON object of `(name=literal, ...)`, or `None` if the text is not of that form.
pub(super) fn python_arguments(text: &str) -> Option<String> {
    let mut rest = Literals {
        rest: text.strip_prefix('(')?,
    };
    let mut names = HashSet::new();
    let (found, _) = rest.items(")", |rest| {
        let name = rest.word()?;
        (names.insert(name) && rest.comes("=")).then_some(())?;
        Some(format!("{}: {}", quoted(name), rest.literal(MAX_DEPTH)?))
    })?;
    rest.rest.trim().is_empty().then(|| format!("{{{}}}", found.join(", ")))
}

/// Returns `text` as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Parser of Python literals.
struct Literals<'a> {
    rest: &'a str,
}

impl<'a> Literals<'a> {
    /// Skips white space, and consumes `text` if it comes next. Returns true if it did.
    fn comes(&mut self, text: &str) -> bool {
        self.rest = self.rest.trim_start();
        let after = self.rest.strip_prefix(text);
        self.rest = after.unwrap_or(self.rest);
        after.is_some()
    }

    /// Consumes the longest prefix whose characters satisfy `belongs`. `None` if it is empty.
    fn run_of(&mut self, belongs: impl Fn(char) -> bool) -> Option<&'a str> {
        let (found, rest) = self
            .rest
            .split_at(self.rest.find(|one| !belongs(one)).unwrap_or(self.rest.len()));
        self.rest = rest;
        (!found.is_empty()).then_some(found)
    }

    /// Consumes the next character.
    fn next(&mut self) -> Option<char> {
        let next = self.rest.chars().next()?;
        self.rest = &self.rest[next.len_utf8()..];
        Some(next)
    }

    fn word(&mut self) -> Option<&'a str> {
        self.rest = self.rest.trim_start();
        let word = self.run_of(|one| one.is_alphanumeric() || one == '_')?;
        (!word.starts_with(|first: char| first.is_numeric())).then_some(word)
    }

    /// Parses one literal, nested at most `depth` deep, and returns it as JSON. `None` if it is not a literal.
    fn literal(&mut self, depth: usize) -> Option<String> {
        let depth = depth.checked_sub(1)?;
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            '"' | '\'' => self.strings(),
            bracket @ ('[' | '(') => {
                self.rest = &self.rest[1..];
                let end = if bracket == '[' { "]" } else { ")" };
                let (mut items, has_comma) = self.items(end, |rest| rest.literal(depth))?;
                if bracket == '(' && items.len() == 1 && !has_comma {
                    return items.pop(); // a value in parentheses, no tuple
                }
                Some(format!("[{}]", items.join(", ")))
            }
            '{' => {
                self.rest = &self.rest[1..];
                let (fields, _) = self.items("}", |rest| {
                    let name = rest.literal(1).filter(|name| name.starts_with('"'))?;
                    rest.comes(":").then_some(())?;
                    Some(format!("{name}: {}", rest.literal(depth)?))
                })?;
                Some(format!("{{{}}}", fields.join(", ")))
            }
            '-' | '+' | '.' | '0'..='9' => self.number(),
            _ => {
                let word = self.word()?;
                let literal = match word {
                    "True" | "true" => "true",
                    "False" | "false" => "false",
                    "None" | "null" => "null",
                    "u" | "U" if self.rest.starts_with(['"', '\'']) => return self.strings(),
                    "r" | "R" if self.rest.starts_with(['"', '\'']) => {
                        return self.string(true).map(|text| quoted(&text));
                    }
                    _ => return None,
                };
                Some(literal.to_owned())
            }
        }
    }

    /// Parses comma-separated items up to `end`. Returns them, and whether a comma follows the last.
    fn items(&mut self, end: &str, mut item: impl FnMut(&mut Self) -> Option<String>) -> Option<(Vec<String>, bool)> {
        let (mut found, mut has_comma) = (Vec::new(), true);
        while !self.comes(end) {
            has_comma.then_some(())?;
            found.push(item(self)?);
            has_comma = self.comes(",");
        }
        Some((found, has_comma))
    }

    fn number(&mut self) -> Option<String> {
        let sign = if self.comes("-") {
            "-"
        } else {
            self.comes("+");
            ""
        };
        self.rest = self.rest.trim_start();
        let mut text = self
            .run_of(|one| one.is_ascii_alphanumeric() || "_.".contains(one))?
            .replace('_', "");
        if let Some(radix) = [("0x", 16), ("0o", 8), ("0b", 2)]
            .iter()
            .find(|(prefix, _)| text.starts_with(prefix))
        {
            return Some(format!("{sign}{}", u64::from_str_radix(&text[2..], radix.1).ok()?));
        }
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            let is_decimal = text == "0" || !text.starts_with('0');
            return is_decimal.then(|| format!("{sign}{text}")); // of any size, as in JSON
        }
        if text.ends_with(['e', 'E']) && self.rest.starts_with(['+', '-']) {
            text.push_str(&self.rest[..1]);
            self.rest = &self.rest[1..];
            text.push_str(self.run_of(|one| one.is_ascii_digit())?);
        }
        if text.chars().any(|one| one.is_alphabetic() && !"eE".contains(one)) {
            return None;
        }
        let value: f64 = format!("{sign}{text}").parse().ok()?;
        Number::from_f64(value).map(|value| value.to_string())
    }

    /// Parses adjacent string literals as one string, as Python does.
    fn strings(&mut self) -> Option<String> {
        let mut joined = self.string(false)?;
        loop {
            self.rest = self.rest.trim_start();
            if !self.rest.starts_with(['"', '\'']) {
                return Some(quoted(&joined));
            }
            joined += &self.string(false)?;
        }
    }

    fn string(&mut self, is_raw: bool) -> Option<String> {
        let quote = ["\"\"\"", "'''", "\"", "'"]
            .into_iter()
            .find(|quote| self.rest.starts_with(quote))?;
        self.rest = &self.rest[quote.len()..];
        let mut text = String::new();
        loop {
            if let Some(rest) = self.rest.strip_prefix(quote) {
                self.rest = rest;
                return Some(text);
            }
            let next = self.next()?;
            if next != '\\' {
                text.push(next);
                continue;
            }
            if is_raw {
                text.extend([next, self.next()?]);
            } else {
                self.escape(&mut text)?;
            }
        }
    }

    /// Parses the escape sequence after a backslash. Unknown ones stay as they are, as in Python.
    fn escape(&mut self, found: &mut String) -> Option<()> {
        let next = self.next()?;
        let len = match next {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        if len > 0 {
            let digits = self
                .rest
                .get(..len)
                .filter(|digits| digits.bytes().all(|next| next.is_ascii_hexdigit()))?;
            self.rest = &self.rest[len..];
            found.push(char::from_u32(u32::from_str_radix(digits, 16).ok()?)?);
            return Some(());
        }
        let next = match next {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\x07',
            'b' => '\x08',
            'f' => '\x0c',
            'v' => '\x0b',
            '\\' | '\'' | '"' => next,
            '\n' => return Some(()),
            '0'..='7' => {
                let more = self
                    .rest
                    .bytes()
                    .take(2)
                    .take_while(|byte| (b'0'..=b'7').contains(byte))
                    .count();
                let code = u32::from_str_radix(&format!("{next}{}", &self.rest[..more]), 8).ok()?;
                self.rest = &self.rest[more..];
                char::from_u32(code)?
            }
            'N' => return None, // named characters are not supported
            other => {
                found.push('\\');
                other
            }
        };
        found.push(next);
        Some(())
    }
}
