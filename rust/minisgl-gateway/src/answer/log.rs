//! The access log: one line on stderr for each request that the gateway answered, as `server/request.py` and `log.py`
//! write it. A line is one write: lines of both servers do not mix.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Instant;

use crate::config::LogConfig;

use super::json::json_text;

/// What the line of one request tells.
#[derive(Debug)]
pub struct Line<'a> {
    /// Its id.
    pub request_id: &'a str,
    /// `POST`.
    pub method: &'a str,
    /// Its path.
    pub path: &'a str,
    /// None: the client left before an answer began.
    pub status: Option<u16>,
    /// When it came.
    pub arrival: Instant,
    /// Name of its caller's API key, where there are several.
    pub key: Option<&'a str>,
    /// Its default length, if the server was busy.
    pub shortened_to: Option<String>,
    /// Tokens of all prompts and choices: given, found in the cache, generated.
    pub tokens: Option<(usize, i64, usize)>,
    /// Time to the first token.
    pub ttft_s: Option<f64>,
    /// How its choices ended.
    pub finish_reasons: Vec<&'static str>,
    /// The code of its error.
    pub error: Option<&'a str>,
}

impl Line<'_> {
    fn fields(&self) -> Vec<(&'static str, Value)> {
        let mut found = vec![
            ("request_id", Value::Text(self.request_id.to_owned())),
            ("method", Value::Text(self.method.to_owned())),
            ("path", Value::Text(self.path.to_owned())),
            (
                "status",
                self.status
                    .map_or(Value::Text("gone".into()), |one| Value::Plain(one.to_string())),
            ),
            ("e2e_s", Value::seconds(self.arrival.elapsed().as_secs_f64())),
        ];
        if let Some(name) = self.key {
            found.push(("key", Value::Text(name.to_owned())));
        }
        if let Some((prompt, cached, generated)) = self.tokens {
            found.push(("prompt_tokens", Value::Plain(prompt.to_string())));
            found.push(("cached_tokens", Value::Plain(cached.to_string())));
            found.push(("generated_tokens", Value::Plain(generated.to_string())));
        }
        if let Some(lengths) = &self.shortened_to {
            found.push(("shortened_to", Value::Text(lengths.clone())));
        }
        if let Some(seconds) = self.ttft_s {
            found.push(("ttft_s", Value::seconds(seconds)));
        }
        if !self.finish_reasons.is_empty() {
            let mut reasons = self.finish_reasons.clone();
            reasons.sort_unstable();
            reasons.dedup();
            found.push(("finish_reason", Value::Text(reasons.join(","))));
        }
        if let Some(code) = self.error {
            found.push(("error", Value::Text(code.to_owned())));
        }
        found
    }

    /// Writes it.
    pub fn log(&self, config: &LogConfig) {
        if config.access {
            write_line(&text("info", "minisgl.access", "request", &self.fields(), config.json));
        }
    }
}

/// A line of the server's own.
pub fn say(level: &str, message: &str, json: bool) {
    write_line(&text(level, "minisgl.server", message, &[], json));
}

enum Value {
    Text(String),
    Plain(String),
}

impl Value {
    /// As Python shows a number of seconds rounded to four places.
    fn seconds(value: f64) -> Value {
        let text = format!("{:.4}", value);
        let text = text.trim_end_matches('0');
        Value::Plain(if text.ends_with('.') {
            format!("{text}0")
        } else {
            text.to_owned()
        })
    }
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
            let _ = match value {
                Value::Text(text) => write!(out, ", \"{name}\": {}", json_text(text)),
                Value::Plain(text) => write!(out, ", \"{name}\": {text}"),
            };
        }
        out.push('}');
    } else {
        let shown = |char: char| char == '\n' || !char.is_control(); // else a terminal would take it for a code
        for char in event.chars() {
            if shown(char) {
                out.push(char);
            } else {
                out.extend(char.escape_default());
            }
        }
        for (name, value) in fields {
            let (Value::Text(text) | Value::Plain(text)) = value;
            let odd = |char: char| char.is_whitespace() || char.is_control() || "=\"".contains(char);
            let is_plain = !text.is_empty() && !text.chars().any(odd);
            let _ = if is_plain {
                write!(out, " {name}={text}")
            } else {
                write!(out, " {name}={}", json_text(text))
            };
        }
    }
    out.push('\n');
    out
}

fn write_line(line: &str) {
    let _ = std::io::stderr().lock().write_all(line.as_bytes()); // whoever read it is gone: nobody to tell
}

/// UTC with milliseconds.
fn now() -> String {
    chrono::Utc::now().format("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}
