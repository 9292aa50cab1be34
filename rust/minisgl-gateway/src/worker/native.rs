//! Probes that are answered without Python: `/livez` and `/readyz`.

use std::time::Instant;

use super::Worker;
use crate::answer::log::{AccessLine, RequestRecord};
use crate::callers;
use crate::http::{Head, Outcome, Writer, pairs};

const OK: &[u8] = br#"{"status":"ok"}"#;

/// Names and values of headers.
type Headers = Vec<(String, String)>;

impl Worker {
    /// Returns body and headers for a probe, or `None`: proxy it. While Python's event loop is blocked, `/livez`
    /// succeeds for as long as a step may take, since streams continue; `/readyz` fails earlier, since no request is
    /// prepared.
    pub(super) fn probe_response(&self, head: &Head) -> Option<(Vec<u8>, Headers)> {
        let is_livez = head.target == "/livez";
        if head.method != "GET" || head.content_length != 0 || !(is_livez || head.target == "/readyz") {
            return None;
        }
        let id = ("x-request-id".to_owned(), callers::request_id(head)?);
        let loaded = self.loaded.borrow().clone();
        let Some(loaded) = loaded else {
            // without a configuration only callers that every configuration accepts
            (is_livez && callers::may_probe(head, Some(&[]))).then_some(())?;
            return Some((OK.to_vec(), vec![id]));
        };
        let config = &loaded.config;
        callers::may_probe(head, config.hosts.as_deref()).then_some(())?;
        let limit_s = if is_livez {
            config.limits.step_timeout
        } else {
            config.watch.silence_s
        };
        let alive = self.is_healthy() && self.shared.python_silence_s() <= limit_s;
        (alive && (is_livez || !self.draining.get())).then_some(())?;
        let mut headers = vec![id];
        headers.extend(config.harmless_headers.iter().cloned());
        Some((OK.to_vec(), headers))
    }

    pub(super) fn answer_probe(&self, head: &Head, writer: &Writer) -> Outcome {
        let arrival = Instant::now();
        let Some((body, headers)) = self.probe_response(head) else {
            return Outcome::Proxy;
        };
        writer.whole(200, "application/json", &pairs(&headers), &body);
        if let Some(loaded) = &*self.loaded.borrow() {
            let log = &loaded.config.log;
            if log.probes {
                let record = RequestRecord {
                    status: Some(200),
                    ..RequestRecord::new(arrival)
                };
                AccessLine::new(&headers[0].1, head, &record).log(log);
            }
        }
        Outcome::Answered
    }
}
