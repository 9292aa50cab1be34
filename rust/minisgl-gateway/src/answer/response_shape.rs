//! Answers to POST /v1/responses: an object with a list of items, or the events that tell how it grows
//! (`server/responses`).
//!
//! Invariants: each event has the next `sequence_number`; deltas of an item joined are its text when it is done; the
//! object that ends a stream is the one that would have come whole.

use std::io::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use minisgl_text::answer::Part;
use serde_json::{Map, Value, json};

use super::choice::{End, Finish};
use super::json::{Usage, write_text};
use super::sections::{Change, Kind, Sections, Story};
use crate::callers;

/// An answer as it grows.
pub struct ResponseShape {
    head: Map<String, Value>,
    sections: Sections,
    items: Vec<Value>, // by section
    num_events: usize,
    keep: Option<Keep>,
}

/// Takes the object of an answer that has ended, before its client has it.
pub type Keep = Box<dyn FnOnce(&Value)>;

impl ResponseShape {
    /// `head`: what the object says from its beginning on, but for id, time and the model's name.
    pub fn new(mut head: Map<String, Value>, created: u64, model: Value, keep: Option<Keep>) -> ResponseShape {
        head.insert("id".into(), format!("resp_{}", callers::random_hex()).into());
        head.insert("created_at".into(), created.into());
        head.insert("model".into(), model);
        ResponseShape {
            head,
            sections: Sections::default(),
            items: Vec::new(),
            num_events: 0,
            keep,
        }
    }

