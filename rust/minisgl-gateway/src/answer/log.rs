//! The access log: one line on stderr for each request that the gateway answered, as `server/core/request.py` and `log.py`
//! write it. A line is one write: lines of both servers do not mix.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Instant;

use serde_json::Value;

use crate::config::LogConfig;
use crate::http::Head;

use super::json::json_text;

/// What became of a request.
#[derive(Clone, Debug)]
pub struct About {
    /// When it came.
    pub arrival: Instant,
    /// None: the client left before an answer began.
    pub status: Option<u16>,
    /// Tokens of all prompts and choices: given, found in the cache (of those that have ended), generated.
    pub tokens: Option<(usize, i64, usize)>,
    /// Time to the first token.
    pub ttft_s: Option<f64>,
    /// How its choices ended.
    pub finish_reasons: Vec<&'static str>,
    /// The code of its error.
    pub error: Option<String>,
}

impl About {
    /// Nothing has, but that it came.
    pub fn new(arrival: Instant) -> About {
        About {
            arrival,
            status: None,
            tokens: None,
            ttft_s: None,
            finish_reasons: Vec::new(),
            error: None,
        }
    }
}

/// What the line of one request tells.
pub struct Line<'a> {
    /// Its id.
    pub request_id: &'a str,
    /// It has method and path.
    pub head: &'a Head,
    /// Name of its caller's API key, where there are several.
    pub key: Option<&'a str>,
    /// Its default length, if the server was busy.
    pub shortened_to: Option<&'a str>,
    /// The rest.
    pub about: &'a About,
}

impl Line<'_> {
    fn fields(&self) -> Vec<(&'static str, Value)> {
        let about = self.about;
        let mut found: Vec<(_, Value)> = vec![
            ("request_id", self.request_id.into()),
            ("method", self.head.method.as_str().into()),
            ("path", self.head.target.as_str().into()),
            ("status", about.status.map_or("gone".into(), Value::from)),
            ("e2e_s", seconds(about.arrival.elapsed().as_secs_f64())),
        ];
        found.extend(self.key.map(|name| ("key", name.into())));
        if let Some((prompt, cached, generated)) = about.tokens {
            found.push(("prompt_tokens", prompt.into()));
            found.push(("cached_tokens", cached.into()));
            found.push(("generated_tokens", generated.into()));
        }
        found.extend(self.shortened_to.map(|lengths| ("shortened_to", lengths.into())));
        found.extend(about.ttft_s.map(|ttft_s| ("ttft_s", seconds(ttft_s))));
        if !about.finish_reasons.is_empty() {
            let mut reasons = about.finish_reasons.clone();
            reasons.sort_unstable();
            reasons.dedup();
            found.push(("finish_reason", reasons.join(",").into()));
        }
        found.extend(about.error.as_deref().map(|code| ("error", code.into())));
        found
    }

    /// Writes it.
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

/// A line of the server's own.
pub fn say(level: &str, message: &str) {
    write_line(&text(level, "minisgl.server", message, &[], false));
}

/// As Python shows a number of seconds rounded to four places.
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
        let shown = |char: char| char == '\n' || !char.is_control(); // else a terminal would take it for a code
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
    let _ = std::io::stderr().lock().write_all(line.as_bytes()); // whoever read it is gone: nobody to tell
}

/// UTC with milliseconds.
fn now() -> String {
    chrono::Utc::now().format("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}
