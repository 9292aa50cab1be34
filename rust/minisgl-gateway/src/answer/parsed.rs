//! An answer that is taken apart into content, reasoning and calls (`server/core/turn.py`).

use std::sync::Arc;

use minisgl_text::Tokenizer;
use minisgl_text::answer::{AnswerParser, ContentScan, End, Part, TOOL_FORMATS, Thinking, ToolFormat, Tools};

use super::choice::Finish;
use crate::callers;
use crate::message::prepared::Parts;

/// How the answers of a request are taken apart.
#[derive(Clone, Debug)]
pub struct Parsing {
    /// None: no tool may be called.
    format: Option<&'static ToolFormat>,
    /// The model thinks, and that is told from the content: whether an answer begins within it.
    thinking: Option<(&'static Thinking, Option<bool>)>,
    /// Those that may be called.
    tools: Arc<Tools>,
    /// The fields as Python sent them.
    pub parts: Parts,
}

impl Parsing {
    /// Reads what Python says. None: a schema is no JSON, or a format is not known here.
    pub fn new(parts: Parts) -> Option<Parsing> {
        let format = match parts.tool_format {
            Some(place) => Some(TOOL_FORMATS.get(place)?),
            None => None,
        };
        let thinking = match &parts.thinking {
            Some(name) => Some((Thinking::named(name)?, parts.is_open)),
            None => None,
        };
        let tools = match parts.schemas.as_str() {
            "" => Tools::default(),
            text => Tools(serde_json::from_str(text).ok()?),
        };
        Some(Parsing {
            format,
            thinking,
            tools: Arc::new(tools),
            parts,
        })
    }
}

impl Parsing {
    /// Tells the content of an answer from the rest.
    pub fn scan(&self) -> ContentScan {
        ContentScan::new(self.format, self.thinking, &self.tools)
    }
}

/// A call as it grows.
pub struct Call {
    /// New with each answer.
    pub id: String,
    /// The tool has it.
    pub name: String,
    /// JSON text, as far as it has come.
    pub arguments: String,
}

/// One answer as it grows.
pub struct Parsed {
    parser: AnswerParser,
    tokenizer: Arc<Tokenizer>,
    /// What the model thinks is told from the content.
    pub thinks: bool,
    /// And is sent.
    pub shows_thoughts: bool,
    think_end: Option<i32>,
    named_call: bool,
    keeps: bool,
    has_thought: bool,
    has_called: bool,
    /// Numbers of calls that are not shown as a whole: their arguments are not what the model meant.
    broken: Vec<usize>,
    /// If it is kept.
    pub content: String,
    /// The same.
    pub reasoning: String,
    /// The same.
    pub calls: Vec<Call>,
}

impl Parsed {
    /// Nothing has come. `keeps`: it is shown as a whole.
    pub fn new(parsing: &Parsing, tokenizer: &Arc<Tokenizer>, keeps: bool) -> Parsed {
        let new_id = Box::new(callers::random_id);
        Parsed {
            parser: AnswerParser::new(parsing.format, parsing.thinking, Arc::clone(&parsing.tools), new_id),
            tokenizer: Arc::clone(tokenizer),
            thinks: parsing.thinking.is_some(),
            shows_thoughts: parsing.parts.shows_thoughts,
            think_end: parsing.parts.think_end,
            named_call: parsing.parts.named_call,
            keeps,
            has_thought: false,
            has_called: false,
            broken: Vec::new(),
            content: String::new(),
            reasoning: String::new(),
            calls: Vec::new(),
        }
    }

    /// What is new, with all that was held back if the answer ends.
    pub fn take(&mut self, text: &str, finish: Option<Finish>) -> Vec<Part> {
        let mut parts = self.parser.push(text);
        if let Some(finish) = finish {
            let end = if finish == Finish::Length { End::Cut } else { End::Whole };
            parts.append(&mut self.parser.finish(end));
            self.broken = self.parser.broken();
        }
        parts.iter().for_each(|part| self.note(part));
        parts
    }

    fn note(&mut self, part: &Part) {
        match part {
            Part::Text(text) if self.keeps => self.content.push_str(text),
            Part::Reasoning(text) => {
                self.has_thought = true;
                if self.keeps || self.think_end.is_none() {
                    self.reasoning.push_str(text);
                }
            }
            Part::CallBegun { id, name, .. } => {
                self.has_called = true;
                if self.keeps {
                    self.calls.push(Call {
                        id: id.clone(),
                        name: name.clone(),
                        arguments: String::new(),
                    });
                }
            }
            Part::CallArguments(index, text) => {
                if let Some(call) = self.calls.get_mut(*index) {
                    call.arguments.push_str(text);
                }
            }
            Part::Text(_) => {}
        }
    }

    /// Those that are whole, once the answer has ended.
    pub fn whole_calls(&self) -> impl Iterator<Item = &Call> {
        let calls = self.calls.iter().enumerate();
        calls.filter(|(at, _)| !self.broken.contains(at)).map(|(_, call)| call)
    }

    /// Whether a stream has it.
    pub fn shows(&self, part: &Part) -> bool {
        self.shows_thoughts || !matches!(part, Part::Reasoning(_))
    }

    /// Whether the answer calls tools, once it has ended. A whole answer shows no broken call, a stream has shown its
    /// pieces.
    fn calls_tools(&self) -> bool {
        if self.keeps {
            self.whole_calls().next().is_some()
        } else {
            self.has_called && self.broken.is_empty()
        }
    }

    /// OpenAI's reason.
    pub fn reason(&self, finish: &'static str) -> &'static str {
        if finish == "stop" && !self.named_call && self.calls_tools() {
            "tool_calls"
        } else {
            finish
        }
    }

    /// Tokens of what was thought, with the marker that ends it; `ended`: how many of the answer's `all` had come with
    /// that marker.
    pub fn num_thought(&self, ended: Option<usize>, all: usize) -> usize {
        if !self.has_thought {
            0
        } else if self.think_end.is_some() {
            ended.unwrap_or(all)
        } else {
            let ids = self.tokenizer.encode(&self.reasoning, false, usize::MAX);
            ids.map_or(0, |ids| ids.len())
        }
    }
}
