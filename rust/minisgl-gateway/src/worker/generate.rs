//! A request for text, from its body to the end of its answer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use minisgl_text::MAX_STEPS;
use serde_json::Value;

use super::Worker;
use crate::answer::choice::Choice;
use crate::answer::errors::Failure;
use crate::answer::generation::{Generation, Heading, IGNORED};
use crate::answer::log::Line;
use crate::answer::plan::{Endpoint, Plan};
use crate::answer::response_shape::Keep;
use crate::answer::shape::{Shape, Shown};
use crate::callers;
use crate::config::GatewayConfig;
use crate::http::{Head, Writer};
use crate::keys;
use crate::lengths::Lengths;
use crate::message::{NewRequest, ToEngine};
use crate::metrics::Reason;
use crate::pool::Lane;
use crate::prepare::{Loaded, Prepared, Stop, choice_seed, prepare};
use crate::receipts::Receipt;
use crate::shared::KeptAnswer;

const INLINE_BYTES: usize = 2048; // of a body: less work than the way to another thread
const INLINE_LIVE: usize = 4; // beyond, streams would stand still for it
const INLINE_STEPS: u64 = 1 << 18; // of a template, which may loop: some milliseconds
const SHORT_BYTES: usize = 32 << 10;
const MOST_QUESTIONS: usize = 3; // of one request: its tools, its conversation, the grammar of its answer

impl Worker {
    /// Whether as many more may wait, with those of the Python server.
    fn has_room(&self, config: &GatewayConfig, num_requests: usize, num_tokens: usize) -> bool {
        let (own, own_tokens) = self.live.borrow().waiting();
        let waiting = own + self.num_encoding.get() + self.shared.others_waiting.load(Relaxed);
        let tokens = own_tokens + self.shared.others_waiting_tokens.load(Relaxed);
        let limits = &config.limits;
        waiting < limits.max_queued_requests
            && (waiting == 0 || waiting + num_requests <= limits.max_queued_requests)
            && (tokens == 0 || tokens + num_tokens <= limits.max_queued_tokens)
    }

    /// Whether an API key may have as many more.
    fn key_has_room(&self, loaded: &Loaded, key: usize, num_requests: usize) -> bool {
        let (Some(of_key), Some(counts)) = (
            key.checked_sub(1).and_then(|at| loaded.config.api_keys.get(at)),
            loaded.keys.get(key),
        ) else {
            return true;
        };
        let waiting = self.live.borrow().waiting_of(key);
        let buckets = &mut *self.buckets.borrow_mut();
        let bucket = buckets.get_mut(key - 1).and_then(Option::as_mut);
        keys::has_room(of_key, counts, waiting, num_requests, bucket, Instant::now())
    }

    /// Answers in the engine, on both sides.
    fn num_in_flight(&self) -> usize {
        self.live.borrow().len() + self.shared.others_live.load(Relaxed)
    }

    /// Prepares a request, with what Python has to be asked first: its tools, and the grammar of its answer.
    async fn prepare(&self, loaded: &Arc<Loaded>, endpoint: Endpoint, body: Bytes) -> Result<Prepared, Reason> {
        self.num_encoding.set(self.num_encoding.get() + 1);
        let _counted = OnDrop(|| self.num_encoding.set(self.num_encoding.get() - 1));
        let mut explained = None;
        for _ in 0..=MOST_QUESTIONS {
            match self
                .prepare_once(loaded, endpoint, body.clone(), explained.clone())
                .await
            {
                Ok(found) => {
                    self.learn_receipts(loaded, &found.plan).await;
                    return Ok(found);
                }
                Err(Stop::PassOn(reason)) => return Err(reason),
                Err(Stop::Ask(question)) => {
                    let asked = Arc::clone(loaded);
                    let answer = self.pool.run(Lane::Ask, move || asked.forms.learn(question)).await;
                    (answer == Some(true)).then_some(()).ok_or(Reason::Error)?;
                }
                Err(Stop::Explain(question)) => {
                    let asked = Arc::clone(loaded);
                    let answer = self.pool.run(Lane::Ask, move || asked.forms.explain(&question)).await;
                    explained = Some(answer.flatten().ok_or(Reason::Error)?);
                }
            }
        }
        Err(Reason::Error) // what it learned was forgotten at once: it is too large
    }

