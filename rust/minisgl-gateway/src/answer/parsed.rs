//! Parsing of an answer into content, reasoning and tool calls (as in `server/core/turn.py`).

use std::sync::Arc;

use minisgl_text::Tokenizer;
use minisgl_text::answer::{AnswerParser, ContentScan, End, Part, TOOL_FORMATS, Thinking, ToolFormat, Tools};

use super::choice::Finish;
use crate::callers;
use crate::message::prepared::Parts;

/// Parser settings for the answers of a request.
#[derive(Clone, Debug)]
pub struct Parsing {
    /// Tool call format; `None` if the request has no tools.
    format: Option<&'static ToolFormat>,
    /// Reasoning format of the model, if reasoning is parsed, and whether an answer begins within the reasoning.
    thinking: Option<(&'static Thinking, Option<bool>)>,
    /// Tools that the model may call.
    tools: Arc<Tools>,
    /// Parser settings as Python sent them, unresolved.
    pub parts: Parts,
}

impl Parsing {
    /// Resolves the settings that Python sent. `None` if a schema is not JSON or a format is unknown here.
    pub fn new(parts: Parts) -> Option<Parsing> {
        let format = match parts.tool_format {
            Some(index) => Some(TOOL_FORMATS.get(index)?),
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
    /// Returns a scanner that separates an answer's content from reasoning and tool calls.
    pub fn scan(&self) -> ContentScan {
        ContentScan::new(self.format, self.thinking, &self.tools)
    }
}

/// A tool call, complete or as far as it was generated.
pub struct Call {
    /// Random id of the tool call, as in the response.
    pub id: String,
    /// Name of the called tool.
    pub name: String,
    /// JSON text of the arguments, as far as it was generated.
    pub arguments: String,
}

/// Parser state of one answer, with the parsed parts of a response that is not streamed.
pub struct Parsed {
    parser: AnswerParser,
    tokenizer: Arc<Tokenizer>,
    /// Whether reasoning is separated from the content.
    pub thinks: bool,
    /// Whether the response shows the reasoning.
    pub shows_thoughts: bool,
    think_end: Option<i32>,
    named_call: bool,
    stores_parts: bool,
    has_thought: bool,
    has_called: bool,
    /// Indices of calls that a whole response omits: their arguments are incomplete or invalid.
    broken: Vec<usize>,
    /// Content so far, if the response is not streamed.
    pub content: String,
    /// Reasoning so far, if the response is not streamed or reasoning tokens are counted by text.
    pub reasoning: String,
    /// Tool calls so far, if the response is not streamed.
    pub calls: Vec<Call>,
}

impl Parsed {
    /// Makes the parser of one answer. `stores_parts`: the parts are stored, for a response that is not streamed.
    pub fn new(parsing: &Parsing, tokenizer: &Arc<Tokenizer>, stores_parts: bool) -> Parsed {
        let new_id = Box::new(callers::random_id);
        Parsed {
            parser: AnswerParser::new(parsing.format, parsing.thinking, Arc::clone(&parsing.tools), new_id),
            tokenizer: Arc::clone(tokenizer),
            thinks: parsing.thinking.is_some(),
            shows_thoughts: parsing.parts.shows_thoughts,
            think_end: parsing.parts.think_end,
            named_call: parsing.parts.named_call,
            stores_parts,
            has_thought: false,
            has_called: false,
            broken: Vec::new(),
            content: String::new(),
            reasoning: String::new(),
            calls: Vec::new(),
        }
    }

    /// Parses new text and returns the new parts, including text that was held back if the answer ends with `finish`.
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
            Part::Text(text) if self.stores_parts => self.content.push_str(text),
            Part::Reasoning(text) => {
                self.has_thought = true;
                if self.stores_parts || self.think_end.is_none() {
                    self.reasoning.push_str(text);
                }
            }
            Part::CallBegun { id, name, .. } => {
                self.has_called = true;
                if self.stores_parts {
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

    /// Returns the complete tool calls of an answer that has ended.
    pub fn whole_calls(&self) -> impl Iterator<Item = &Call> {
        let calls = self.calls.iter().enumerate();
        calls.filter(|(at, _)| !self.broken.contains(at)).map(|(_, call)| call)
    }

    /// Returns true if a streamed response shows `part`: reasoning may be hidden.
    pub fn shows(&self, part: &Part) -> bool {
        self.shows_thoughts || !matches!(part, Part::Reasoning(_))
    }

    /// Returns true if the ended answer calls tools. Broken calls do not count, and a stream with one counts as calling
    /// none.
    fn calls_tools(&self) -> bool {
        if self.stores_parts {
            self.whole_calls().next().is_some()
        } else {
            self.has_called && self.broken.is_empty()
        }
    }

    /// Returns OpenAI's finish reason: `tool_calls` instead of `stop` if the answer calls tools that it chose itself.
    pub fn reason(&self, finish: &'static str) -> &'static str {
        if finish == "stop" && !self.named_call && self.calls_tools() {
            "tool_calls"
        } else {
            finish
        }
    }

    /// Returns the number of reasoning tokens with the end marker: `ended`, or `all` generated ones if there is no
    /// marker.
    pub fn num_reasoning_tokens(&self, ended: Option<usize>, all: usize) -> usize {
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
