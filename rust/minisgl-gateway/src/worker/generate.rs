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
use crate::answer::generation::{Generation, Heading};
use crate::answer::log::{About, Line};
use crate::answer::parsed::Parsing;
use crate::answer::shape::{Shape, Shown};
use crate::http::{Head, Outcome, Writer};
use crate::message::prepared::{Generation as Asked, Prepared, Shape as Kind, Whole};
use crate::message::{NewRequest, ToEngine};
use crate::metrics::Reason;
use crate::questions::Answer;
use crate::shared::Loaded;
use crate::waiting::Reserved;

/// Seconds beyond `--request-timeout` that Python has to report the timeout itself.
const LATE_S: f64 = 1.0;

impl Worker {
    /// Handles a POST. Returns the reason if Python answered it or is to answer it; `None` if the response was written
    /// here.
    pub(super) async fn answer_post(
        self: Rc<Self>,
        head: &Head,
        body: Bytes,
        writer: Writer,
    ) -> (Outcome, Option<Reason>) {
        let arrival = Instant::now();
        let loaded = match self.serving() {
            Ok(loaded) => loaded,
            Err(reason) => return (Outcome::PassOn, Some(reason)),
        };
        self.shared.num_open.fetch_add(1, Relaxed);
        let _open = OnDrop(|| {
            self.shared.num_open.fetch_sub(1, Relaxed);
        });
        let mut leaving = Leaving(Some((head, arrival, &loaded)));
        let prepared = self.prepared(head, body, arrival, &loaded).await;
        leaving.0 = None;
        match prepared {
            Ok(Some((Prepared::Generation(asked), reserved))) => {
                let reserved = reserved.unwrap_or_default();
                self.generate(head, *asked, reserved, writer, &loaded, arrival).await;
                (Outcome::Answered, None)
            }
            Ok(Some((Prepared::Whole(whole), _))) => {
                write_whole(&writer, &whole);
                (Outcome::Answered, Some(Reason::Error))
            }
            Ok(_) => (Outcome::PassOn, Some(Reason::Field)), // or nobody prepares any more: the relay finds out
            Err(TooLate) => {
                self.say_too_late(head, &writer, &loaded, arrival);
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
    ) -> Result<Option<Answer>, TooLate> {
        let asked = self.shared.questions.ask(head, Some(body));
        // Python's own comes first, and knows its caller
        let most_s = loaded.config.limits.request_timeout.map(|most_s| most_s + LATE_S);
        match deadline(arrival, most_s) {
            None => Ok(asked.await),
            Some(at) => timeout_at(at, asked).await.map_err(|_| TooLate),
        }
    }

    /// Writes the timeout error in place of Python, whose event loop does not respond, with the same text.
    fn say_too_late(&self, head: &Head, writer: &Writer, loaded: &Loaded, arrival: Instant) {
        let errors = &loaded.config.errors;
        let (told, body) = (errors.of(&Failure::TooLate), errors.body(&Failure::TooLate).to_string());
        let id = crate::http::request_id(Some(head));
        let harmless = loaded.config.harmless_headers.iter();
        let mut headers: Vec<_> = harmless.map(|(name, value)| (name.as_str(), value.as_str())).collect();
        headers.push(("x-request-id", &id));
        writer.whole(told.status, "application/json", &headers, body.as_bytes());
        let about = About {
            status: Some(told.status),
            error: Some(told.code.clone()),
            ..About::new(arrival)
        };
        Line {
            request_id: &id,
            head,
            key: None,
            shortened_to: None,
            about: &about,
        }
        .log(&loaded.config.log);
    }

    async fn generate(
        self: &Rc<Self>,
        head: &Head,
        asked: Asked,
        reserved: Reserved,
        writer: Writer,
        loaded: &Arc<Loaded>,
        arrival: Instant,
    ) {
        writer.set_name(&asked.request_id);
        writer.commit();
        let parsing = asked.parts.clone().map(Parsing::new);
        let is_known = parsing.as_ref().is_none_or(Option::is_some);
        let generation = self.generation(loaded, &asked, parsing.flatten(), writer, arrival);
        let generation = Rc::new(generation);
        let open = Open {
            worker: Rc::clone(self),
            generation: Rc::clone(&generation),
            head,
            request_id: asked.request_id.clone(),
            loaded,
            key: asked.key_name.clone(),
            shortened_to: asked.shortened_to.clone(),
        };
        let timeout_s = asked.timeout_s;
        if !is_known {
            generation.fail(Failure::Internal);
        } else if self.link.borrow().is_none() {
            generation.fail(Failure::EngineGone(self.reason_gone()));
        } else {
            self.submit(&generation, asked, reserved);
            self.tell_waiting();
            self.resumes(&generation);
        }
        self.until_ended(&generation, deadline(arrival, timeout_s)).await;
        drop(open);
    }

    fn generation(
        &self,
        loaded: &Arc<Loaded>,
        asked: &Asked,
        parsing: Option<Parsing>,
        writer: Writer,
        arrival: Instant,
    ) -> Generation {
        let tokenizer = &loaded.tokenizer;
        let (shown, watched): (&[i32], _) = match &parsing {
            Some(parsing) => (&parsing.parts.shown, parsing.parts.think_end),
            None => (&[], None),
        };
        let keeps_ids = asked.shape == Kind::Generate && !asked.stream;
        let prompts = asked.prompts.iter().zip(&asked.max_tokens);
        let choices: Vec<_> = prompts
            .flat_map(|(prompt, &most)| std::iter::repeat_n((prompt.len(), most), asked.n()))
            .map(|(len, most)| {
                let min_tokens = asked.sampling.min_tokens.min(most);
                let mut choice = Choice::new(tokenizer, &asked.sampling, min_tokens, len, keeps_ids, shown, watched);
                if let Some(parsing) = parsing.as_ref().filter(|_| !asked.sampling.stop.is_empty()) {
                    choice.search_within(parsing.scan());
                }
                choice
            })
            .collect();
        let shown = choices
            .iter()
            .map(|_| Shown::new(asked, parsing.as_ref(), tokenizer))
            .collect();
        let limits: Vec<_> = asked.max_tokens.iter().map(i64::to_string).collect();
        let heading = Heading {
            headers: asked.headers.clone(),
            max_tokens: limits.join(","),
            errors: Arc::clone(&loaded.config.errors),
            counts: loaded.keys.get(asked.key).cloned(),
            arrival,
            silence: [loaded.config.silence.head_wait, loaded.config.silence.longest].map(seconds),
        };
        Generation::new(choices, shown, asked.n(), Shape::new(asked), writer, heading)
    }

    /// Sends a request's choices to the engine.
    fn submit(&self, generation: &Rc<Generation>, asked: Asked, reserved: Reserved) {
        let n = asked.n();
        let seed = asked.sampling.seed.unwrap_or_default(); // Python has drawn one
        let mut rooms = reserved.into_iter();
        let (mut ids, mut messages) = (Vec::new(), Vec::new());
        for (prompt, &most) in asked.prompts.into_iter().zip(&asked.max_tokens) {
            for at in 0..n {
                let mut sampling = Box::new(asked.sampling.clone());
                sampling.n = 1;
                sampling.seed = Some(choice_seed(seed, at));
                sampling.max_tokens = Some(most);
                sampling.min_tokens = sampling.min_tokens.min(most);
                let req_id = self.live.borrow_mut().add(generation, ids.len(), rooms.next());
                ids.push(req_id);
                messages.push(ToEngine::AddRequest(NewRequest {
                    req_id,
                    tokens: prompt.clone(),
                    sampling,
                    priority: asked.priority,
                    key: asked.key as i64,
                    ..NewRequest::default()
                }));
            }
        }
        self.shared.metrics.accepted.fetch_add(ids.len() as u64, Relaxed);
        generation.submitted(&ids);
        messages.into_iter().for_each(|message| self.send(message));
    }

    /// Sets the callback that shows waiting tokens when the client has read all output.
    fn resumes(&self, generation: &Rc<Generation>) {
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
struct Leaving<'a>(Option<(&'a Head, Instant, &'a Loaded)>);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let Some((head, arrival, loaded)) = self.0 else {
            return;
        };
        Line {
            request_id: &crate::http::request_id(Some(head)),
            head,
            key: None,
            shortened_to: None,
            about: &About::new(arrival),
        }
        .log(&loaded.config.log);
    }
}

fn deadline(arrival: Instant, timeout_s: Option<f64>) -> Option<tokio::time::Instant> {
    Some((arrival + seconds(timeout_s?)).into())
}

fn seconds(given: f64) -> Duration {
    Duration::try_from_secs_f64(given).unwrap_or(Duration::MAX / 4)
}

fn write_whole(writer: &Writer, whole: &Whole) {
    let headers = whole.headers.iter();
    let headers: Vec<_> = headers.map(|(name, value)| (name.as_str(), value.as_str())).collect();
    writer.whole(whole.status, &whole.content_type, &headers, &whole.body);
}

/// Returns the seed of choice `index` of n: the seed itself for the first, then by golden-ratio steps modulo 2^64.
fn choice_seed(seed: i64, index: usize) -> i64 {
    seed.wrapping_add((index as i64).wrapping_mul(0x9E37_79B9_7F4A_7C15_u64 as i64))
}

/// Guard of a request in the engine: dropping it aborts what still runs, and writes the access log line.
struct Open<'a> {
    worker: Rc<Worker>,
    generation: Rc<Generation>,
    head: &'a Head,
    request_id: String,
    loaded: &'a Loaded,
    key: Option<String>,
    shortened_to: Option<String>,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        for id in self.generation.open_ids() {
            self.worker.finish(id, ToEngine::AbortRequest(id));
        }
        self.generation.abort(&self.worker.shared.metrics);
        self.worker.tell_waiting();
        let line = Line {
            request_id: &self.request_id,
            head: self.head,
            key: self.key.as_deref(),
            shortened_to: self.shortened_to.as_deref(),
            about: &self.generation.about(),
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
