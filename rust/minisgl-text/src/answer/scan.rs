//! Content spans of a model's output: the text in which stop strings are searched.

use std::sync::{Arc, Mutex, PoisonError};

use super::buffer::End;
use super::formats::{Thinking, ToolFormat};
use super::parts::Tools;
use super::run::Running;

/// Incremental split of an output into content and the rest (reasoning, markers, calls).
pub struct ContentScan {
    running: Mutex<Running>, // never locked, as the scan has one owner; makes it `Sync`
    /// Text that is not decided yet, and its byte offset in the output (`begin`).
    text: String,
    begin: usize,
}

impl ContentScan {
    /// Creates a scan, with the arguments of `AnswerParser::new`.
    pub fn new(
        format: Option<&'static ToolFormat>,
        thinking: Option<(&'static Thinking, Option<bool>)>,
        tools: &Arc<Tools>,
    ) -> Self {
        let running = Running::new(format, thinking, tools);
        running.buffer.note_spans();
        Self {
            running: Mutex::new(running),
            text: String::new(),
            begin: 0,
        }
    }

    /// Adds `text` and returns the stretches decided now, each with whether it is content; all the rest if `ended`.
    pub fn push(&mut self, text: &str, ended: bool) -> Vec<(String, bool)> {
        self.text.push_str(text);
        let running = self.running.get_mut().unwrap_or_else(PoisonError::into_inner);
        running.push(text);
        if ended {
            running.finish(End::Whole);
        }
        let (mut found, mut told) = (Vec::<(String, bool)>::new(), 0);
        for span in running.buffer.spans() {
            let end = span.end.saturating_sub(self.begin);
            if end > told {
                found.push((self.text[told..end].to_owned(), span.is_content));
                told = end;
            }
        }
        if ended && told < self.text.len() {
            found.push((self.text[told..].to_owned(), false));
            told = self.text.len();
        }
        self.text.drain(..told);
        self.begin += told;
        found
    }
}