    async fn prepare_once(
        &self,
        loaded: &Arc<Loaded>,
        endpoint: Endpoint,
        body: Bytes,
        explained: Option<Vec<Value>>,
    ) -> Result<Prepared, Stop> {
        let loaded = Arc::clone(loaded);
        let size = body.len();
        let work = move |most_steps| {
            let began = Instant::now(); // not while it waits for a thread
            let found = prepare(&loaded, endpoint, &body, explained.clone(), most_steps);
            (found, began.elapsed())
        };
        let is_quiet = self.live.borrow().len() <= INLINE_LIVE && self.num_encoding.get() == 1;
        let here =
            (size <= INLINE_BYTES && is_quiet).then(|| catch_unwind(AssertUnwindSafe(|| work(INLINE_STEPS))).ok());
        let done = match here {
            // perhaps for want of steps: it is begun again
            None | Some(Some((Err(Stop::PassOn(Reason::Template)), _))) => {
                let lane = if size <= SHORT_BYTES { Lane::Short } else { Lane::Long };
                self.pool.run(lane, move || work(MAX_STEPS)).await
            }
            Some(done) => done,
        };
        let (found, took) = done.ok_or(Reason::Error)?; // it panicked
        self.shared.metrics.tokenize.add(took, 1);
        found
    }

    /// It gets the number of the adapter that it names. Receipts, if it asks for them, are known to be possible.
    fn name_adapter(&self, plan: &mut Plan, loaded: &Loaded) -> Result<(), Reason> {
        let number = plan.model.as_ref().and_then(|name| self.shared.adapter(name));
        match number {
            Some(number) => plan.sampling.adapter = number,
            None if plan.model.is_none() || loaded.config.any_model_name => plan.model = None,
            None => return Err(Reason::Error),
        }
        let fits = !plan.receipt || loaded.receipts.has(plan.sampling.adapter);
        fits.then_some(()).ok_or(Reason::Error)
    }

    /// Whether there can be receipts of its answers, if it asks for them: Python is asked once for each adapter.
    async fn learn_receipts(&self, loaded: &Arc<Loaded>, plan: &Plan) {
        let name = plan.model.clone();
        let number = name.as_ref().and_then(|name| self.shared.adapter(name)).unwrap_or(0);
        if plan.receipt && !loaded.receipts.has(number) {
            let asked = Arc::clone(loaded);
            let learn = move || asked.receipts.learn(number, name.filter(|_| number != 0).as_deref());
            self.pool.run(Lane::Receipt, learn).await;
        }
    }

    /// Hands a request's choices to the engine.
    fn submit(&self, generation: &Rc<Generation>, prepared: Prepared, lengths: &Lengths, key: usize) {
        let Prepared { plan, prompts } = prepared;
        let seed = plan.sampling.seed.unwrap_or_else(callers::random_seed);
        let mut messages = Vec::with_capacity(prompts.len() * plan.n);
        let live = &mut *self.live.borrow_mut();
        let mut submitted = Vec::with_capacity(prompts.len() * plan.n);
        for (prompt, &most) in prompts.into_iter().zip(&lengths.by_prompt) {
            for at in 0..plan.n {
                let mut sampling = Box::new(plan.sampling.clone());
                sampling.seed = Some(choice_seed(seed, at));
                sampling.max_tokens = Some(most);
                sampling.min_tokens = sampling.min_tokens.min(most);
                let req_id = live.add(generation, submitted.len(), prompt.len(), key);
                submitted.push((req_id, plan.receipt.then(|| Receipt::new(&sampling, &prompt))));
                messages.push(ToEngine::AddRequest(NewRequest {
                    req_id,
                    tokens: prompt.clone(),
                    sampling,
                    priority: plan.priority,
                    key: key as i64,
                    ..NewRequest::default()
                }));
            }
        }
        self.shared.metrics.accepted.fetch_add(submitted.len() as u64, Relaxed);
        let mut submitted = submitted.into_iter();
        generation.submitted(|| submitted.next());
        messages.into_iter().for_each(|message| self.send(message));
    }

