//! Answers to POST /v1/messages: a message of blocks, or the events that tell how it grows (`server/messages`).
//!
//! Invariants: deltas of a block joined are the block that would have come whole.

use std::io::Write as _;

use minisgl_text::answer::Part;
use serde_json::{Map, Value, json};

use super::choice::{End, Finish};
use super::json::{Usage, write_receipt, write_text};
use super::sections::{Change, Kind, Section, Sections, Story};
use crate::callers;

/// A message as it grows.
pub struct MessageShape {
    head: String, // up to the content
    sections: Sections,
}

impl MessageShape {
    /// `model`: its name, as JSON.
    pub fn new(model: &str) -> MessageShape {
        let id = callers::random_hex();
        MessageShape {
            head: format!(r#""id":"msg_{id}","type":"message","role":"assistant","model":{model}"#),
            sections: Sections::default(),
        }
    }

    fn write_stop(&self, end: End<'_>, out: &mut Vec<u8>) {
        let has_called = self.sections.all.iter().any(|one| one.kind == Kind::Call);
        let (reason, matched) = match (end.matched, end.reason) {
            (Some(matched), _) => ("stop_sequence", matched),
            (None, Some("length")) => ("max_tokens", "null"),
            _ if has_called => ("tool_use", "null"),
            _ => ("end_turn", "null"),
        };
        let _ = write!(out, r#""stop_reason":"{reason}","stop_sequence":{matched}"#);
    }
}

impl Story for MessageShape {
    fn begin(&mut self, usage: Usage, out: &mut Vec<u8>) {
        let _ = write!(
            out,
            "event: message_start\ndata: {{\"type\":\"message_start\",\"message\":{{{},\"content\":[],\
             \"stop_reason\":null,\"stop_sequence\":null,\"usage\":",
            self.head
        );
        write_usage(Usage { completion: 0, ..usage }, out);
        out.extend_from_slice(b"}}\n\nevent: ping\ndata: {\"type\":\"ping\"}\n\n");
    }

    fn take(&mut self, parts: Vec<Part>, finish: Option<Finish>, out: &mut Vec<u8>) {
        for change in self.sections.take(parts, finish.is_some()) {
            match change {
                Change::Opened(at) => {
                    let block = begun(&self.sections.all[at]);
                    event(
                        "content_block_start",
                        &format!(r#","index":{at},"content_block":{block}"#),
                        out,
                    );
                }
                Change::Grown(at, text) => {
                    let (kind, name) = match self.sections.all[at].kind {
                        Kind::Call => ("input_json_delta", "partial_json"),
                        Kind::Reasoning => ("thinking_delta", "thinking"),
                        Kind::Text => ("text_delta", "text"),
                    };
                    let _ = write!(
                        out,
                        "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"index\":{at},\
                         \"delta\":{{\"type\":\"{kind}\",\"{name}\":"
                    );
                    write_text(out, &text);
                    out.extend_from_slice(b"}}\n\n");
                }
                Change::Closed(at) => event("content_block_stop", &format!(r#","index":{at}"#), out),
            }
        }
    }

    fn end(&mut self, end: End<'_>, usage: Usage, out: &mut Vec<u8>) {
        out.extend_from_slice(b"event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{");
        self.write_stop(end, out);
        out.extend_from_slice(b"},\"usage\":");
        write_usage(usage, out);
        write_receipt(out, end.receipt);
        out.extend_from_slice(b"}\n\n");
        event("message_stop", "", out);
    }

    fn error(&mut self, body: &Value, out: &mut Vec<u8>) {
        let _ = write!(out, "event: error\ndata: {body}\n\n");
    }

    fn whole(&mut self, end: End<'_>, usage: Usage) -> Vec<u8> {
        let mut out = format!("{{{},\"content\":", self.head).into_bytes();
        let blocks: Vec<_> = self.sections.all.iter().map(block).collect();
        out.extend_from_slice(Value::from(blocks).to_string().as_bytes());
        out.push(b',');
        self.write_stop(end, &mut out);
        out.extend_from_slice(b",\"usage\":");
        write_usage(usage, &mut out);
        write_receipt(&mut out, end.receipt);
        out.push(b'}');
        out
    }
}

fn event(kind: &str, more: &str, out: &mut Vec<u8>) {
    let _ = write!(out, "event: {kind}\ndata: {{\"type\":\"{kind}\"{more}}}\n\n");
}

fn write_usage(usage: Usage, out: &mut Vec<u8>) {
    let input = usage.prompt as i64 - usage.cached;
    let _ = write!(
        out,
        r#"{{"input_tokens":{input},"cache_creation_input_tokens":0,"cache_read_input_tokens":{},"output_tokens":{}}}"#,
        usage.cached, usage.completion
    );
}

/// A block of which nothing has come.
fn begun(section: &Section) -> Value {
    match section.kind {
        Kind::Call => json!({"type": "tool_use", "id": section.call_id, "name": section.name, "input": {}}),
        Kind::Reasoning => json!({"type": "thinking", "thinking": "", "signature": ""}),
        Kind::Text => json!({"type": "text", "text": ""}),
    }
}

fn block(section: &Section) -> Value {
    let mut found = begun(section);
    match section.kind {
        // cut by `max_tokens` they are no JSON, and nothing that could be called
        Kind::Call => {
            found["input"] = serde_json::from_str::<Map<_, _>>(&section.text)
                .unwrap_or_default()
                .into()
        }
        Kind::Reasoning => found["thinking"] = section.text.as_str().into(),
        Kind::Text => found["text"] = section.text.as_str().into(),
    }
    found
}
