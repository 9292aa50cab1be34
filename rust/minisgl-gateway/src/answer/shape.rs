//! The shapes of answers, whole or streamed: `server/chat.py`, `completions.py` and `sglang.py`.
//!
//! Invariants: the same JSON as there, in the same order; all but the text of an event is formatted once.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Arc;

use minisgl_text::Tokenizer;
use minisgl_text::answer::Part;
use serde_json::{Map, Value};

use super::choice::{Choice, End, Finish};
use super::embedding::Vectors;
use super::errors::Failure;
use super::json::{Usage, json_text, write_receipt, write_text};
use super::logprobs::Logprobs;
use super::message_shape::MessageShape;
use super::parsed::Parsed;
use super::plan::{Endpoint, Plan};
use super::response_shape::{Keep, ResponseShape};

/// vLLM's clients read these fields of whole answers without looking whether they are there.
const NOT_ASKED_FOR: &[u8] = br#","prompt_logprobs":null,"prompt_token_ids":null"#;
const DONE: &[u8] = b"data: [DONE]\n\n";

impl Usage {
    /// With what was thought, once all has come.
    pub fn with_thoughts(mut self, choices: &[Choice], shown: &[Shown]) -> Usage {
        let parsed = choices.iter().zip(shown).filter_map(|(choice, shown)| {
            let parsed = shown.parsed.as_ref().filter(|one| one.thinks)?;
            Some(parsed.num_thought(choice.num_watched, choice.num_generated))
        });
        self.reasoning = parsed.reduce(|sum, one| sum + one);
        self
    }
}

/// What has come of a choice and is not sent yet: as a whole all of it.
pub struct Shown {
    /// Its text.
    pub text: String,
    /// If the request asks for them.
    pub logprobs: Option<Logprobs>,
    /// If it is taken apart.
    pub parsed: Option<Parsed>,
}

impl Shown {
    /// Of a choice of which nothing has come.
    pub fn new(plan: &Plan, tokenizer: &Arc<Tokenizer>) -> Shown {
        let parsed = plan.parsing.as_ref();
        let keeps = !plan.stream && !matches!(plan.endpoint, Endpoint::Messages | Endpoint::Responses);
        let logprobs = plan.shows_logprobs.then(|| match plan.endpoint {
            Endpoint::Completion => Logprobs::of_completion(tokenizer),
            _ => Logprobs::of_chat(tokenizer),
        });
        Shown {
            text: String::new(),
            logprobs,
            parsed: parsed.map(|parsing| Parsed::new(parsing, tokenizer, keeps)),
        }
    }
}

/// An answer that is a list of sections.
enum Story {
    Message(MessageShape),
    Response(ResponseShape),
}

/// How one request is shown.
pub struct Shape {
    endpoint: Endpoint,
    stream: bool,
    include_usage: bool,
    has_begun: bool,
    vectors: Vectors,
    story: Option<Story>,
    /// The model's name, as JSON.
    model: String,
    /// Up to the choices of an event, or of the whole answer.
    head: Vec<u8>,
    /// After the choices of an event.
    tail: &'static [u8],
}

impl Shape {
    /// `id` without the endpoint's prefix, `created` in seconds.
    pub fn new(endpoint: Endpoint, stream: bool, include_usage: bool, id: &str, created: u64, model: &str) -> Shape {
        let mut head = String::new();
        let model = json_text(model);
        let _ = match endpoint {
            Endpoint::Chat => {
                let object = if stream {
                    "chat.completion.chunk"
                } else {
                    "chat.completion"
                };
                write!(
                    head,
                    r#"{{"id":"chatcmpl-{id}","created":{created},"model":{model},"object":"{object}","choices":["#
                )
            }
            Endpoint::Completion => write!(
                head,
                r#"{{"id":"cmpl-{id}","object":"text_completion","created":{created},"model":{model},"choices":["#
            ),
            Endpoint::Generate => Ok(()),
            Endpoint::Messages | Endpoint::Responses => Ok(()),
            Endpoint::Embedding => write!(head, r#"{{"object":"list","data":["#),
        };
        let tail: &[u8] = if include_usage {
            b"],\"usage\":null}\n\n"
        } else {
            b"]}\n\n"
        };
        Shape {
            endpoint,
            stream,
            include_usage,
            has_begun: false,
            vectors: Vectors::default(),
            story: (endpoint == Endpoint::Messages).then(|| Story::Message(MessageShape::new(&model))),
            model,
            head: head.into_bytes(),
            tail,
        }
    }

    /// The same, of an answer that says this from its beginning on.
    pub fn with_head(mut self, head: Map<String, Value>, created: u64, model: &str, keep: Option<Keep>) -> Shape {
        self.story = Some(Story::Response(ResponseShape::new(head, created, model.into(), keep)));
        self
    }

    /// The same, with embeddings shown so.
    pub fn with_vectors(self, vectors: Vectors) -> Shape {
        Shape { vectors, ..self }
    }

    /// The media type of a stream.
    pub fn media_type(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Generate => "application/x-ndjson",
            _ => "text/event-stream; charset=utf-8",
        }
    }

