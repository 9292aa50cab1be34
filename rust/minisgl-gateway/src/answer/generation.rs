//! An HTTP request with its requests in the engine (as in `server/core/running.py`): its choices, the shape of the
//! response, and the writer to its client.
//!
//! Invariants: tokens go from the engine's message to the client's socket in the same turn of the event loop, without
//! waking the connection's task; while the client does not read, tokens stay in the choices.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::http::{Writer, pairs};
use crate::metrics::Metrics;
use crate::waiting::KeyCounts;

use super::choice::{Choice, Finish};
use super::errors::{Errors, Failure};
use super::json::Usage;
use super::log::RequestRecord;
use super::shape::{ChoiceOutput, Shape};

/// Header that names ignored request fields; error responses do not have it.
const IGNORED: &str = "x-minisgl-ignored";
const MAX_TOKENS: &str = "x-minisgl-max-tokens";
const CACHED_TOKENS: &str = "x-minisgl-cached-tokens";

/// Buffer for output, shared by all generations of a thread.
#[derive(Default)]
pub struct Scratch {
    out: Vec<u8>,
}

/// An HTTP request with its choices in the engine, its response shape, and its writer.
pub struct Generation {
    inner: RefCell<Inner>,
    /// The generation is in the list of those to notify.
    pub is_due: Cell<bool>,
    ended: Notify,
}

struct Inner {
    choices: Vec<Choice>,
    n: usize,
    num_open: usize,
    shape: Shape,
    shown: Vec<ChoiceOutput>, // one for each choice
    writer: Writer,
    context: ResponseContext,
    outcome: Option<Result<(), Failure>>,
    record: RequestRecord,
    ping_at: Instant,
    num_cached: i64, // prompt tokens of ended choices
}

/// Headers of a response, its error texts, and the counters that it belongs to.
pub struct ResponseContext {
    /// Response headers in addition to content type and length.
    pub headers: Vec<(String, String)>,
    /// Limits of generated tokens by prompt, as a header value.
    pub max_tokens: String,
    /// Error responses from which one is chosen if the request fails.
    pub errors: Arc<Errors>,
    /// Counters of the caller's API key, if there are several keys.
    pub counts: Option<Arc<KeyCounts>>,
    /// Time at which the request arrived.
    pub arrival: Instant,
    /// Time without output before a stream sends a ping: until the response header is sent, and after that.
    pub silence: [Duration; 2],
}

impl Generation {
    /// Makes a generation with `n` choices for each prompt, in order. `shown` has the empty output of each choice.
    pub fn new(
        choices: Vec<Choice>,
        shown: Vec<ChoiceOutput>,
        n: usize,
        shape: Shape,
        writer: Writer,
        context: ResponseContext,
    ) -> Generation {
        let num_open = choices.len();
        let inner = Inner {
            choices,
            n,
            num_open,
            shape,
            shown,
            writer,
            record: RequestRecord::new(context.arrival),
            ping_at: Instant::now() + context.silence[0],
            context,
            outcome: None,
            num_cached: 0,
        };
        Generation {
            inner: RefCell::new(inner),
            is_due: Cell::new(false),
            ended: Notify::new(),
        }
    }

    /// Sets the request ids that the choices have in the engine, in order.
    pub fn set_ids(&self, ids: &[i64]) {
        for (choice, id) in self.inner.borrow_mut().choices.iter_mut().zip(ids) {
            choice.req_id = *id;
        }
    }

    /// Applies an update from the engine to a choice. It is shown at the next `notify`.
    pub fn update(&self, choice: usize, what: impl FnOnce(&mut Choice)) {
        what(&mut self.inner.borrow_mut().choices[choice]);
    }

    /// Returns the engine request ids of the choices that have not ended.
    pub fn open_ids(&self) -> Vec<i64> {
        let inner = self.inner.borrow();
        inner
            .choices
            .iter()
            .filter(|one| one.finish.is_none())
            .map(|one| one.req_id)
            .collect()
    }

