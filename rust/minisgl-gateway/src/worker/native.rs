//! The GETs that need no Python: the list of models, and probes while Python runs.

use std::time::Instant;

use super::Worker;
use crate::answer::log::{About, Line};
use crate::callers::{self, Headers};
use crate::http::{Head, Outcome, Writer};

const OK: &[u8] = br#"{"status":"ok"}"#;

impl Worker {
    /// The body of a GET that needs no Python; None: pass it on.
    pub(super) fn native(&self, head: &Head) -> Option<(Vec<u8>, Headers)> {
        if head.method != "GET" || head.content_length != 0 {
            return None;
        }
        let loaded = self.loaded.borrow().clone();
        let is_livez = head.target == "/livez";
        let Some(loaded) = loaded else {
            // the configuration is not here yet: only for callers that any would let in
            let foreign = ["origin", "sec-fetch-site"].map(|name| matches!(head.header(name), Ok(None)));
            (is_livez && callers::is_local(head) && foreign == [true; 2]).then_some(())?;
            return Some((OK.to_vec(), vec![("x-request-id", callers::request_id(head)?)]));
        };
        let config = &loaded.config;
        let is_probe = is_livez || head.target == "/readyz";
        callers::may_ask(head, config, !is_probe)?;
        let headers = callers::headers(head, config, callers::request_id(head)?)?;
        let healthy = self.is_healthy();
        let alive = healthy && self.shared.python_runs(config.watch.silence_s);
        let body = match head.target.as_str() {
            "/livez" if alive => OK.to_vec(),
            "/readyz" if alive && !self.draining.get() => OK.to_vec(),
            "/v1/models" if healthy && !self.shared.has_adapters() => config.models.clone().into_bytes(),
            _ => return None,
        };
        Some((body, headers))
    }

    pub(super) fn answer_native(&self, head: &Head, writer: &Writer) -> Outcome {
        let arrival = Instant::now();
        let Some((body, headers)) = self.native(head) else {
            return Outcome::PassOn;
        };
        let pairs: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        writer.whole(200, "application/json", &pairs, &body);
        if let Some(loaded) = &*self.loaded.borrow() {
            let log = &loaded.config.log;
            if log.probes || head.target == "/v1/models" {
                let about = About {
                    status: Some(200),
                    ..About::new(arrival)
                };
                let line = Line {
                    request_id: &headers[0].1,
                    head,
                    key: None,
                    shortened_to: None,
                    about: &about,
                };
                line.log(log);
            }
        }
        Outcome::Answered
    }
}
