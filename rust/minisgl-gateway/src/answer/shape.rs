//! Shapes of responses, whole or streamed (`server/apis/openai/chat.py`, `completions.py` and `sglang/endpoint.py`).
//!
//! Invariants: the same JSON as there, with the same order of fields; all but an event's text is formatted once.

use std::io::Write as _;
use std::sync::Arc;

use minisgl_text::Tokenizer;
use minisgl_text::answer::Part;
use serde_json::Value;

use super::choice::{Choice, End, Finish};
use super::json::{Usage, json_text, write_text};
use super::logprobs::Logprobs;
use super::parsed::{Parsed, Parsing};
use crate::message::prepared::{Generation, Shape as Kind};

/// Fields that vLLM's clients read from whole responses without checking that they exist.
const NULL_FIELDS: &[u8] = br#","prompt_logprobs":null,"prompt_token_ids":null"#;
const DONE: &str = "data: [DONE]\n\n";

impl Usage {
    /// Adds the number of reasoning tokens, for choices that have ended.
    pub fn with_reasoning(mut self, choices: &[Choice], shown: &[ChoiceOutput]) -> Usage {
        let parsed = choices.iter().zip(shown).filter_map(|(choice, shown)| {
            let parsed = shown.parsed.as_ref().filter(|one| one.thinks)?;
            Some(parsed.num_reasoning_tokens(choice.num_watched, choice.num_generated))
        });
        self.reasoning = parsed.reduce(|sum, one| sum + one);
        self
    }
}

/// Unsent output of a choice; for a whole response, all of its output.
pub struct ChoiceOutput {
    /// Detokenized text that has not been sent.
    pub text: String,
    /// Log probabilities, if the request asks for them.
    pub logprobs: Option<Logprobs>,
    /// Parser, if the answer is parsed into content, reasoning and tool calls.
    pub parsed: Option<Parsed>,
}

impl ChoiceOutput {
    /// Makes the empty output state of one choice of the request.
    pub fn new(request: &Generation, parsing: Option<&Parsing>, tokenizer: &Arc<Tokenizer>) -> ChoiceOutput {
        let logprobs = request.shows_logprobs.then(|| match request.shape {
            Kind::Completion => Logprobs::for_completion(tokenizer),
            _ => Logprobs::for_chat(tokenizer),
        });
        ChoiceOutput {
            text: String::new(),
            logprobs,
            parsed: parsing.map(|parsing| Parsed::new(parsing, tokenizer, !request.stream)),
        }
    }
}

/// Shape of the response to one request, with the state of its stream.
pub struct Shape {
    kind: Kind,
    stream: bool,
    include_usage: bool,
    has_begun: bool,
    /// JSON before the choices of an event, or of the whole response.
    head: Vec<u8>,
    /// JSON after the choices of an event.
    tail: &'static [u8],
}

impl Shape {
    /// Makes the shape of the response to a request.
    pub fn new(request: &Generation) -> Shape {
        let (id, created, model) = (&request.id, request.created, json_text(&request.model));
        let chunk = if request.stream { ".chunk" } else { "" };
        let head = match request.shape {
            Kind::Chat => format!(
                r#"{{"id":"{id}","created":{created},"model":{model},"object":"chat.completion{chunk}","choices":["#
            ),
            Kind::Completion => {
                format!(r#"{{"id":"{id}","object":"text_completion","created":{created},"model":{model},"choices":["#)
            }
            Kind::Generate => String::new(),
        };
        let tail: &[u8] = if request.include_usage {
            b"],\"usage\":null}\n\n"
        } else {
            b"]}\n\n"
        };
        Shape {
            kind: request.shape,
            stream: request.stream,
            include_usage: request.include_usage,
            has_begun: false,
            head: head.into_bytes(),
            tail,
        }
    }

    /// Returns the media type of a streamed response.
    pub fn media_type(&self) -> &'static str {
        match self.kind {
            Kind::Generate => "application/x-ndjson",
            _ => "text/event-stream; charset=utf-8",
        }
    }

    /// Returns true if the response is streamed.
    pub fn streams(&self) -> bool {
        self.stream
    }

    // ------------------------------------------------------------------------------------------------- as a stream

    /// Appends the roles of chat. They wait for the first tokens, so that an early failure can still be an HTTP error.
    pub fn begin(&mut self, num_choices: usize, out: &mut Vec<u8>) {
        if std::mem::replace(&mut self.has_begun, true) || self.kind != Kind::Chat {
            return;
        }
        for index in 0..num_choices {
            let role = br#""role":"assistant","content":"""#;
            self.chat_event(index, |out| out.extend_from_slice(role), None, End::default(), out);
        }
    }