    /// Whether the answer is streamed.
    pub fn streams(&self) -> bool {
        self.stream
    }

    /// Ids are part of the answer.
    pub fn shows_ids(endpoint: Endpoint, stream: bool) -> bool {
        endpoint == Endpoint::Generate && !stream
    }

    // ------------------------------------------------------------------------------------------------- as a stream

    /// The answer is a list of sections.
    pub fn tells(&self) -> bool {
        self.story.is_some()
    }

    /// Errors have Anthropic's shape.
    pub fn is_anthropic(&self) -> bool {
        self.endpoint == Endpoint::Messages
    }

    /// What has come of an answer that is a list of sections.
    pub fn tell(&mut self, shown: &mut Shown, finish: Option<Finish>, usage: Usage, out: &mut Vec<u8>) {
        let Some(story) = &mut self.story else { return };
        let text = std::mem::take(&mut shown.text);
        let parts = match &mut shown.parsed {
            Some(parsed) => parsed.take(&text, finish),
            None if text.is_empty() => Vec::new(),
            None => vec![Part::Text(text)],
        };
        match story {
            Story::Message(message) => {
                if self.stream {
                    message.begin(usage, out);
                }
                message.take(parts, finish, self.stream, out);
            }
            Story::Response(response) if self.stream => {
                response.begin(out);
                response.take(parts, finish, out);
            }
            Story::Response(response) => response.take(parts, finish, &mut Vec::new()),
        }
    }

