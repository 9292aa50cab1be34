//! From the text of an answer to its parts: content, reasoning, tool calls.
//!
//! Invariants: whatever pieces the text comes in, the parts joined are the same; no character of the text is lost but the
//! markers around reasoning and calls; a call that is no call is text.

mod formats;
mod growing;
mod literals;
mod parts;
mod run;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Waker};

pub use formats::{Call, CallId, HARMONY, Many, Parameter, Piece, THINKING, TOOL_FORMATS, Thinking, ToolFormat};
pub use growing::End;
pub use parts::{Part, Tools};

/// Draws a new id: so many characters of these.
pub type NewId = Box<dyn FnMut(usize, &str) -> String + Send>;

/// Takes the text of one answer apart.
pub struct AnswerParser {
    growing: growing::Growing,
    running: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
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
        let growing = growing::Growing::default();
        let run = run::Run {
            growing: growing.clone(),
            format,
            thinking,
            tools,
            ..run::Run::default()
        };
        Self {
            growing,
            running: Some(Box::pin(run.run())),
            format,
            new_id,
        }
    }

    /// What is decided once `text` has come.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        if !text.is_empty() {
            self.growing.push(text);
            self.go_on();
        }
        self.parts()
    }

    /// What was held back, at the end of the text.
    pub fn finish(&mut self, end: End) -> Vec<Part> {
        self.growing.finish(end);
        self.go_on();
        self.parts()
    }

    /// The parser never waits for anything but more text, so nobody needs to wake it.
    fn go_on(&mut self) {
        if let Some(running) = &mut self.running
            && running
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_ready()
        {
            self.running = None;
        }
    }

    fn parts(&mut self) -> Vec<Part> {
        let mut found = self.growing.parts();
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
