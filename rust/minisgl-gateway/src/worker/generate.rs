//! A POST about which Python is asked, from its body to the end of its response.

use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::time::timeout_at;

use super::Worker;
use crate::answer::choice::Choice;
use crate::answer::errors::Failure;
use crate::answer::generation::{Generation, ResponseContext};
use crate::answer::log::{AccessLine, RequestRecord};
use crate::answer::parsed::Parsing;
use crate::answer::shape::{ChoiceOutput, Shape};
use crate::http::{Head, Outcome, Writer, pairs};
use crate::message::prepared::{Generation as GenerationRequest, Prepared, Shape as Kind, Whole};
use crate::message::{NewRequest, ToEngine};
use crate::metrics::Reason;
use crate::questions::Reply;
use crate::shared::Loaded;
use crate::waiting::Reservations;

/// Seconds beyond `--request-timeout` that Python has to report the timeout itself.
const LATE_S: f64 = 1.0;

impl Worker {
    /// Handles a POST. Returns the reason if Python answered it or is to answer it, else `None`.
    pub(super) async fn answer_post(
        self: Rc<Self>,
        head: &Head,
        body: Bytes,
        writer: Writer,
    ) -> (Outcome, Option<Reason>) {
        let arrival = Instant::now();
        let loaded = match self.serving() {
            Ok(loaded) => loaded,
            Err(reason) => return (Outcome::Proxy, Some(reason)),
        };
        self.shared.num_open.fetch_add(1, Relaxed);
        let _open = OnDrop(|| {
            self.shared.num_open.fetch_sub(1, Relaxed);
        });
        let mut disconnect_guard = DisconnectGuard(Some((head, arrival, &loaded)));
        let prepared = self.prepared(head, body, arrival, &loaded).await;
        disconnect_guard.0 = None;
        match prepared {
            Ok(Some((Prepared::Generation(request), reserved))) => {
                let reserved = reserved.unwrap_or_default();
                self.generate(head, *request, reserved, writer, &loaded, arrival).await;
                (Outcome::Answered, None)
            }
            Ok(Some((Prepared::Whole(whole), _))) => {
                write_whole(&writer, &whole);
                (Outcome::Answered, Some(Reason::Error))
            }
            Ok(_) => (Outcome::Proxy, Some(Reason::Field)), // or the queue of questions is closed: the proxy reports it
            Err(TooLate) => {
                self.write_too_late(head, &writer, &loaded, arrival);
                (Outcome::Answered, Some(Reason::Error))
            }
        }
    }

    async fn prepared(
        &self,
        head: &Head,
        body: Bytes,
        arrival: Instant,
        loaded: &Loaded,
    ) -> Result<Option<Reply>, TooLate> {
        let result = self.shared.questions.ask(head, Some(body));
        // Python's own timeout error comes first: it knows the caller
        let limit_s = loaded.config.limits.request_timeout.map(|limit_s| limit_s + LATE_S);
        match deadline(arrival, limit_s) {
            None => Ok(result.await),
            Some(at) => timeout_at(at, result).await.map_err(|_| TooLate),
        }
    }

    /// Writes the timeout error in place of Python, whose event loop does not respond, with the same text.
    fn write_too_late(&self, head: &Head, writer: &Writer, loaded: &Loaded, arrival: Instant) {
        let errors = &loaded.config.errors;
        let response = errors.response(&Failure::TooLate);
        let body = errors.body(&Failure::TooLate).to_string();
        let id = crate::http::request_id(Some(head));
        let mut headers = pairs(&loaded.config.harmless_headers);
        headers.push(("x-request-id", &id));
        writer.whole(response.status, "application/json", &headers, body.as_bytes());
        let record = RequestRecord {
            status: Some(response.status),
            error: Some(response.code.clone()),
            ..RequestRecord::new(arrival)
        };
        AccessLine::new(&id, head, &record).log(&loaded.config.log);
    }