    /// What comes before the first text: the roles go with the first tokens, an early failure is an HTTP error.
    pub fn begin(&mut self, num_choices: usize, out: &mut Vec<u8>) {
        if self.has_begun {
            return;
        }
        self.has_begun = true;
        if self.endpoint == Endpoint::Chat {
            for index in 0..num_choices {
                self.chat_event(index, br#"{"role":"assistant","content":""}"#, End::default(), out);
            }
        }
    }

    /// New text of a choice, and its end.
    pub fn event(&self, index: usize, shown: &mut Shown, end: End<'_>, usage: Usage, out: &mut Vec<u8>) {
        let text = &shown.text;
        match self.endpoint {
            Endpoint::Chat => {
                let logprobs = shown.logprobs.as_mut().filter(|one| !one.is_empty());
                if !text.is_empty() || logprobs.is_some() {
                    out.extend_from_slice(b"data: ");
                    out.extend_from_slice(&self.head);
                    let _ = write!(out, r#"{{"index":{index},"delta":{{"content":"#);
                    write_text(out, text);
                    out.extend_from_slice(br#"},"logprobs":"#);
                    write_logprobs(out, logprobs);
                    out.extend_from_slice(br#","finish_reason":null}"#);
                    out.extend_from_slice(self.tail);
                }
                if end.reason.is_some() {
                    self.chat_event(index, b"{}", end, out);
                }
            }
            Endpoint::Completion => {
                out.extend_from_slice(b"data: ");
                out.extend_from_slice(&self.head);
                completion_choice(index, shown, end, out);
                out.extend_from_slice(self.tail);
            }
            Endpoint::Generate => {
                if !text.is_empty() {
                    out.extend_from_slice(br#"{"text_delta":"#);
                    write_text(out, text);
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
            Endpoint::Embedding | Endpoint::Messages | Endpoint::Responses => {} // they are shown elsewhere
        }
    }

    /// The same of a choice that is taken apart. Log probabilities are those of the tokens that came, whatever has become
    /// of their text so far.
    pub fn parts(&self, index: usize, shown: &mut Shown, finish: Option<Finish>, mut end: End<'_>, out: &mut Vec<u8>) {
        let Shown { text, logprobs, parsed } = shown;
        let Some(parsed) = parsed else { return };
        let mut logprobs = logprobs.as_mut().filter(|one| !one.is_empty());
        let parts = parsed.take(text, finish);
        for part in parts.iter().filter(|part| parsed.shows(part)) {
            self.part(index, part, logprobs.take(), out);
        }
        if logprobs.is_some() {
            self.part(index, &Part::Text(String::new()), logprobs, out);
        }
        if let Some(reason) = end.reason {
            end.reason = Some(parsed.reason(reason));
            self.chat_event(index, b"{}", end, out);
        }
    }

    fn part(&self, index: usize, part: &Part, logprobs: Option<&mut Logprobs>, out: &mut Vec<u8>) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&self.head);
        let _ = write!(out, r#"{{"index":{index},"delta":{{"#);
        match part {
            Part::Text(text) => {
                out.extend_from_slice(br#""content":"#);
                write_text(out, text);
            }
            Part::Reasoning(text) => {
                out.extend_from_slice(br#""reasoning_content":"#);
                write_text(out, text);
                out.extend_from_slice(br#","reasoning":"#);
                write_text(out, text);
            }
            Part::CallBegun { index, id, name } => {
                let _ = write!(out, r#""tool_calls":[{{"index":{index},"id":"#);
                write_text(out, id);
                out.extend_from_slice(br#","type":"function","function":{"name":"#);
                write_text(out, name);
                out.extend_from_slice(br#","arguments":""}}]"#);
            }
            Part::CallArguments(index, text) => {
                let _ = write!(out, r#""tool_calls":[{{"index":{index},"function":{{"arguments":"#);
                write_text(out, text);
                out.extend_from_slice(b"}}]");
            }
        }
        out.extend_from_slice(br#"},"logprobs":"#);
        write_logprobs(out, logprobs);
        out.extend_from_slice(br#","finish_reason":null}"#);
        out.extend_from_slice(self.tail);
    }

    fn chat_event(&self, index: usize, delta: &[u8], end: End<'_>, out: &mut Vec<u8>) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&self.head);
        let _ = write!(out, r#"{{"index":{index},"delta":"#);
        out.extend_from_slice(delta);
        out.extend_from_slice(br#","logprobs":null,"finish_reason":"#);
        write_finish(out, end);
        out.push(b'}');
        out.extend_from_slice(self.tail);
    }

    /// What comes after every choice has ended.
    pub fn end(&mut self, usage: Usage, end: End<'_>, out: &mut Vec<u8>) {
        match &mut self.story {
            Some(Story::Message(message)) => return message.end(end, usage, out),
            Some(Story::Response(response)) => return response.end(end, usage, out),
            None => {}
        }
        if self.endpoint == Endpoint::Generate {
            return;
        }
        if self.include_usage {
            out.extend_from_slice(b"data: ");
            out.extend_from_slice(&self.head);
            out.extend_from_slice(br#"],"usage":"#);
            usage.write(out);
            out.extend_from_slice(b"}\n\n");
        }
        out.extend_from_slice(DONE);
    }

    /// The last part instead, if a choice fails.
    pub fn error(&mut self, body: &Value, out: &mut Vec<u8>) {
        match &mut self.story {
            Some(Story::Message(_)) => return MessageShape::error(body, out),
            Some(Story::Response(response)) => return response.error(body, out),
            None => {}
        }
        let body = body.to_string();
        if self.endpoint == Endpoint::Generate {
            out.extend_from_slice(body.as_bytes());
            out.push(b'\n');
            return;
        }
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(body.as_bytes());
        out.extend_from_slice(b"\n\n");
        out.extend_from_slice(DONE);
    }

    // ---------------------------------------------------------------------------------------------------- as a whole

    /// The whole answer; `shown` by choice.
    pub fn whole(&mut self, choices: &[Choice], shown: &mut [Shown], usage: Usage) -> Result<Vec<u8>, Failure> {
        if let (Some(story), Some(choice)) = (&mut self.story, choices.first()) {
            return Ok(match story {
                Story::Message(message) => message.whole(choice.end(), usage),
                Story::Response(response) => response.whole(choice.end(), usage).to_string().into_bytes(),
            });
        }
        let mut out = self.head.clone();
        if self.endpoint == Endpoint::Embedding {
            self.vectors.write(choices, &mut out)?;
            let (model, prompt) = (&self.model, usage.prompt);
            let _ = write!(
                out,
                r#"],"model":{model},"usage":{{"prompt_tokens":{prompt},"total_tokens":{prompt}}}}}"#
            );
            return Ok(out);
        }
        let shown = choices.iter().zip(shown);
        if self.endpoint == Endpoint::Generate {
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
            return Ok(out);
        }
        for (index, (choice, shown)) in shown.enumerate() {
            if index > 0 {
                out.push(b',');
            }
            if self.endpoint == Endpoint::Completion {
                completion_choice(index, shown, choice.end(), &mut out);
                out.pop();
                out.extend_from_slice(NOT_ASKED_FOR);
                out.push(b'}');
                continue;
            }
            let _ = write!(out, r#"{{"index":{index},"message":"#);
            let mut end = choice.end();
            match &shown.parsed {
                None => write_message(&shown.text, &mut out),
                Some(parsed) => {
                    write_parsed(parsed, &mut out);
                    end.reason = end.reason.map(|reason| parsed.reason(reason));
                }
            }
            out.extend_from_slice(br#","logprobs":"#);
            write_logprobs(&mut out, shown.logprobs.as_mut());
            out.extend_from_slice(br#","finish_reason":"#);
            write_finish(&mut out, end);
            out.push(b'}');
        }
        out.extend_from_slice(br#"],"usage":"#);
        usage.write(&mut out);
        if self.endpoint == Endpoint::Chat {
            out.extend_from_slice(NOT_ASKED_FOR);
        }
        out.push(b'}');
        Ok(out)
    }
}

fn write_message(content: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(br#"{"role":"assistant","content":"#);
    write_text(out, content);
    out.extend_from_slice(br#","refusal":null}"#);
}

fn write_parsed(parsed: &Parsed, out: &mut Vec<u8>) {
    let or_null = |text: &str, out: &mut Vec<u8>| {
        if text.is_empty() {
            out.extend_from_slice(b"null");
        } else {
            write_text(out, text);
        }
    };
    out.extend_from_slice(br#"{"role":"assistant","content":"#);
    if parsed.calls.is_empty() {
        write_text(out, &parsed.content);
    } else {
        or_null(&parsed.content, out);
    }
    out.extend_from_slice(br#","refusal":null"#);
    if parsed.thinks && parsed.shows_thoughts {
        for name in ["reasoning_content", "reasoning"] {
            let _ = write!(out, r#","{name}":"#);
            or_null(&parsed.reasoning, out);
        }
    }
    for (at, call) in parsed.calls.iter().enumerate() {
        out.extend_from_slice(if at == 0 { br#","tool_calls":["# } else { b"," });
        out.extend_from_slice(br#"{"id":"#);
        write_text(out, &call.id);
        out.extend_from_slice(br#","type":"function","function":{"name":"#);
        write_text(out, &call.name);
        out.extend_from_slice(br#","arguments":"#);
        write_text(out, &call.arguments);
        out.extend_from_slice(b"}}");
    }
    if !parsed.calls.is_empty() {
        out.push(b']');
    }
    out.push(b'}');
}

fn completion_choice(index: usize, shown: &mut Shown, end: End<'_>, out: &mut Vec<u8>) {
    let _ = write!(out, r#"{{"index":{index},"text":"#);
    write_text(out, &shown.text);
    out.extend_from_slice(br#","logprobs":"#);
    write_logprobs(out, shown.logprobs.as_mut());
    out.extend_from_slice(br#","finish_reason":"#);
    write_finish(out, end);
    out.push(b'}');
}

fn write_finish(out: &mut Vec<u8>, end: End<'_>) {
    match end.reason {
        Some(reason) => {
            let _ = write!(out, "\"{reason}\"");
        }
        None => out.extend_from_slice(b"null"),
    }
    if let Some(matched) = end.matched {
        let _ = write!(out, r#","matched_stop":{matched}"#);
    }
    write_receipt(out, end.receipt);
}

fn write_logprobs(out: &mut Vec<u8>, logprobs: Option<&mut Logprobs>) {
    match logprobs {
        Some(logprobs) => logprobs.write(out),
        None => out.extend_from_slice(b"null"),
    }
}
