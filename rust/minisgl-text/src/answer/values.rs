//! End of values without quotes: a marker after which the text continues as a call does.
//!
//! Invariants: a decision looks ahead by the length of the markers and `LOOK` bytes of white space between them at
//! most.

use super::formats::{Call, Parameter, Piece, ToolFormat};
use super::parts::Tools;
use crate::is_space;

const LOOK: usize = 64;
/// Maximum length of a parameter's name, in bytes.
const MAX_NAME: usize = 128;

/// Markers around the values of one call.
pub(super) struct ValueEnds<'a> {
    tools: &'a Tools,
    tool: &'a str,
    parameter: &'static Parameter,
    /// Marker after the last parameter, if there is one before the end of the format.
    call_end: &'static str,
    end: &'static str,
    begins: Vec<&'static str>,
}

impl<'a> ValueEnds<'a> {
    pub(super) fn new(
        format: &'static ToolFormat,
        parameter: &'static Parameter,
        tools: &'a Tools,
        tool: &'a str,
    ) -> Self {
        let mut begins = format.openings();
        let mut call_end = "";
        if let Call::Pattern(pieces) = &format.call {
            if let Some(Piece::Lit(first)) = pieces.first() {
                begins.push(first.trim());
            }
            if let Some(Piece::Lit(last)) = pieces.last() {
                call_end = last.trim();
            }
        }
        let end = format.end.trim();
        Self {
            tools,
            tool,
            parameter,
            call_end,
            end,
            begins,
        }
    }

    /// Returns the length of the end marker if the value ends at `rest`, `Some(None)` if not, `None` if more text is
    /// needed. `in_line`: text of the value precedes it in the line.
    pub(super) fn value_ends(&self, rest: &str, ended: bool, in_line: bool) -> Option<Option<usize>> {
        let end = self.parameter.end.trim();
        if comes(rest, end, ended)? {
            let goes_on = self.goes_on(&rest[end.len()..], ended)?;
            return Some(goes_on.then_some(end.len()));
        }
        // a missing end marker
        let begins = (!in_line || !self.parameter.in_lines) && self.parameter_begins(rest, ended)?;
        Some((begins || self.call_ends(rest, ended, true)?).then_some(0))
    }

    /// Returns whether a parameter or the end of the call comes after the end of a value.
    fn goes_on(&self, after: &str, ended: bool) -> Option<bool> {
        let Some(rest) = spaced(after, ended)? else {
            return Some(true);
        };
        Some(comes(rest, self.parameter.begin.trim(), ended)? || self.call_ends(rest, ended, false)?)
    }

    /// Returns whether a parameter that the tool accepts begins here.
    fn parameter_begins(&self, rest: &str, ended: bool) -> Option<bool> {
        let (begin, named) = (self.parameter.begin.trim(), self.parameter.named.trim());
        if !comes(rest, begin, ended)? {
            return Some(false);
        }
        let rest = &rest[begin.len()..];
        let len = rest.find(|one: char| !(one.is_alphanumeric() || "_-.".contains(one)));
        let len = match len.unwrap_or(rest.len()) {
            len if len > MAX_NAME => return Some(false),
            len if len == rest.len() && !ended => return None,
            len => len,
        };
        let after = &rest[len..];
        if !comes(after, named, ended)? || !self.tools.has_argument(self.tool, &rest[..len]) {
            return Some(false);
        }
        let after = &after[named.len()..];
        if self.parameter.in_lines {
            return comes(after, "\n", ended);
        }
        let Some(after) = spaced(after, ended)? else {
            return Some(false);
        };
        comes(after, self.parameter.value.trim(), ended)
    }

    /// Returns whether the call ends here; with `strict`, only if nothing or another call follows.
    fn call_ends(&self, rest: &str, ended: bool, strict: bool) -> Option<bool> {
        let mut after = rest;
        if !self.call_end.is_empty() && comes(rest, self.call_end, ended)? {
            match spaced(&rest[self.call_end.len()..], ended)? {
                None => return Some(true),
                Some(found) => after = found,
            }
            for begin in &self.begins {
                if comes(after, begin, ended)? {
                    return Some(true);
                }
            }
        }
        if !comes(after, self.end, ended)? {
            return Some(false);
        }
        if !strict {
            return Some(true);
        }
        let Some(after) = spaced(&after[self.end.len()..], ended)? else {
            return Some(true);
        };
        for begin in &self.begins {
            if comes(after, begin, ended)? {
                return Some(true);
            }
        }
        Some(false)
    }
}

/// Returns whether `marker` comes next. `None` if more text is needed.
fn comes(rest: &str, marker: &str, ended: bool) -> Option<bool> {
    if rest.starts_with(marker) {
        return Some(true);
    }
    (ended || !marker.starts_with(rest)).then_some(false)
}

/// Returns the text after white space; `Some(None)` if there is none; `None` if more text is needed.
fn spaced(text: &str, ended: bool) -> Option<Option<&str>> {
    let rest = text.trim_start_matches(is_space);
    if rest.is_empty() && text.len() < LOOK {
        return ended.then_some(None);
    }
    Some((!rest.is_empty() && text.len() - rest.len() < LOOK).then_some(rest))
}