    async fn generate(
        self: &Rc<Self>,
        head: &Head,
        request: GenerationRequest,
        reserved: Reservations,
        writer: Writer,
        loaded: &Arc<Loaded>,
        arrival: Instant,
    ) {
        writer.set_name(&request.request_id);
        writer.commit();
        let parsing = request.parts.clone().map(Parsing::new);
        let is_known = parsing.as_ref().is_none_or(Option::is_some);
        let generation = self.generation(loaded, &request, parsing.flatten(), writer, arrival);
        let generation = Rc::new(generation);
        let guard = RequestGuard {
            worker: Rc::clone(self),
            generation: Rc::clone(&generation),
            head,
            request_id: request.request_id.clone(),
            loaded,
            key: request.key_name.clone(),
            shortened_to: request.shortened_to.clone(),
        };
        let timeout_s = request.timeout_s;
        if !is_known {
            generation.fail(Failure::Internal);
        } else if self.link.borrow().is_none() {
            generation.fail(Failure::EngineGone(self.reason_gone()));
        } else {
            self.submit(&generation, request, reserved);
            self.publish_counts();
            self.resume_when_read(&generation);
        }
        self.until_ended(&generation, deadline(arrival, timeout_s)).await;
        drop(guard);
    }

    fn generation(
        &self,
        loaded: &Arc<Loaded>,
        request: &GenerationRequest,
        parsing: Option<Parsing>,
        writer: Writer,
        arrival: Instant,
    ) -> Generation {
        let tokenizer = &loaded.tokenizer;
        let (shown, watched): (&[i32], _) = match &parsing {
            Some(parsing) => (&parsing.parts.shown, parsing.parts.think_end),
            None => (&[], None),
        };
        let keeps_ids = request.shape == Kind::Generate && !request.stream;
        let prompts = request.prompts.iter().zip(&request.max_tokens);
        let choices: Vec<_> = prompts
            .flat_map(|(prompt, &max_tokens)| std::iter::repeat_n((prompt.len(), max_tokens), request.n()))
            .map(|(len, max_tokens)| {
                let min_tokens = request.sampling.min_tokens.min(max_tokens);
                let mut choice = Choice::new(tokenizer, &request.sampling, min_tokens, len, keeps_ids, shown, watched);
                if let Some(parsing) = parsing.as_ref().filter(|_| !request.sampling.stop.is_empty()) {
                    choice.search_within(parsing.scan());
                }
                choice
            })
            .collect();
        let shown = choices
            .iter()
            .map(|_| ChoiceOutput::new(request, parsing.as_ref(), tokenizer))
            .collect();
        let limits: Vec<_> = request.max_tokens.iter().map(i64::to_string).collect();
        let heading = ResponseContext {
            headers: request.headers.clone(),
            max_tokens: limits.join(","),
            errors: Arc::clone(&loaded.config.errors),
            counts: loaded.keys.get(request.key).cloned(),
            arrival,
            silence: [loaded.config.silence.head_wait, loaded.config.silence.longest].map(seconds),
        };
        Generation::new(choices, shown, request.n(), Shape::new(request), writer, heading)
    }

    /// Sends a request's choices to the engine.
    fn submit(&self, generation: &Rc<Generation>, request: GenerationRequest, reserved: Reservations) {
        let n = request.n();
        let seed = request.sampling.seed.unwrap_or_default(); // Python always sets a seed
        let mut reservations = reserved.into_iter();
        let (mut ids, mut messages) = (Vec::new(), Vec::new());
        for (prompt, &max_tokens) in request.prompts.into_iter().zip(&request.max_tokens) {
            for at in 0..n {
                let mut sampling = Box::new(request.sampling.clone());
                sampling.n = 1;
                sampling.seed = Some(choice_seed(seed, at));
                sampling.max_tokens = Some(max_tokens);
                sampling.min_tokens = sampling.min_tokens.min(max_tokens);
                let req_id = self.live.borrow_mut().add(generation, ids.len(), reservations.next());
                ids.push(req_id);
                messages.push(ToEngine::AddRequest(NewRequest {
                    req_id,
                    tokens: prompt.clone(),
                    sampling,
                    priority: request.priority,
                    key: request.key as i64,
                    ..NewRequest::default()
                }));
            }
        }
        self.shared.metrics.accepted.fetch_add(ids.len() as u64, Relaxed);
        generation.set_ids(&ids);
        messages.into_iter().for_each(|message| self.send(message));
    }

