//! An answer as a list of sections: reasoning, texts and calls (`server/sections.py`).
//!
//! Invariants: one section is open at a time; whatever pieces the parts come in, the sections are the same; blank text
//! before, between and after other sections is none, but an answer of nothing else is a section of text.

use minisgl_text::answer::Part;
use minisgl_text::is_space;
use serde_json::Value;

use super::choice::{End, Finish};
use super::json::Usage;

/// What a section has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// What the model thinks.
    Reasoning,
    /// What it says.
    Text,
    /// A call of a tool.
    Call,
}

/// One of an answer's.
#[derive(Debug)]
pub struct Section {
    /// What it has.
    pub kind: Kind,
    /// A call has it.
    pub call_id: String,
    /// The tool of a call has it.
    pub name: String,
    /// As far as it has come; of a call, its arguments.
    pub text: String,
}

/// What happened to the section of a number.
#[derive(Debug)]
pub enum Change {
    /// It began.
    Opened(usize),
    /// It got this text.
    Grown(usize, String),
    /// It has ended.
    Closed(usize),
}

/// See the module.
#[derive(Debug, Default)]
pub struct Sections {
    /// In order.
    pub all: Vec<Section>,
    is_open: bool,
    blank: String, // text that may turn out to be none
}

impl Sections {
    /// What the parts, and the end of the answer, change.
    pub fn take(&mut self, parts: Vec<Part>, is_over: bool) -> Vec<Change> {
        let mut changes = Vec::new();
        for part in parts {
            match part {
                Part::Text(text) => self.add_text(text, &mut changes),
                Part::Reasoning(text) => self.grow(Kind::Reasoning, text, &mut changes),
                Part::CallBegun { id, name, .. } => self.begin(Kind::Call, id, name, &mut changes),
                Part::CallArguments(_, text) => self.grow(Kind::Call, text, &mut changes),
            }
        }
        if is_over {
            if !self.blank.is_empty() && self.all.is_empty() {
                let text = std::mem::take(&mut self.blank);
                self.grow(Kind::Text, text, &mut changes);
            }
            self.close(&mut changes);
        }
        changes
    }

    fn open_kind(&self) -> Option<Kind> {
        self.all.last().filter(|_| self.is_open).map(|one| one.kind)
    }

    fn add_text(&mut self, mut text: String, changes: &mut Vec<Change>) {
        if self.open_kind() != Some(Kind::Text) {
            self.blank.push_str(&text);
            if text.chars().all(is_space) {
                return;
            }
            text = std::mem::take(&mut self.blank);
        }
        self.grow(Kind::Text, text, changes);
    }

    fn grow(&mut self, kind: Kind, text: String, changes: &mut Vec<Change>) {
        if self.open_kind() != Some(kind) {
            self.begin(kind, String::new(), String::new(), changes);
        }
        if let Some(section) = self.all.last_mut() {
            section.text.push_str(&text);
        }
        changes.push(Change::Grown(self.all.len() - 1, text));
    }

    fn begin(&mut self, kind: Kind, call_id: String, name: String, changes: &mut Vec<Change>) {
        self.close(changes);
        self.blank.clear();
        self.all.push(Section {
            kind,
            call_id,
            name,
            text: String::new(),
        });
        self.is_open = true;
        changes.push(Change::Opened(self.all.len() - 1));
    }

    fn close(&mut self, changes: &mut Vec<Change>) {
        if std::mem::take(&mut self.is_open) {
            changes.push(Change::Closed(self.all.len() - 1));
        }
    }
}

/// How an answer is shown that is a list of sections.
pub trait Story {
    /// What comes before the first section of a stream.
    fn begin(&mut self, usage: Usage, out: &mut Vec<u8>);
    /// What has come, and whether it is all.
    fn take(&mut self, parts: Vec<Part>, finish: Option<Finish>, out: &mut Vec<u8>);
    /// The end of a stream.
    fn end(&mut self, end: End<'_>, usage: Usage, out: &mut Vec<u8>);
    /// The end of a stream that fails; `body`: of the error.
    fn error(&mut self, body: &Value, out: &mut Vec<u8>);
    /// All of it at once.
    fn whole(&mut self, end: End<'_>, usage: Usage) -> Vec<u8>;
}
