//! Which parts of an answer's text are content: where stop strings are looked for.

use std::sync::{Arc, Mutex, PoisonError};

use super::formats::{Thinking, ToolFormat};
use super::growing::End;
use super::parts::Tools;
use super::run::Running;

/// Tells the content of an answer from reasoning, markers and calls as its text comes.
pub struct ContentScan {
    running: Mutex<Running>, // nobody locks it: who has the scan alone has it
    /// What is not decided yet, and where it begins in the text.
    text: String,
    begin: usize,
}

impl ContentScan {
    /// As `AnswerParser::new`.
    pub fn new(
        format: Option<&'static ToolFormat>,
        thinking: Option<(&'static Thinking, Option<bool>)>,
        tools: &Arc<Tools>,
    ) -> Self {
        let running = Running::new(format, thinking, tools);
        running.growing.note_spans();
        Self {
            running: Mutex::new(running),
            text: String::new(),
            begin: 0,
        }
    }

    /// The next parts of the text that are decided once `text` has come, and whether they are content; with `ended` all
    /// that is left.
    pub fn push(&mut self, text: &str, ended: bool) -> Vec<(String, bool)> {
        self.text.push_str(text);
        let running = self.running.get_mut().unwrap_or_else(PoisonError::into_inner);
        running.push(text);
        if ended {
            running.finish(End::Whole);
        }
        let (mut found, mut told) = (Vec::<(String, bool)>::new(), 0);
        for span in running.growing.spans() {
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