    /// Sets the callback that shows waiting tokens when the client has read all output.
    fn resume_when_read(&self, generation: &Rc<Generation>) {
        let (worker, weak) = (Weak::clone(&self.me), Rc::downgrade(generation));
        generation.on_resume(Box::new(move || {
            if let (Some(worker), Some(generation)) = (worker.upgrade(), weak.upgrade()) {
                worker.notify(&generation, Instant::now());
            }
        }));
    }

    async fn until_ended(&self, generation: &Rc<Generation>, deadline: Option<tokio::time::Instant>) {
        while let Some(at) = [deadline, generation.keep_alive(Instant::now()).map(Into::into)]
            .into_iter()
            .flatten()
            .min()
        {
            if timeout_at(at, generation.ended()).await.is_ok() {
                return;
            }
            if deadline.is_some_and(|deadline| deadline <= at) {
                for id in generation.open_ids() {
                    self.finish(id, ToEngine::AbortRequest(id));
                }
                generation.fail(Failure::TooLate);
                return;
            }
        }
        generation.ended().await;
    }
}

struct TooLate;

/// Guard that writes the access log line if the client disconnects before its request is prepared.
struct DisconnectGuard<'a>(Option<(&'a Head, Instant, &'a Loaded)>);

impl Drop for DisconnectGuard<'_> {
    fn drop(&mut self) {
        let Some((head, arrival, loaded)) = self.0 else {
            return;
        };
        let id = crate::http::request_id(Some(head));
        AccessLine::new(&id, head, &RequestRecord::new(arrival)).log(&loaded.config.log);
    }
}

fn deadline(arrival: Instant, timeout_s: Option<f64>) -> Option<tokio::time::Instant> {
    Some((arrival + seconds(timeout_s?)).into())
}

fn seconds(given: f64) -> Duration {
    Duration::try_from_secs_f64(given).unwrap_or(Duration::MAX / 4)
}

fn write_whole(writer: &Writer, whole: &Whole) {
    writer.whole(whole.status, &whole.content_type, &pairs(&whole.headers), &whole.body);
}

/// Returns the seed of choice `index` of n: the seed itself for the first, then by golden-ratio steps modulo 2^64.
fn choice_seed(seed: i64, index: usize) -> i64 {
    seed.wrapping_add((index as i64).wrapping_mul(0x9E37_79B9_7F4A_7C15_u64 as i64))
}

/// Guard of a request in the engine: dropping it aborts what still runs, and writes the access log line.
struct RequestGuard<'a> {
    worker: Rc<Worker>,
    generation: Rc<Generation>,
    head: &'a Head,
    request_id: String,
    loaded: &'a Loaded,
    key: Option<String>,
    shortened_to: Option<String>,
}

impl Drop for RequestGuard<'_> {
    fn drop(&mut self) {
        for id in self.generation.open_ids() {
            self.worker.finish(id, ToEngine::AbortRequest(id));
        }
        self.generation.abort(&self.worker.shared.metrics);
        self.worker.publish_counts();
        let line = AccessLine {
            request_id: &self.request_id,
            head: self.head,
            key: self.key.as_deref(),
            shortened_to: self.shortened_to.as_deref(),
            record: &self.generation.record(),
        };
        line.log(&self.loaded.config.log);
    }
}

struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}
