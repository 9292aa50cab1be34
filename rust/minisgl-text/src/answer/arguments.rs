//! Tool-call arguments as JSON, however a model writes them: an incremental reader that repairs them.
//!
//! It reads JSON objects and objects whose strings have their own quote marks. Repairs: raw line breaks, wrong escapes
//! and quotes inside strings are escaped; other quote marks, bare keys and bare values get JSON quotes; Python's
//! literals become JSON's; surplus, missing or doubled commas and unmatched brackets are corrected.
//!
//! Invariants: valid JSON is unchanged, byte for byte; emitted output is never revised; the output of a `Whole` object
//! is one JSON object; an object that cannot be repaired is `Broken`, and its output is not JSON. No decision looks
//! further than `LOOK` bytes ahead, so that the work is linear in the text.

use std::sync::Arc;

use super::buffer::End;
use super::literals::{is_scalar, json_string, quoted, typed};
use super::parts::{Kinds, Tools};
use crate::is_space;

const LOOK: usize = 64;
/// Maximum nesting depth of brackets. JSON parsers of clients accept at least as many.
const MAX_DEPTH: usize = 100;

/// Opening quote marks of strings, each with its closing one.
const QUOTES: [(char, &str); 5] = [('"', "\""), ('\'', "'"), ('“', "”"), ('‘', "’"), ('`', "`")];
/// Maximum length in bytes of a key that is recognized after a bare value.
const MAX_KEY: usize = 128;

/// Result of reading a tool call's argument object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Complete: the output is JSON.
    Whole,
    /// Incomplete or ambiguous: the output is not JSON.
    Broken,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Begin,
    /// Expects a key, an item or a closing bracket.
    Item,
    Key,
    Colon,
    Value,
    Text {
        quote: &'static str,
        is_key: bool,
    },
    Bare,
    /// Expects a comma or a closing bracket after a value.
    Next,
}

/// An object or list whose closing bracket was not read yet.
struct Open {
    is_object: bool,
    has_items: bool,
    key: String,
}

/// Incremental reader of one argument object.
pub(super) struct Reader {
    tools: Arc<Tools>,
    tool: String,
    markers: Vec<&'static str>,
    /// Quote mark of the format around strings, if it is not JSON's.
    quote: Option<&'static str>,
    /// Number of brackets open around the object.
    outer: usize,
    open: Vec<Open>,
    state: State,
    /// White space before the next item, and the offset of a comma in it (`comma`).
    gap: String,
    comma: Option<usize>,
    /// Bare key or value so far, the offset of its last comma (`split`), and its open brackets (`nested`).
    word: String,
    split: Option<usize>,
    nested: usize,
    /// Number of times that the first bracket was repeated.
    pub(super) doubled: usize,
    /// JSON output that is final and not yet taken.
    pub(super) out: String,
    pub(super) outcome: Option<Outcome>,
}