    fn object<'a>(&self, more: impl IntoIterator<Item = (&'a str, Value)>) -> Value {
        let mut found = self.head.clone();
        found.insert("output".into(), self.items.clone().into());
        found.extend(more.into_iter().map(|(name, value)| (name.to_owned(), value)));
        found.into()
    }

    /// Its fields follow.
    fn begin_event(&mut self, kind: &str, out: &mut Vec<u8>) {
        let number = self.num_events;
        self.num_events += 1;
        let _ = write!(
            out,
            "event: {kind}\ndata: {{\"type\":\"{kind}\",\"sequence_number\":{number}"
        );
    }

    fn event(&mut self, kind: &str, fields: &str, out: &mut Vec<u8>) {
        self.begin_event(kind, out);
        let _ = write!(out, ",{fields}}}\n\n");
    }

    /// As far as it has come; what is in progress is shown empty.
    fn item(&self, at: usize, status: &str) -> Value {
        let (section, begins) = (&self.sections.all[at], status == "in_progress");
        let id = if begins {
            let prefix = match section.kind {
                Kind::Reasoning => "rs",
                Kind::Text => "msg",
                Kind::Call => "fc",
            };
            format!("{prefix}_{}", callers::random_hex()).into()
        } else {
            self.items[at]["id"].clone()
        };
        let content = || {
            if begins {
                json!([])
            } else {
                json!([part(section.kind, &section.text)])
            }
        };
        match section.kind {
            Kind::Call => {
                let arguments = match &section.text {
                    _ if begins => "",
                    text if text.is_empty() => "{}",
                    text => text,
                };
                json!({"id": id, "status": status, "type": "function_call", "call_id": section.call_id,
                    "name": section.name, "arguments": arguments})
            }
            Kind::Reasoning => {
                json!({"id": id, "status": status, "type": "reasoning", "summary": [], "content": content()})
            }
            Kind::Text => {
                json!({"id": id, "status": status, "type": "message", "role": "assistant", "content": content()})
            }
        }
    }

    /// Where an item is, as events say it.
    fn place(&self, at: usize) -> String {
        let id = &self.items[at]["id"];
        let content = match self.sections.all[at].kind {
            Kind::Call => "",
            _ => r#","content_index":0"#,
        };
        format!(r#""item_id":{id},"output_index":{at}{content}"#)
    }

    fn open(&mut self, at: usize, out: &mut Vec<u8>) {
        let item = self.item(at, "in_progress");
        self.event(
            "response.output_item.added",
            &format!(r#""output_index":{at},"item":{item}"#),
            out,
        );
        self.items.push(item);
        let kind = self.sections.all[at].kind;
        if kind != Kind::Call {
            let fields = format!(r#"{},"part":{}"#, self.place(at), part(kind, ""));
            self.event("response.content_part.added", &fields, out);
        }
    }

    fn grow(&mut self, at: usize, text: &str, out: &mut Vec<u8>) {
        let (kind, place) = (self.sections.all[at].kind, self.place(at));
        let [delta, _] = events_of(kind);
        self.begin_event(delta, out);
        let _ = write!(out, r#",{place},"delta":"#);
        write_text(out, text);
        out.extend_from_slice(if kind == Kind::Text { br#","logprobs":[]"# } else { b"" });
        out.extend_from_slice(b"}\n\n");
    }

    /// `is_cut`: the answer is, and so its last item.
    fn close(&mut self, at: usize, is_cut: bool, out: &mut Vec<u8>) {
        let is_last = at + 1 == self.sections.all.len();
        let item = self.item(at, if is_cut && is_last { "incomplete" } else { "completed" });
        self.items[at] = item.clone();
        let (place, section) = (self.place(at), &self.sections.all[at]);
        let text = Value::from(section.text.as_str());
        let fields = match section.kind {
            Kind::Call => format!(r#"{place},"name":{},"arguments":{}"#, item["name"], item["arguments"]),
            Kind::Reasoning => format!(r#"{place},"text":{text}"#),
            Kind::Text => format!(r#"{place},"text":{text},"logprobs":[]"#),
        };
        let [_, done] = events_of(section.kind);
        self.event(done, &fields, out);
        if self.sections.all[at].kind != Kind::Call {
            let fields = format!(r#"{place},"part":{}"#, item["content"][0]);
            self.event("response.content_part.done", &fields, out);
        }
        let fields = format!(r#""output_index":{at},"item":{item}"#);
        self.event("response.output_item.done", &fields, out);
    }

    fn finished(&self, end: End<'_>, usage: Usage) -> Value {
        let usage = json!({
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning.unwrap_or(0)},
            "total_tokens": usage.prompt + usage.completion,
        });
        let receipt = end
            .receipt
            .and_then(|one| Some(("receipt", serde_json::from_str(one).ok()?)));
        let ends = [("usage", usage)].into_iter().chain(receipt);
        if end.reason == Some("length") {
            let why = json!({"reason": "max_output_tokens"});
            let status = ("status", "incomplete".into());
            return self.object(ends.chain([status, ("incomplete_details", why)]));
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |since| since.as_secs()).into();
        self.object(ends.chain([("status", "completed".into()), ("completed_at", now)]))
    }

    /// The whole object, which is kept if that is asked for.
    fn kept(&mut self, end: End<'_>, usage: Usage) -> Value {
        let object = self.finished(end, usage);
        if let Some(keep) = self.keep.take() {
            keep(&object);
        }
        object
    }
}

impl Story for ResponseShape {
    fn begin(&mut self, _: Usage, out: &mut Vec<u8>) {
        let object = self.object([("status", "in_progress".into())]);
        for kind in ["response.created", "response.in_progress"] {
            self.event(kind, &format!(r#""response":{object}"#), out);
        }
    }

    fn take(&mut self, parts: Vec<Part>, finish: Option<Finish>, out: &mut Vec<u8>) {
        for change in self.sections.take(parts, finish.is_some()) {
            match change {
                Change::Opened(at) => self.open(at, out),
                Change::Grown(at, text) => self.grow(at, &text, out),
                Change::Closed(at) => self.close(at, finish == Some(Finish::Length), out),
            }
        }
    }

    fn end(&mut self, end: End<'_>, usage: Usage, out: &mut Vec<u8>) {
        let object = self.kept(end, usage);
        let kind = format!("response.{}", object["status"].as_str().unwrap_or_default());
        self.event(&kind, &format!(r#""response":{object}"#), out);
    }

    fn error(&mut self, body: &Value, out: &mut Vec<u8>) {
        let error = json!({"code": "server_error", "message": body["error"]["message"]});
        let object = self.object([("status", "failed".into()), ("error", error)]);
        self.event("response.failed", &format!(r#""response":{object}"#), out);
    }

    fn whole(&mut self, end: End<'_>, usage: Usage) -> Vec<u8> {
        self.kept(end, usage).to_string().into_bytes()
    }
}

/// Those that say that there is more of a section, and that it has ended.
fn events_of(kind: Kind) -> [&'static str; 2] {
    match kind {
        Kind::Call => [
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
        ],
        Kind::Reasoning => ["response.reasoning_text.delta", "response.reasoning_text.done"],
        Kind::Text => ["response.output_text.delta", "response.output_text.done"],
    }
}

fn part(kind: Kind, text: &str) -> Value {
    match kind {
        Kind::Reasoning => json!({"type": "reasoning_text", "text": text}),
        _ => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
    }
}
