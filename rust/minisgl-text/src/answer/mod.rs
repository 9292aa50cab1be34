//! From the text of an answer to its parts: content, reasoning, tool calls.
//!
//! Invariants: whatever pieces the text comes in, the parts joined are the same; no character of the text is lost but the
//! markers around reasoning and calls; a call that is no call is text.

mod arguments;
mod formats;
mod growing;
mod literals;
mod parts;
mod run;
mod scan;
mod values;

use std::sync::Arc;

pub use formats::{Call, CallId, HARMONY, Many, Parameter, Piece, THINKING, TOOL_FORMATS, Thinking, ToolFormat};
pub use growing::End;
pub use parts::{Part, Tools};
pub use scan::ContentScan;

/// Draws a new id: so many characters of these.
pub type NewId = Box<dyn FnMut(usize, &str) -> String + Send>;

/// Takes the text of one answer apart.
pub struct AnswerParser {
    running: run::Running,
    format: Option<&'static ToolFormat>,
    new_id: NewId,
}

impl AnswerParser {
    /// `thinking` with whether the answer begins within it, Some(false): behind it; None: the answer shows it.
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

    /// What is decided once `text` has come.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        let found = self.running.push(text);
        self.named(found)
    }

    /// What was held back, at the end of the text.
    pub fn finish(&mut self, end: End) -> Vec<Part> {
        let found = self.running.finish(end);
        self.named(found)
    }

    /// The numbers of the calls whose arguments are no whole object, or not what the model meant: an answer with one of
    /// them calls no tools.
    pub fn broken(&self) -> Vec<usize> {
        self.running.growing.broken()
    }

    /// With new ids of calls.
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