impl Reader {
    /// Creates a reader. `tool` names the tool whose schema gives the types of bare values.
    pub(super) fn new(
        markers: &[&'static str],
        tools: &Arc<Tools>,
        tool: &str,
        quote: Option<&'static str>,
        outer: usize,
    ) -> Self {
        let is_sign = |one: &&str| one.starts_with(['<', '[', '`']) && one.len() > 1 && Some(*one) != quote;
        Self {
            tools: Arc::clone(tools),
            tool: tool.to_owned(),
            markers: markers.iter().copied().filter(is_sign).collect(),
            quote,
            outer,
            open: Vec::new(),
            state: State::Begin,
            gap: String::new(),
            comma: None,
            word: String::new(),
            split: None,
            nested: 0,
            doubled: 0,
            out: String::new(),
            outcome: None,
        }
    }

    /// Repairs a complete object. Returns its JSON, or `None` if it cannot be repaired.
    pub(super) fn whole(text: &str, tools: &Arc<Tools>) -> Option<String> {
        let mut reader = Self::new(&[], tools, "", None, 0);
        let len = reader.read(text, Some(End::Whole));
        let is_all = text[len..].chars().all(|one| is_space(one) || one == '}');
        (reader.outcome == Some(Outcome::Whole) && is_all).then_some(reader.out)
    }

    /// Reads on in `text`, which begins where the last call stopped; `end` is set if no more follows. Returns the bytes
    /// consumed: all but an ambiguous rest.
    pub(super) fn read(&mut self, text: &str, end: Option<End>) -> usize {
        let mut at = 0;
        while self.outcome.is_none() {
            match self.step(&text[at..], end) {
                Some(len) => at += len,
                None if end.is_some() => {
                    self.outcome = Some(Outcome::Broken); // an incomplete element at the end
                    at = text.len();
                }
                None => break,
            }
        }
        at
    }

    /// Reads one element and returns the bytes consumed, or `None` if more text is needed.
    fn step(&mut self, rest: &str, end: Option<End>) -> Option<usize> {
        match self.state {
            State::Text { quote, is_key } => return self.text(rest, end, quote, is_key),
            State::Bare => return self.bare(rest, end),
            State::Key => return self.bare_key(rest, end),
            _ => {}
        }
        let Some(one) = rest.chars().next() else {
            return end.map(|end| self.end(false, end));
        };
        if is_space(one) {
            self.space(one);
            return Some(one.len_utf8());
        }
        if self.is_marker(rest, end.is_some())? {
            return Some(self.end(true, End::Whole));
        }
        match self.state {
            State::Begin if one == '{' => self.opened(true),
            State::Item if self.in_object() => self.key(one, rest, end),
            State::Item => self.item(one, rest, end),
            State::Colon => self.colon(one, rest, end),
            State::Value => self.value(one, rest, end),
            State::Next => self.next(one),
            _ => self.broken(),
        }
    }

    // ------------------------------------------------------------------------------------------------- structure

    fn in_object(&self) -> bool {
        self.open.last().is_some_and(|one| one.is_object)
    }

    fn broken(&mut self) -> Option<usize> {
        self.outcome = Some(Outcome::Broken);
        Some(0)
    }

    fn space(&mut self, one: char) {
        if self.quote.is_none() && " \n\t\r".contains(one) {
            let to = if matches!(self.state, State::Item | State::Next) {
                &mut self.gap
            } else {
                &mut self.out
            };
            to.push(one);
        }
    }

    /// Returns whether a marker of the format, which is not JSON, comes next. `None` if more text is needed.
    fn is_marker(&self, rest: &str, ended: bool) -> Option<bool> {
        if self.markers.iter().any(|one| rest.starts_with(one)) {
            return Some(true);
        }
        let may_come = !ended && self.markers.iter().any(|one| one.starts_with(rest));
        (!may_come).then_some(false)
    }

    /// Ends the object at a marker or the end of the text: closes open brackets, or sets `Broken` if incomplete.
    fn end(&mut self, by_marker: bool, end: End) -> usize {
        let is_done = self.state == State::Next || (self.state == State::Item && by_marker);
        if is_done && end == End::Whole {
            while self.open.pop().map(|one| self.closed(one.is_object)).is_some() {}
            self.outcome = Some(Outcome::Whole);
        } else {
            self.outcome = Some(Outcome::Broken);
        }
        0
    }

    fn closed(&mut self, is_object: bool) {
        self.out.push_str(&std::mem::take(&mut self.gap));
        self.comma = None;
        self.out.push(if is_object { '}' } else { ']' });
        self.state = State::Next;
        if self.open.is_empty() {
            self.outcome = Some(Outcome::Whole);
        }
    }

    fn opened(&mut self, is_object: bool) -> Option<usize> {
        if self.open.len() >= MAX_DEPTH {
            return self.broken();
        }
        self.open.push(Open {
            is_object,
            has_items: false,
            key: String::new(),
        });
        self.out.push(if is_object { '{' } else { '[' });
        self.state = State::Item;
        Some(1)
    }

    /// Handles a closing bracket: also closes unmatched ones inside it; drops one that closes nothing.
    fn close(&mut self, one: char, rest: &str, end: Option<End>) -> Option<usize> {
        let is_object = one == '}';
        let Some(at) = self.open.iter().rposition(|open| open.is_object == is_object) else {
            return Some(1);
        };
        if at == 0 && self.open.len() == 2 {
            // a mistaken bracket if the outer object continues after it
            let mut ahead = Lookahead::new(&rest[1..], end.is_some());
            if ahead.next()? == Some(b',') {
                self.open.pop();
                self.closed(!is_object);
                return Some(1);
            }
        }
        while self.open.len() > at {
            if let Some(open) = self.open.pop() {
                self.closed(open.is_object);
            }
        }
        Some(1)
    }

    fn separate(&mut self) {
        let gap = std::mem::take(&mut self.gap);
        let comma = self.comma.take();
        let Some(open) = self.open.last_mut() else { return };
        let had_items = std::mem::replace(&mut open.has_items, true);
        match comma.filter(|_| had_items) {
            Some(at) if self.quote.is_none() => {
                let (before, after) = gap.split_at(at);
                self.out.extend([before, ",", after]);
            }
            None if !had_items => self.out.push_str(&gap),
            _ => self.out.push_str(", "),
        }
    }

    fn next(&mut self, one: char) -> Option<usize> {
        match one {
            ',' => self.state = State::Item,
            '}' | ']' => {}
            ':' | '=' => return self.broken(),
            _ => self.state = State::Item, // a missing comma
        }
        if one == ',' {
            self.comma = Some(self.gap.len());
            return Some(1);
        }
        if self.state == State::Next {
            self.state = State::Item;
        }
        Some(0)
    }

    fn key(&mut self, one: char, rest: &str, end: Option<End>) -> Option<usize> {
        let has_items = self.open.last().is_some_and(|open| open.has_items);
        match one {
            '}' | ']' => self.close(one, rest, end),
            ',' => Some(1),
            '{' if !has_items && self.open.len() == 1 => {
                self.doubled += 1;
                Some(1)
            }
            _ if self.begins_text(one, rest)? => {
                let len = self.text_begin(one, rest, end, true)?;
                self.clear_key();
                Some(len)
            }
            _ if one.is_alphanumeric() || "_$@-".contains(one) => {
                self.separate();
                self.clear_key();
                self.word.clear();
                self.state = State::Key;
                Some(0)
            }
            _ => self.broken(),
        }
    }

    fn clear_key(&mut self) {
        if let Some(open) = self.open.last_mut() {
            open.key.clear();
        }
    }

    fn colon(&mut self, one: char, rest: &str, end: Option<End>) -> Option<usize> {
        if ":=".contains(one) {
            self.colon_found();
            return Some(1);
        }
        if "\"'".contains(one) && Lookahead::new(&rest[1..], end.is_some()).next()? == Some(b':') {
            return Some(1); // a surplus quote
        }
        if "{[-".contains(one) || one.is_ascii_digit() || self.begins_text(one, rest)? {
            self.colon_found();
            return Some(0);
        }
        self.broken()
    }

    fn colon_found(&mut self) {
        self.out.push_str(if self.quote.is_some() { ": " } else { ":" });
        self.state = State::Value;
    }

    fn item(&mut self, one: char, rest: &str, end: Option<End>) -> Option<usize> {
        match one {
            '}' | ']' => self.close(one, rest, end),
            ',' => Some(1),
            ':' | '=' => self.broken(),
            _ => self.value(one, rest, end),
        }
    }

    fn value(&mut self, one: char, rest: &str, end: Option<End>) -> Option<usize> {
        let in_object = self.in_object();
        match one {
            '}' | ']' | ',' => {
                let default = if self.kinds().is_text() { "\"\"" } else { "null" };
                self.out.push_str(default);
                self.state = State::Next;
                Some(0)
            }
            ':' | '=' => Some(1),
            '{' | '[' => {
                if !in_object {
                    self.separate();
                }
                self.opened(one == '{')
            }
            _ if self.begins_text(one, rest)? => self.text_begin(one, rest, end, false),
            _ => {
                if !in_object {
                    self.separate();
                }
                self.word.clear();
                (self.split, self.nested) = (None, 0);
                self.state = State::Bare;
                Some(0)
            }
        }
    }

    fn kinds(&self) -> Kinds {
        let path = self.open.iter().map(|one| one.is_object.then_some(one.key.as_str()));
        self.tools.kinds(&self.tool, path)
    }

    // --------------------------------------------------------------------------------------------------- strings

    fn begins_text(&self, one: char, rest: &str) -> Option<bool> {
        if QUOTES.iter().any(|(begin, _)| *begin == one) {
            return Some(true);
        }
        let Some(quote) = self.quote else { return Some(false) };
        if rest.len() < quote.len() && quote.starts_with(rest) {
            return None;
        }
        Some(rest.starts_with(quote))
    }

    fn text_begin(&mut self, one: char, rest: &str, end: Option<End>, is_key: bool) -> Option<usize> {
        let own = QUOTES.iter().find(|(begin, _)| *begin == one).map(|(_, end)| *end);
        let quote = own.or(self.quote).unwrap_or("\"");
        let mut len = quote.len(); // the opening quote is as long as the closing one
        let after = &rest[len..];
        let mut tripled = None;
        if quote.len() == 1 {
            if end.is_none() && (after.is_empty() || after == quote) {
                return None;
            }
            if let Some(third) = after.strip_prefix(quote) {
                if third.starts_with(quote) && !is_key {
                    tripled = Some(if one == '"' { "\"\"\"" } else { "'''" });
                    len = 3;
                } else if third.starts_with(char::is_alphanumeric) {
                    len = 2; // a doubled quote
                }
            }
        }
        if is_key || !self.in_object() {
            self.separate();
        }
        self.out.push('"');
        let quote = tripled.unwrap_or(quote);
        self.state = State::Text { quote, is_key };
        Some(len)
    }

    /// Reads more of the inside of a string.
    fn text(&mut self, rest: &str, end: Option<End>, quote: &'static str, is_key: bool) -> Option<usize> {
        let first = quote.as_bytes()[0];
        let is_plain = |byte: u8| byte != first && byte >= b' ' && !b"\"\\".contains(&byte);
        let len = rest.bytes().position(|byte| !is_plain(byte)).unwrap_or(rest.len());
        if len > 0 {
            return Some(self.push_json(&rest[..len], len, is_key));
        }
        let Some(one) = rest.chars().next() else {
            return end.and_then(|_| self.broken());
        };
        if let Some(after) = rest.strip_prefix(quote) {
            if self.closes(after, is_key, end.is_some())? {
                self.out.push('"');
                self.state = if is_key { State::Colon } else { State::Next };
                return Some(quote.len());
            }
            let mut ahead = Lookahead::new(after, end.is_some());
            if is_key || matches!(ahead.next()?, Some(b',' | b':' | b'}' | b']')) {
                return self.broken(); // ambiguous: it may or may not end the string
            }
            let inner = quoted(quote);
            return Some(self.push_json(&inner[1..inner.len() - 1], quote.len(), is_key));
        }
        if end.is_none() && quote.starts_with(rest) {
            return None;
        }
        match one {
            '\\' if quote.len() > 3 => Some(self.push_json("\\\\", 1, is_key)), // such strings have no escapes
            '\\' => self.escape(rest, end, is_key),
            '"' => Some(self.push_json("\\\"", 1, is_key)),
            _ => {
                if one == '\n' && self.breaks_off(&rest[1..], end.is_some())? {
                    return self.broken();
                }
                let inner = quoted(&rest[..one.len_utf8()]);
                Some(self.push_json(&inner[1..inner.len() - 1], one.len_utf8(), is_key))
            }
        }
    }

    fn push_json(&mut self, json: &str, len: usize, is_key: bool) -> usize {
        self.out.push_str(json);
        if is_key && let Some(open) = self.open.last_mut() {
            open.key.push_str(json);
        }
        len
    }

    fn escape(&mut self, rest: &str, end: Option<End>, is_key: bool) -> Option<usize> {
        let code = |text: &str| {
            let digits = text.strip_prefix("\\u").and_then(|after| after.get(..4))?;
            let is_code = digits.bytes().all(|one| one.is_ascii_hexdigit());
            is_code.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
        };
        let needed = match rest.as_bytes().get(1) {
            None => 2,
            Some(b'u') if code(rest).is_some_and(|found| (0xd800..0xdc00).contains(&found)) => 12,
            Some(b'u') => 6,
            Some(_) => 2,
        };
        if end.is_none() && rest.len() < needed {
            return None;
        }
        let (json, len) = match rest.as_bytes().get(1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => (&rest[..2], 2),
            Some(b'\'') => ("'", 2),
            Some(b'u') => match (code(rest), rest.get(6..).and_then(code)) {
                (Some(0xd800..0xdc00), Some(0xdc00..0xe000)) => (&rest[..12], 12),
                (Some(0xd800..0xe000), _) => ("\\ufffd", 6), // lone surrogate
                (Some(_), _) => (&rest[..6], 6),
                (None, _) => ("\\\\", 1),
            },
            _ => ("\\\\", 1),
        };
        Some(self.push_json(json, len, is_key))
    }

    /// Returns whether the call ends at the start of this line inside a string: then the closing quote is missing.
    fn breaks_off(&self, after: &str, ended: bool) -> Option<bool> {
        if !self.is_marker(after, ended)? {
            return Some(false);
        }
        let len = (self.markers.iter().filter(|one| after.starts_with(**one)))
            .map(|one| one.len())
            .max();
        let mut ahead = Lookahead::new(&after[len.unwrap_or(0)..], ended);
        let is_end = ahead.next()?.is_none() && ahead.is_at_end();
        Some(is_end || self.is_marker(ahead.rest(), ended)?)
    }

    /// Returns whether the quote before `after` ends its string, which is so only where an object could continue.
    fn closes(&self, after: &str, is_key: bool, ended: bool) -> Option<bool> {
        let mut ahead = Lookahead::new(after, ended);
        let Some(next) = ahead.next()? else { return Some(true) };
        if is_key {
            return Some(b":={[-0123456789".contains(&next) || self.starts_quote(ahead)?);
        }
        match next {
            b'}' | b']' => {
                let mut closed = 0;
                while let Some(b'}' | b']') = ahead.next()? {
                    ahead.at += 1;
                    closed += 1;
                }
                let after = ahead.next()?;
                Some(closed >= self.open.len() + self.outer || after.is_none_or(|one| b",<[`;".contains(&one)))
            }
            b',' => {
                ahead.at += 1;
                let Some(one) = ahead.next()? else { return Some(true) };
                if b"}],<".contains(&one) {
                    Some(true)
                } else if self.in_object() {
                    self.key_follows(ahead)
                } else {
                    Some(b"-+.{[".contains(&one) || one.is_ascii_alphanumeric() || self.starts_quote(ahead)?)
                }
            }
            _ if self.starts_quote(ahead)? => {
                if self.in_object() {
                    self.key_follows(ahead)
                } else {
                    Some(ahead.at > 0)
                }
            }
            _ => self.is_marker(ahead.rest(), ended),
        }
    }

    /// Returns whether a quote mark comes next, or `None` if more text is needed.
    fn starts_quote(&self, ahead: Lookahead<'_>) -> Option<bool> {
        let rest = ahead.rest();
        if rest.starts_with(QUOTES.map(|(begin, _)| begin)) {
            return Some(true);
        }
        let Some(quote) = self.quote else { return Some(false) };
        let may_come = !ahead.ended && rest.len() < quote.len() && quote.starts_with(rest);
        (!may_come).then(|| rest.starts_with(quote))
    }

    /// Returns whether a key and a colon come next. True if the key is longer than the lookahead.
    fn key_follows(&self, mut ahead: Lookahead<'_>) -> Option<bool> {
        let rest = ahead.rest();
        let own = self.quote.filter(|quote| rest.starts_with(quote));
        let other = QUOTES.iter().find(|(begin, _)| rest.starts_with(*begin));
        let quote = own.or(other.map(|(_, end)| *end));
        if quote.is_none()
            && !ahead.ended
            && let Some(quote) = self.quote
            && quote.starts_with(rest)
        {
            return None;
        }
        ahead.at += quote.map_or(0, str::len);
        let begin = ahead.at;
        loop {
            if ahead.at >= LOOK {
                return Some(true);
            }
            let Some(one) = ahead.text[ahead.at..].chars().next() else {
                return ahead.ended.then_some(true);
            };
            match quote {
                Some(_) if one == '\\' => ahead.at += 1,
                Some(quote) if ahead.rest().starts_with(quote) => {
                    ahead.at += quote.len();
                    break;
                }
                Some(quote) if !ahead.ended && quote.starts_with(ahead.rest()) => return None,
                None if !(one.is_alphanumeric() || "_-.$@".contains(one)) => {
                    if ahead.at == begin {
                        return Some(false);
                    }
                    break;
                }
                _ => {}
            }
            ahead.at += ahead.rest().chars().next().map_or(0, char::len_utf8);
        }
        Some(matches!(ahead.next()?, None | Some(b':' | b'=')))
    }

    // ---------------------------------------------------------------------------------------------- without quotes

    fn bare_key(&mut self, rest: &str, end: Option<End>) -> Option<usize> {
        let belongs = |one: char| one.is_alphanumeric() || "_-.$@".contains(one);
        let len = rest.find(|one| !belongs(one)).unwrap_or(rest.len());
        self.word.push_str(&rest[..len]);
        if len == rest.len() {
            if end.is_some() {
                self.outcome = Some(Outcome::Broken);
            }
            return (len > 0 || end.is_some()).then_some(len);
        }
        self.key_is(&self.word.clone());
        Some(len)
    }

    fn key_is(&mut self, key: &str) {
        self.out.push_str(&quoted(key));
        if let Some(open) = self.open.last_mut() {
            key.clone_into(&mut open.key);
        }
        self.state = State::Colon;
    }

    /// Reads more of a bare value. A comma may belong to it if no key follows.
    fn bare(&mut self, rest: &str, end: Option<End>) -> Option<usize> {
        let belongs = |one: char| one.is_alphanumeric() || is_space(one) || "_-.+".contains(one);
        let len = rest.find(|one| !belongs(one)).unwrap_or(rest.len());
        if len > 0 {
            self.word.push_str(&rest[..len]);
            return Some(len);
        }
        let Some(one) = rest.chars().next() else {
            return match end? {
                End::Whole => Some(self.bare_end(0)),
                End::Cut => self.broken(),
            };
        };
        if self.is_marker(rest, end.is_some())? {
            return Some(self.bare_end(0));
        }
        let is_in = self.nested == 0 && self.in_object();
        match one {
            '}' | ']' if self.nested == 0 => return Some(self.bare_end(0)),
            '}' | ']' => self.nested -= 1,
            '{' | '[' => self.nested += 1,
            ',' if is_in => self.split = Some(self.word.len()),
            ',' if self.nested == 0 => return Some(self.bare_end(0)),
            ':' | '=' if is_in && (one == ':' || self.quote.is_some()) => {
                if let Some((value, key)) = self.key_in_word() {
                    self.word.truncate(value);
                    self.split = None;
                    self.bare_end(0);
                    self.comma = Some(0);
                    self.gap.push(' ');
                    self.separate();
                    self.key_is(&key);
                    return Some(0);
                }
            }
            _ if one == '"' || (self.quote.is_some() && self.begins_text(one, rest)? && rest.starts_with('<')) => {
                let is_key = self.split.is_some_and(|at| self.word[at + 1..].trim().is_empty());
                if is_key || is_scalar(self.word.trim()) {
                    return Some(self.bare_end(0));
                }
                let quote = if one == '"' { "\"" } else { self.quote.unwrap_or("\"") };
                if self.split.is_none() && self.closes(&rest[quote.len()..], false, end.is_some())? {
                    let inner = json_string(&format!("\"{}\"", self.word));
                    self.out.push_str(&quoted(inner.as_deref().unwrap_or(&self.word)));
                    self.state = State::Next;
                    return Some(quote.len());
                }
                return self.broken();
            }
            _ => {}
        }
        self.word.push(one);
        Some(one.len_utf8())
    }

    /// Returns the value's length and the key after it if the bare word is `value, key` or `number key`.
    fn key_in_word(&self) -> Option<(usize, String)> {
        let is_name = |text: &str| {
            let belongs = |one: char| one.is_alphanumeric() || "_-$@".contains(one);
            !text.is_empty() && text.chars().all(belongs) && !text.starts_with(|one: char| one.is_numeric())
        };
        if let Some(at) = self.split {
            let key = self.word[at + 1..].trim_start();
            if key.len() > MAX_KEY {
                return None;
            }
            let key = key.trim_end();
            return is_name(key).then(|| (at, key.to_owned()));
        }
        let word = self.word.trim_end();
        let at = word.rfind(is_space).filter(|_| word.len() < LOOK)?;
        let key = &word[at..].trim_start();
        (is_name(key) && is_scalar(word[..at].trim())).then(|| (at, (*key).to_owned()))
    }

    /// Ends a bare value and writes it as JSON. A comma at its end separates items.
    fn bare_end(&mut self, len: usize) -> usize {
        let word = std::mem::take(&mut self.word);
        let comma = self.split.filter(|at| word[at + 1..].trim().is_empty());
        let value = word[..comma.unwrap_or(word.len())].trim_end();
        let json_spaces = |text: &str| text.chars().filter(|one| " \n\t\r".contains(*one)).collect::<String>();
        self.gap = json_spaces(&word[value.len()..comma.unwrap_or(word.len())]);
        self.comma = comma.map(|_| self.gap.len());
        self.state = if comma.is_some() { State::Item } else { State::Next };
        self.gap += &comma.map_or_else(String::new, |at| json_spaces(&word[at + 1..]));
        let kinds = match self.quote {
            None if is_scalar(value) => Kinds::default(), // a JSON literal has its type
            Some(_) if matches!(value, "null" | "None") => Kinds::default(), // a string would have quotes
            _ => self.kinds(),
        };
        if self.quote.is_some() {
            self.gap.clear();
            self.comma = self.comma.map(|_| 0);
        }
        self.out.push_str(&typed(value, &kinds));
        len
    }
}

/// Lookahead at the coming text, without consuming it.
#[derive(Clone, Copy)]
struct Lookahead<'a> {
    text: &'a str,
    at: usize,
    ended: bool,
}

impl<'a> Lookahead<'a> {
    fn new(text: &'a str, ended: bool) -> Self {
        Self { text, at: 0, ended }
    }

    /// Skips white space and returns the next byte. `Some(None)`: none within `LOOK` bytes; `None`: needs more text.
    fn next(&mut self) -> Option<Option<u8>> {
        while let Some(byte) = self.text.as_bytes().get(self.at).filter(|_| self.at < LOOK) {
            if !byte.is_ascii_whitespace() {
                return Some(Some(*byte));
            }
            self.at += 1;
        }
        (self.ended || self.at >= LOOK).then_some(None)
    }

    fn is_at_end(&self) -> bool {
        self.at == self.text.len()
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }
}
