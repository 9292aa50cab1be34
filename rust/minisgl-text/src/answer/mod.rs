//! Parsing of a model's output into parts: content, reasoning and tool calls.
//!
//! Invariants: the concatenated parts do not depend on the chunks in which the text arrives; no character is lost but
//! the markers around reasoning and calls; a malformed call is content.

mod arguments;
mod buffer;
mod formats;
mod literals;
mod parts;
mod run;
mod scan;
mod values;

use std::sync::Arc;

pub use buffer::End;
pub use formats::{Call, CallId, HARMONY, Many, Parameter, Piece, THINKING, TOOL_FORMATS, Thinking, ToolFormat};
pub use parts::{Part, Tools};
pub use scan::ContentScan;

/// Generator of ids: returns that many random characters of the given alphabet.
pub type NewId = Box<dyn FnMut(usize, &str) -> String + Send>;

/// Incremental parser of one model output.
pub struct AnswerParser {
    running: run::Running,
    format: Option<&'static ToolFormat>,
    new_id: NewId,
}

impl AnswerParser {
    /// Creates a parser. With `thinking` comes whether the output begins inside (`Some(true)`) or after (`Some(false)`)
    /// the reasoning; `None`: detected from the output.
    pub fn new(
        format: Option<&'static ToolFormat>,
        thinking: Option<(&'static Thinking, Option<bool>)>,
        tools: Arc<Tools>,
        new_id: NewId,
    ) -> Self {
        Self {
            running: run::Running::new(format, thinking, &tools),
            format,
            new_id,
        }
    }

    /// Adds `text` and returns the parts that are final now.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        let parts = self.running.push(text);
        self.named(parts)
    }

    /// Ends the text and returns the parts that were held back.
    pub fn finish(&mut self, end: End) -> Vec<Part> {
        let parts = self.running.finish(end);
        self.named(parts)
    }

    /// Returns the indices of calls with incomplete or ambiguous arguments. An output with one of them calls no tools.
    pub fn broken(&self) -> Vec<usize> {
        self.running.buffer.broken()
    }

    /// Fills in new ids of calls.
    fn named(&mut self, mut found: Vec<Part>) -> Vec<Part> {
        for part in &mut found {
            if let (Part::CallBegun { index, id, name }, Some(format)) = (part, self.format) {
                *id = match format.id {
                    CallId::Hex => format!("call_{}", (self.new_id)(24, "0123456789abcdef")),
                    CallId::Nine => (self.new_id)(9, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"),
                    CallId::Counted => format!("functions.{name}:{index}"),
                };
            }
        }
        found
    }
}