    pub(super) async fn answer_generating(
        self: Rc<Self>,
        head: &Head,
        body: Bytes,
        writer: Writer,
    ) -> Result<(), Reason> {
        let arrival = Instant::now();
        let loaded = self.serving()?;
        let config = &loaded.config;
        let (endpoint, _) = Endpoint::of(&head.target).ok_or(Reason::Route)?;
        let (mut headers, key) = Self::caller(head, &loaded).ok_or(Reason::Error)?;
        let room = |this: &Self, count, tokens| {
            let has_room = this.has_room(config, count, tokens) && this.key_has_room(&loaded, key, count);
            has_room.then_some(()).ok_or(Reason::Limit)
        };
        room(&self, 1, 0)?;
        self.shared.num_open.fetch_add(1, Relaxed);
        let _open = OnDrop(|| {
            self.shared.num_open.fetch_sub(1, Relaxed);
            self.tell_waiting();
        });
        let mut prepared = self.prepare(&loaded, endpoint, body).await?;
        self.serving()?;
        self.name_adapter(&mut prepared.plan, &loaded)?;
        let most = keys::max_priority(config, key);
        (-most..=most)
            .contains(&prepared.plan.priority)
            .then_some(())
            .ok_or(Reason::Error)?;
        let tokens: usize = prepared.prompts.iter().map(Vec::len).sum();
        let (n, count) = (prepared.plan.n, prepared.prompts.len() * prepared.plan.n);
        room(&self, count, tokens * n)?;
        let lengths = self.lengths(&prepared, config)?;
        if let Some(counts) = loaded.keys.get(key) {
            counts.num_requests.fetch_add(count as u64, Relaxed);
            counts.num_prompt.fetch_add(tokens as u64, Relaxed);
        }
        let request_id = headers[0].1.clone();
        if endpoint == Endpoint::Messages {
            headers.push(("request-id", request_id.clone())); // as Anthropic's clients look for it
        }
        writer.set_name(&request_id);
        writer.commit();
        if !prepared.plan.ignored.is_empty() {
            headers.push((IGNORED, prepared.plan.ignored.join(", ")));
        }
        let heading = Heading {
            headers,
            max_tokens: lengths.shown(),
            errors: Arc::clone(&config.errors),
            counts: loaded.keys.get(key).cloned(),
            arrival,
        };
        let keep = self.keeps(&prepared.plan, key, config);
        let generation = Rc::new(generation(&loaded, &prepared, &lengths, writer, heading, keep));
        let open = Open {
            worker: Rc::clone(&self),
            generation: Rc::clone(&generation),
            head,
            request_id,
            loaded: &loaded,
            key,
            shortened_to: lengths.are_shortened.then(|| lengths.shown()),
        };
        self.submit(&generation, prepared, &lengths, key);
        self.tell_waiting();
        self.resumes(&generation);
        self.until_ended(&generation, config.limits.request_timeout, arrival)
            .await;
        drop(open);
        Ok(())
    }

    fn lengths(&self, prepared: &Prepared, config: &GatewayConfig) -> Result<Lengths, Reason> {
        let room = prepared.prompts.iter();
        let room = room.map(|prompt| (config.max_seq_len - prompt.len()) as i64);
        let plan = &prepared.plan;
        let mut found = Lengths::new(room, plan, &config.limits, self.num_in_flight());
        let fits = found.fit_logprobs(plan, config.bounds.max_logprob_entries);
        fits.then_some(()).ok_or(Reason::Error)?;
        if found.are_shortened {
            let count = found.by_prompt.len() * plan.n;
            self.shared.metrics.shortened.fetch_add(count as u64, Relaxed);
        }
        Ok(found)
    }

