//! Access log: one line on stderr for each request that the gateway answered, in the format of `server/core/request.py`
//! and `log.py`. Each line is a single write, so lines of both servers do not mix.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Instant;

use serde_json::Value;

use crate::config::LogConfig;
use crate::http::Head;

use super::json::json_text;

/// Outcome of a request, for the access log.
#[derive(Clone, Debug)]
pub struct RequestRecord {
    /// Time at which the request arrived.
    pub arrival: Instant,
    /// HTTP status; `None` if the client disconnected before a response began.
    pub status: Option<u16>,
    /// Tokens of all prompts and choices: prompt tokens, cached tokens (of ended choices), generated tokens.
    pub tokens: Option<(usize, i64, usize)>,
    /// Time to the first token, in seconds.
    pub ttft_s: Option<f64>,
    /// Finish reasons of the request's choices, in the order of their ends.
    pub finish_reasons: Vec<&'static str>,
    /// Error code, if the request failed; else `None`.
    pub error: Option<String>,
}

impl RequestRecord {
    /// Makes the record of a request that has just arrived.
    pub fn new(arrival: Instant) -> RequestRecord {
        RequestRecord {
            arrival,
            status: None,
            tokens: None,
            ttft_s: None,
            finish_reasons: Vec::new(),
            error: None,
        }
    }
}

/// Fields of a line of the access log, which describes a single request.
pub struct AccessLine<'a> {
    /// Request id, as in the `x-request-id` header.
    pub request_id: &'a str,
    /// Request header, with method and path.
    pub head: &'a Head,
    /// Name of the caller's API key, if there are several keys.
    pub key: Option<&'a str>,
    /// Default token limit that a busy server reduced for the request.
    pub shortened_to: Option<&'a str>,
    /// Outcome of the request that the line describes.
    pub record: &'a RequestRecord,
}

impl<'a> AccessLine<'a> {
    /// Makes the line of a request without an API key.
    pub fn new(request_id: &'a str, head: &'a Head, record: &'a RequestRecord) -> Self {
        Self {
            request_id,
            head,
            key: None,
            shortened_to: None,
            record,
        }
    }

    fn fields(&self) -> Vec<(&'static str, Value)> {
        let record = self.record;
        let mut fields: Vec<(_, Value)> = vec![
            ("request_id", self.request_id.into()),
            ("method", self.head.method.as_str().into()),
            ("path", self.head.target.as_str().into()),
            ("status", record.status.map_or("gone".into(), Value::from)),
            ("e2e_s", seconds(record.arrival.elapsed().as_secs_f64())),
        ];
        fields.extend(self.key.map(|name| ("key", name.into())));
        if let Some((prompt, cached, generated)) = record.tokens {
            fields.push(("prompt_tokens", prompt.into()));
            fields.push(("cached_tokens", cached.into()));
            fields.push(("generated_tokens", generated.into()));
        }
        fields.extend(self.shortened_to.map(|lengths| ("shortened_to", lengths.into())));
        fields.extend(record.ttft_s.map(|ttft_s| ("ttft_s", seconds(ttft_s))));
        if !record.finish_reasons.is_empty() {
            let mut reasons = record.finish_reasons.clone();
            reasons.sort_unstable();
            reasons.dedup();
            fields.push(("finish_reason", reasons.join(",").into()));
        }
        fields.extend(record.error.as_deref().map(|code| ("error", code.into())));
        fields
    }

    /// Writes the line to stderr if access logging is on.
    pub fn log(&self, config: &LogConfig) {
        if config.access {
            let time = if config.times {
                chrono::Local::now().format("%H:%M:%S ").to_string()
            } else {
                String::new()
            };
            let line = text("info", "minisgl.access", "request", &self.fields(), config.json);
            write_line(&if config.json { line } else { time + &line });
        }
    }
}

/// Writes a log line of the gateway itself to stderr. Times are not added.
pub fn log_line(level: &str, message: &str) {
    write_line(&text(level, "minisgl.server", message, &[], false));
}

/// Converts seconds, rounded to four decimal places, to a JSON number.
fn seconds(value: f64) -> Value {
    format!("{value:.4}").parse::<f64>().unwrap_or(value).into()
}

fn text(level: &str, logger: &str, event: &str, fields: &[(&str, Value)], json: bool) -> String {
    let mut out = String::new();
    if json {
        let _ = write!(
            out,
            "{{\"time\": \"{}\", \"level\": \"{level}\", \"logger\": \"{logger}\", \"event\": {}",
            now(),
            json_text(event)
        );
        for (name, value) in fields {
            let _ = write!(out, ", \"{name}\": {value}");
        }
        out.push('}');
    } else {
        let shown = |char: char| char == '\n' || !char.is_control(); // a terminal would interpret control characters
        for char in event.chars() {
            if shown(char) {
                out.push(char);
            } else {
                out.extend(char.escape_default());
            }
        }
        for (name, value) in fields {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let odd = |char: char| char.is_whitespace() || char.is_control() || "=\"".contains(char);
            let is_plain = !text.is_empty() && !text.chars().any(odd);
            let _ = if is_plain {
                write!(out, " {name}={text}")
            } else {
                write!(out, " {name}={}", json_text(&text))
            };
        }
    }
    out.push('\n');
    out
}

fn write_line(line: &str) {
    let _ = std::io::stderr().lock().write_all(line.as_bytes()); // an error means that stderr is closed
}

/// Returns the current UTC time with milliseconds, in ISO 8601.
fn now() -> String {
    chrono::Utc::now().format("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}