    /// Appends the events for new output of a choice and for its end. Log probabilities are sent for every new token,
    /// even if its text is not complete yet.
    pub fn event(
        &self,
        index: usize,
        shown: &mut ChoiceOutput,
        finish: Option<Finish>,
        mut end: End<'_>,
        usage: Usage,
        out: &mut Vec<u8>,
    ) {
        match self.kind {
            Kind::Completion => {
                out.extend_from_slice(b"data: ");
                out.extend_from_slice(&self.head);
                completion_choice(index, shown, end, out);
                out.extend_from_slice(self.tail);
            }
            Kind::Generate => {
                if !shown.text.is_empty() {
                    out.extend_from_slice(br#"{"text_delta":"#);
                    write_text(out, &shown.text);
                    out.extend_from_slice(b"}\n");
                }
                if end.reason.is_some() {
                    out.extend_from_slice(br#"{"event":"done","finish_reason":"#);
                    write_finish(out, end);
                    out.extend_from_slice(br#","usage":"#);
                    usage.write(out);
                    out.extend_from_slice(b"}\n");
                }
            }
            _ => {
                let ChoiceOutput { text, logprobs, parsed } = shown;
                let mut logprobs = logprobs.as_mut().filter(|one| !one.is_empty());
                let none = End::default();
                if let Some(parsed) = parsed {
                    let parts = parsed.take(text, finish);
                    for part in parts.iter().filter(|part| parsed.shows(part)) {
                        self.chat_event(index, |out| write_part(part, out), logprobs.take(), none, out);
                    }
                    end.reason = end.reason.map(|reason| parsed.reason(reason));
                } else if !text.is_empty() {
                    self.chat_event(index, |out| write_content(text, out), logprobs.take(), none, out);
                }
                if logprobs.is_some() {
                    self.chat_event(index, |out| write_content("", out), logprobs, none, out);
                }
                if end.reason.is_some() {
                    self.chat_event(index, |_| (), None, end, out);
                }
            }
        }
    }

    fn chat_event(
        &self,
        index: usize,
        delta: impl FnOnce(&mut Vec<u8>),
        logprobs: Option<&mut Logprobs>,
        end: End<'_>,
        out: &mut Vec<u8>,
    ) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&self.head);
        let _ = write!(out, r#"{{"index":{index},"delta":{{"#);
        delta(out);
        out.push(b'}');
        write_end(logprobs, end, out);
        out.extend_from_slice(self.tail);
    }

    /// Returns the event that keeps an idle stream alive. It may be sent between any two events.
    pub fn ping(&self) -> &'static [u8] {
        match self.kind {
            Kind::Generate => b"{\"text_delta\":\"\"}\n",
            _ => b": ping\n\n",
        }
    }

    /// Appends the last events of a stream, after all choices have ended.
    pub fn end(&self, usage: Usage, out: &mut Vec<u8>) {
        if self.kind == Kind::Generate {
            return;
        }
        if self.include_usage {
            out.extend_from_slice(b"data: ");
            out.extend_from_slice(&self.head);
            out.extend_from_slice(br#"],"usage":"#);
            usage.write(out);
            out.extend_from_slice(b"}\n\n");
        }
        out.extend_from_slice(DONE.as_bytes());
    }

    /// Appends the last event of a stream that fails.
    pub fn error(&self, body: &Value, out: &mut Vec<u8>) {
        let _ = match self.kind {
            Kind::Generate => writeln!(out, "{body}"),
            _ => write!(out, "data: {body}\n\n{DONE}"),
        };
    }

    // ---------------------------------------------------------------------------------------------------- as a whole

    /// Returns the body of a whole response; `shown` holds the output of each choice.
    pub fn whole(&self, choices: &[Choice], shown: &mut [ChoiceOutput], usage: Usage) -> Vec<u8> {
        let mut out = self.head.clone();
        let shown = choices.iter().zip(shown);
        if self.kind == Kind::Generate {
            for (choice, shown) in shown {
                out.extend_from_slice(br#"{"text":"#);
                write_text(&mut out, &shown.text);
                out.extend_from_slice(br#","token_ids":"#);
                let _ = serde_json::to_writer(&mut out, choice.ids());
                out.extend_from_slice(br#","finish_reason":"#);
                write_finish(&mut out, choice.end());
            }
            out.extend_from_slice(br#","usage":"#);
            usage.write(&mut out);
            out.push(b'}');
            return out;
        }
        for (index, (choice, shown)) in shown.enumerate() {
            if index > 0 {
                out.push(b',');
            }
            if self.kind == Kind::Completion {
                completion_choice(index, shown, choice.end(), &mut out);
                out.pop();
                out.extend_from_slice(NULL_FIELDS);
                out.push(b'}');
                continue;
            }
            let _ = write!(out, r#"{{"index":{index},"message":"#);
            let (mut end, parsed) = (choice.end(), shown.parsed.as_ref());
            write_message(&shown.text, parsed, &mut out);
            end.reason = end.reason.map(|reason| parsed.map_or(reason, |one| one.reason(reason)));
            write_end(shown.logprobs.as_mut(), end, &mut out);
        }
        out.extend_from_slice(br#"],"usage":"#);
        usage.write(&mut out);
        if self.kind == Kind::Chat {
            out.extend_from_slice(NULL_FIELDS);
        }
        out.push(b'}');
        out
    }
}

fn write_content(text: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(br#""content":"#);
    write_text(out, text);
}

/// Appends the fields of a chat delta (content, reasoning or a tool call) for one part.
fn write_part(part: &Part, out: &mut Vec<u8>) {
    match part {
        Part::Text(text) => write_content(text, out),
        Part::Reasoning(text) => {
            out.extend_from_slice(br#""reasoning_content":"#);
            write_text(out, text);
            out.extend_from_slice(br#","reasoning":"#);
            write_text(out, text);
        }
        Part::CallBegun { index, id, name } => {
            let _ = write!(out, r#""tool_calls":[{{"index":{index},"#);
            write_call(id, name, "", out);
            out.extend_from_slice(b"]");
        }
        Part::CallArguments(index, text) => {
            let _ = write!(out, r#""tool_calls":[{{"index":{index},"function":{{"arguments":"#);
            write_text(out, text);
            out.extend_from_slice(b"}}]");
        }
    }
}

/// Appends the fields and the closing braces of a tool call object.
fn write_call(id: &str, name: &str, arguments: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(br#""id":"#);
    write_text(out, id);
    out.extend_from_slice(br#","type":"function","function":{"name":"#);
    write_text(out, name);
    out.extend_from_slice(br#","arguments":"#);
    write_text(out, arguments);
    out.extend_from_slice(b"}}");
}

/// Appends a chat message object, from `text` or from the parts of the parsed answer.
fn write_message(text: &str, parsed: Option<&Parsed>, out: &mut Vec<u8>) {
    let text_or_null = |text: &str, out: &mut Vec<u8>| {
        let _ = serde_json::to_writer(out, &Some(text).filter(|text| !text.is_empty()));
    };
    out.extend_from_slice(br#"{"role":"assistant","content":"#);
    match parsed {
        None => write_text(out, text),
        Some(parsed) if parsed.whole_calls().next().is_none() => write_text(out, &parsed.content),
        Some(parsed) => text_or_null(&parsed.content, out),
    }
    out.extend_from_slice(br#","refusal":null"#);
    if let Some(parsed) = parsed.filter(|one| one.thinks && one.shows_thoughts) {
        for name in ["reasoning_content", "reasoning"] {
            let _ = write!(out, r#","{name}":"#);
            text_or_null(&parsed.reasoning, out);
        }
    }
    let mut has_calls = false;
    for call in parsed.into_iter().flat_map(Parsed::whole_calls) {
        out.extend_from_slice(if !std::mem::replace(&mut has_calls, true) {
            br#","tool_calls":[{"#
        } else {
            b",{"
        });
        write_call(&call.id, &call.name, &call.arguments, out);
    }
    out.extend_from_slice(if has_calls { b"]}" } else { b"}" });
}

fn completion_choice(index: usize, shown: &mut ChoiceOutput, end: End<'_>, out: &mut Vec<u8>) {
    let _ = write!(out, r#"{{"index":{index},"text":"#);
    write_text(out, &shown.text);
    write_end(shown.logprobs.as_mut(), end, out);
}

/// Appends the last fields of a choice object and its closing brace.
fn write_end(logprobs: Option<&mut Logprobs>, end: End<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(br#","logprobs":"#);
    match logprobs {
        Some(logprobs) => logprobs.write(out),
        None => out.extend_from_slice(b"null"),
    }
    out.extend_from_slice(br#","finish_reason":"#);
    write_finish(out, end);
    out.push(b'}');
}

fn write_finish(out: &mut Vec<u8>, end: End<'_>) {
    let _ = serde_json::to_writer(&mut *out, &end.reason); // `None` is written as null
    if let Some(matched) = end.matched {
        let _ = write!(out, r#","matched_stop":{matched}"#);
    }
}