    /// What keeps the answer, if that is asked for.
    fn keeps(&self, plan: &Plan, key: usize, config: &GatewayConfig) -> Option<Keep> {
        let (input, shared) = (plan.kept_input.clone()?, Arc::clone(&self.shared));
        let (max_answers, max_bytes) = (config.max_kept_answers, config.max_kept_bytes);
        Some(Box::new(move |object| {
            let id_of = |one: &Value| one["id"].as_str().unwrap_or_default().to_owned();
            let one = KeptAnswer {
                key,
                id: id_of(object),
                item_ids: object["output"].as_array().into_iter().flatten().map(id_of).collect(),
                answer: object.to_string(),
                input,
            };
            shared.keep(one, max_answers, max_bytes);
        }))
    }

    /// When its client has caught up, it takes what waits.
    fn resumes(&self, generation: &Rc<Generation>) {
        let (worker, weak) = (Weak::clone(&self.me), Rc::downgrade(generation));
        generation.on_resume(Box::new(move || {
            if let (Some(worker), Some(generation)) = (worker.upgrade(), weak.upgrade()) {
                worker.notify(&generation, Instant::now());
            }
        }));
    }

    async fn until_ended(&self, generation: &Rc<Generation>, timeout_s: Option<f64>, arrival: Instant) {
        let Some(seconds) = timeout_s else {
            generation.ended().await;
            return;
        };
        let at = arrival + Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX / 4);
        if tokio::time::timeout_at(at.into(), generation.ended()).await.is_err() {
            for id in generation.open_ids() {
                self.finish(id, ToEngine::AbortRequest(id));
            }
            generation.fail(Failure::TooLate);
        }
    }
}

fn generation(
    loaded: &Loaded,
    prepared: &Prepared,
    lengths: &Lengths,
    writer: Writer,
    heading: Heading,
    keep: Option<Keep>,
) -> Generation {
    let plan = &prepared.plan;
    let (shown, watched): (&[i32], _) = match &plan.parsing {
        Some(parsing) => (&parsing.shown, parsing.think_end),
        None => (&[], None),
    };
    let shows_ids = plan.endpoint == Endpoint::Generate && !plan.stream;
    let keeps_ids = plan.receipt || shows_ids;
    let sampling = &plan.sampling;
    let prompts = prepared.prompts.iter().zip(&lengths.by_prompt);
    let choices: Vec<_> = prompts
        .flat_map(|(prompt, &most)| std::iter::repeat_n((prompt.len(), most), plan.n))
        .map(|(len, most)| {
            let min_tokens = sampling.min_tokens.min(most);
            Choice::new(&loaded.tokenizer, sampling, min_tokens, len, keeps_ids, shown, watched)
        })
        .collect();
    let created = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let shown = choices.iter().map(|_| Shown::new(plan, &loaded.tokenizer)).collect();
    let model = plan.model.as_deref().unwrap_or(&loaded.config.model_name);
    let shape = Shape::new(plan, created, model, keep);
    Generation::new(choices, shown, plan.n, shape, writer, heading)
}

/// A request in the engine; dropping it ends what still runs, and writes the access line.
struct Open<'a> {
    worker: Rc<Worker>,
    generation: Rc<Generation>,
    head: &'a Head,
    request_id: String,
    loaded: &'a Loaded,
    key: usize,
    shortened_to: Option<String>,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        for id in self.generation.open_ids() {
            self.worker.finish(id, ToEngine::AbortRequest(id));
        }
        self.generation.abort(&self.worker.shared.metrics);
        let line = Line {
            request_id: &self.request_id,
            head: self.head,
            key: self.loaded.key_name(self.key),
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