    /// Handles all updates since the last call and writes the output. Returns the engine ids of requests that a stop
    /// string has ended, which the caller must finish. Does nothing while the client of a stream does not read.
    pub fn notify(&self, now: Instant, metrics: &Metrics, scratch: &mut Scratch) -> Vec<i64> {
        let mut inner = self.inner.borrow_mut();
        if inner.outcome.is_some() || (inner.shape.streams() && inner.writer.is_paused()) {
            return Vec::new();
        }
        let began = Instant::now();
        #[cfg(feature = "test-panics")]
        assert!(
            !pairs(&inner.context.headers)
                .iter()
                .any(|(_, value)| value.starts_with("panic-")),
            "ordered by a test"
        );
        scratch.out.clear();
        let mut stops = Vec::new();
        if let Err(failure) = inner.take(now, metrics, scratch, began, &mut stops) {
            inner.fail(failure, &mut scratch.out);
            self.ended.notify_one();
            return stops;
        }
        if inner.num_open == 0 {
            inner.finish(&mut scratch.out);
            self.ended.notify_one();
        } else if !scratch.out.is_empty() {
            inner.send(&scratch.out, false);
            inner.ping_at = now + inner.context.silence[1];
        }
        stops
    }

    /// Sends a ping if the stream has been silent for too long. Returns the time of the next call, or `None` if none is
    /// due.
    pub fn keep_alive(&self, now: Instant) -> Option<Instant> {
        let mut inner = self.inner.borrow_mut();
        if !inner.shape.streams() || inner.outcome.is_some() {
            return None;
        }
        if inner.ping_at <= now {
            inner.ping_at = now + inner.context.silence[1];
            if !inner.writer.is_paused() {
                let ping = inner.shape.ping();
                inner.send(ping, false);
            }
        }
        Some(inner.ping_at)
    }

    /// Ends the response with an error, whatever was sent of it. No-op if it has ended.
    pub fn fail(&self, failure: Failure) {
        let mut inner = self.inner.borrow_mut();
        if inner.outcome.is_none() {
            inner.fail(failure, &mut Vec::new());
            self.ended.notify_one();
        }
    }

    /// Waits until the response is written.
    pub async fn ended(&self) {
        if self.inner.borrow().outcome.is_none() {
            self.ended.notified().await;
        }
    }

    /// Ends all choices that still run, and counts them as aborted in `metrics`.
    pub fn abort(&self, metrics: &Metrics) {
        let mut inner = self.inner.borrow_mut();
        for at in 0..inner.choices.len() {
            if inner.choices[at].finish.is_none() {
                inner.end(at, Finish::Abort, metrics);
            }
        }
    }

    /// Returns the request's fields for the access log.
    pub fn record(&self) -> RequestRecord {
        let inner = self.inner.borrow();
        let error = match &inner.outcome {
            Some(Err(failure)) => Some(inner.context.errors.response(failure).code.clone()),
            _ => None,
        };
        let prompt = inner.choices.iter().map(|one| one.num_prompt).sum();
        let generated = inner.choices.iter().map(|one| one.num_generated).sum();
        RequestRecord {
            tokens: Some((prompt, inner.num_cached, generated)),
            error,
            ..inner.record.clone()
        }
    }

    /// Sets a callback for each time that the client has read all that was written.
    pub fn on_resume(&self, call: Box<dyn Fn()>) {
        self.inner.borrow().writer.on_resume(call);
    }
}

impl Inner {
    /// Handles new tokens of all choices: appends what is to be shown to `scratch.out`, and to `stops` the ids of
    /// requests that a stop string has ended. An error is the engine's failure.
    fn take(
        &mut self,
        now: Instant,
        metrics: &Metrics,
        scratch: &mut Scratch,
        began: Instant,
        stops: &mut Vec<i64>,
    ) -> Result<(), Failure> {
        let mut num_tokens = 0;
        for at in 0..self.choices.len() {
            if !self.choices[at].has_updates() {
                continue;
            }
            if let Some(error) = self.choices[at].take_error() {
                self.end(at, Finish::Error, metrics);
                return Err(self.context.errors.from_engine(error));
            }
            let (choice, shown) = (&mut self.choices[at], &mut self.shown[at]);
            let new = choice.take(&mut shown.text);
            if let Some(logprobs) = &mut shown.logprobs {
                logprobs.add(&new.scored);
            }
            if new.hit_stop {
                stops.push(choice.req_id);
            }
            if new.num_new > 0 {
                num_tokens += new.num_new;
                metrics.tokens(new.num_new, self.record.arrival, choice.last_time, now);
                choice.last_time = Some(now);
                if self.record.ttft_s.is_none() {
                    self.record.ttft_s = Some((now - self.record.arrival).as_secs_f64());
                }
            }
            if let Some(reason) = new.finish {
                self.end(at, reason, metrics);
            }
            self.write_output(at, &mut scratch.out);
        }
        metrics.detokenize.add(began.elapsed(), num_tokens as u64);
        if let Some(counts) = &self.context.counts {
            counts.num_generated.fetch_add(num_tokens as u64, Relaxed);
        }
        Ok(())
    }

    /// Appends the new output of choice `at` if the response is a stream; else parses it for the whole response.
    fn write_output(&mut self, at: usize, out: &mut Vec<u8>) {
        let (finish, shown) = (self.choices[at].finish, &mut self.shown[at]);
        if !self.shape.streams() {
            if let Some(parsed) = &mut shown.parsed {
                parsed.take(&shown.text, finish);
                shown.text.clear();
            }
            return;
        }
        let has_logprobs = shown.logprobs.as_ref().is_some_and(|one| !one.is_empty());
        if shown.text.is_empty() && !has_logprobs && finish.is_none() {
            return;
        }
        self.shape.begin(self.choices.len(), out);
        let usage = finish.map_or_else(Usage::default, |_| Usage::of(&self.choices, self.n));
        self.shape.event(at, shown, finish, self.choices[at].end(), usage, out);
        shown.text.clear();
    }

    fn end(&mut self, at: usize, reason: Finish, metrics: &Metrics) {
        let choice = &mut self.choices[at];
        choice.finish = Some(reason);
        self.num_open -= 1;
        metrics.ended(reason, self.record.arrival, choice.num_prompt, choice.num_generated);
        self.record.finish_reasons.push(reason.name());
        self.num_cached += i64::from(choice.cached_len.unwrap_or(0));
    }

    /// Sends a part of a stream, with the response header before the first part.
    fn send(&mut self, out: &[u8], is_last: bool) {
        if self.record.status.is_none() {
            self.record.status = Some(200);
            let mut headers = vec![("cache-control", "no-cache"), ("x-accel-buffering", "no")];
            headers.extend(pairs(&self.context.headers));
            // with several prompts the total is not known yet
            let cached = self.choices.first().filter(|_| self.choices.len() == self.n);
            let cached = cached.and_then(|one| one.cached_len).map(|len| len.to_string());
            headers.push((MAX_TOKENS, &self.context.max_tokens));
            headers.extend(cached.as_deref().map(|len| (CACHED_TOKENS, len)));
            self.writer.begin(self.shape.media_type(), &headers);
        }
        if is_last {
            self.writer.end_with(out);
        } else {
            self.writer.part(out);
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        let usage = Usage::of(&self.choices, self.n).with_reasoning(&self.choices, &self.shown);
        if self.shape.streams() {
            self.shape.end(usage, out);
            self.send(out, true);
        } else {
            let body = self.shape.whole(&self.choices, &mut self.shown, usage);
            self.record.status = Some(200);
            let (mut headers, cached) = (pairs(&self.context.headers), usage.cached.to_string());
            headers.extend([(MAX_TOKENS, self.context.max_tokens.as_str()), (CACHED_TOKENS, &cached)]);
            self.writer.whole(200, "application/json", &headers, &body);
        }
        self.outcome = Some(Ok(()));
    }

    /// Ends the response with an error. Drops the unsent output in `out`.
    fn fail(&mut self, failure: Failure, out: &mut Vec<u8>) {
        out.clear();
        let status = self.context.errors.response(&failure).status;
        let body = self.context.errors.body(&failure);
        if self.record.status.is_some() {
            self.shape.error(&body, out);
            self.writer.end_with(out);
        } else {
            self.record.status = Some(status);
            let mut headers = pairs(&self.context.headers);
            headers.retain(|(name, _)| *name != IGNORED);
            self.writer
                .whole(status, "application/json", &headers, body.to_string().as_bytes());
        }
        self.outcome = Some(Err(failure));
    }
}
