//! Messages and losses of engines, and the requests of an engine that is lost.
//!
//! Invariants: a token is counted before it is forwarded; no message of an engine is handled after its loss.

use minisgl_gateway::message::{FromEngine, StepTokens, ToEngine};

use super::engines::{Engine, State, combine_ready};
use super::requests::{ERROR, Fate};
use super::steps::{OwnedStep, Owner};
use super::switchboard::{Out, Switchboard};

impl Switchboard {
    /// Records that a connection to `engine` exists. Sends `Shutdown` at once if the pool is shutting down.
    pub fn on_engine_connected(&mut self, engine: usize) {
        self.engines[engine].is_linked = true;
        if self.is_shutting_down {
            self.out.push(Out::Engine(engine, ToEngine::Shutdown));
        }
    }

    /// Handles a message of `engine`; `raw` are its bytes, which front ends get unchanged where all of them get it.
    pub fn handle_engine_message(&mut self, engine: usize, message: FromEngine, raw: &[u8]) {
        if self.ended.is_some() {
            return;
        }
        let record = &mut self.engines[engine];
        if matches!(record.state, State::Silent | State::Dead) {
            self.set_state(engine, State::Starting, "");
        }
        let record = &mut self.engines[engine];
        match message {
            FromEngine::StepTokens(step) => self.handle_step(engine, step),
            FromEngine::EngineReady(ready) => {
                record.ready = Some(*ready);
                record.is_restarting = false;
                self.engine_ready(engine);
            }
            FromEngine::EngineStats(stats) => {
                let count = |number: i64| usize::try_from(number).unwrap_or(0);
                self.router
                    .report(engine, count(stats.num_waiting), count(stats.num_running));
                record.store_stats(raw);
                self.forward(engine, raw, true);
            }
            FromEngine::LoadProgress(line) => {
                record.store_line(line, raw);
                self.forward(engine, raw, false);
            }
            FromEngine::Narration(_) | FromEngine::Watched => self.forward(engine, raw, true),
            FromEngine::PrefixChanged { prefix_id, state } => {
                if state == "refused" {
                    self.prefixes.remove(&prefix_id); // do not send a refused prefix to other engines later
                }
                self.forward(engine, raw, false);
            }
            FromEngine::AdapterChanged { adapter, state } => {
                if state == "refused" {
                    self.adapters.remove(&adapter);
                }
                self.forward(engine, raw, false);
            }
            FromEngine::CacheCleared => {
                if record.state == State::Ready {
                    self.register_with_router(engine); // it is up already: this clears the pages remembered of it
                }
                self.forward(engine, raw, false);
            }
            // handled by the connection, or never sent by an engine
            FromEngine::Heartbeat(_)
            | FromEngine::EngineFailed(_)
            | FromEngine::EngineSays { .. }
            | FromEngine::EngineState { .. } => {}
        }
    }

    /// Tells the router that the engine is up, with an empty cache of the size that it reported.
    fn register_with_router(&mut self, engine: usize) {
        let ready = self.engines[engine].ready.as_ref();
        let num_pages = ready.and_then(|ready| usize::try_from(ready.num_pages).ok());
        self.router.engine_up(engine, num_pages);
    }

    fn engine_ready(&mut self, engine: usize) {
        self.set_state(engine, State::Ready, "");
        self.register_with_router(engine);
        for message in self.adapters.values().chain(self.prefixes.values()) {
            self.out.push(Out::Engine(engine, message.clone()));
        }
        if self.sent_ready.is_none()
            && let Some(ready) = combine_ready(&self.engines).map(Box::new)
        {
            self.send_all(FromEngine::EngineReady(ready.clone()), false);
            self.sent_ready = Some(ready);
        }
    }

    /// Handles the loss of the connection to `engine` (`is_silent`: it is closed for missing heartbeats). Its requests
    /// continue in other engines. The pool fails if not all engines had become ready before.
    pub fn on_engine_lost(&mut self, engine: usize, is_silent: bool, reason: &str) {
        let record = &mut self.engines[engine];
        record.is_linked = false;
        if self.ended.is_some() {
            return;
        }
        if self.is_shutting_down {
            self.end_if_all_left();
            return;
        }
        let was_ready = record.state == State::Ready;
        record.forget();
        if self.sent_ready.is_none() {
            self.fail(&format!("engine {engine}: {reason}"));
            return;
        }
        let state = if is_silent { State::Silent } else { State::Dead };
        self.set_state(engine, state, reason);
        if was_ready {
            self.engines[engine].num_losses += 1;
            let num_moved = self.requeue_all(engine);
            if num_moved > 0 {
                let s = if num_moved == 1 { "" } else { "s" };
                let moved = format!("{num_moved} request{s} moved to other engines");
                self.send_log_line(format!("engine {engine} was lost: {moved}"));
            }
        }
        self.fail_if_no_engine_is_left();
    }

    /// Sets whether the engine's process is being restarted: requests wait for it, or the pool fails if no engine is
    /// left.
    pub fn restarting(&mut self, engine: usize, yes: bool) {
        self.engines[engine].is_restarting = yes;
        self.fail_if_no_engine_is_left();
    }

    /// Queues a lost engine's requests in front of all others and returns their number. Those that cannot move end.
    fn requeue_all(&mut self, engine: usize) -> usize {
        let mut num_moved = 0;
        for id in self.router.engine_down(engine) {
            let Some(request) = self.requests.get_mut(&id) else {
                continue;
            };
            match request.record_loss() {
                Fate::Forgotten => self.forget(id),
                Fate::Ends(reason, text) => self.end(id, reason, text),
                Fate::Moves => {
                    let Some(request) = self.requests.remove(&id) else {
                        continue;
                    };
                    let refused = self.enqueue(id, &request, true);
                    self.requests.insert(id, request);
                    match refused {
                        Ok(()) => num_moved += 1,
                        Err(text) => self.end(id, ERROR, Some(&text)),
                    }
                }
            }
        }
        self.num_moved += num_moved as u64;
        num_moved
    }

    fn set_state(&mut self, engine: usize, state: State, reason: &str) {
        let record = &mut self.engines[engine];
        if record.state == state && record.reason == reason {
            return;
        }
        record.state = state;
        reason.clone_into(&mut record.reason);
        let message = record.state_message(engine);
        self.send_all(message, false);
    }

    fn fail_if_no_engine_is_left(&mut self) {
        let none_is_left = !self.engines.iter().any(Engine::has_future);
        if none_is_left && self.ended.is_none() && !self.is_shutting_down {
            let reasons: Vec<String> = (self.engines.iter().enumerate())
                .map(|(engine, record)| format!("engine {engine}: {}", record.reason))
                .collect();
            self.fail(&format!("no engine is left: {}", reasons.join("; ")));
        }
    }

    /// Ends the pool with an error: sends `EngineFailed` to all front ends.
    fn fail(&mut self, text: &str) {
        self.flush_parts();
        self.send_all(FromEngine::EngineFailed(text.to_owned()), false);
        self.ended = Some(text.to_owned());
    }

    pub(super) fn end_if_all_left(&mut self) {
        if self.is_shutting_down && !self.engines.iter().any(|engine| engine.is_linked) {
            self.flush_parts();
            self.ended.get_or_insert_default();
        }
    }

    /// Reduces the cached token counts of admitted requests to what their API keys may know.
    fn hide_foreign_prefixes(&mut self, engine: usize, step: &mut StepTokens) {
        let Some(own) = &mut self.own_prefixes else { return };
        for (link_id, cached_len) in &mut step.admitted {
            let id = self.engines[engine].ids.get(link_id);
            if let Some(request) = id.and_then(|id| self.requests.get(id)) {
                *cached_len = own.visible_len(request, *cached_len);
                own.add(request);
            }
        }
    }

    fn handle_step(&mut self, engine: usize, mut step: StepTokens) {
        self.hide_foreign_prefixes(engine, &mut step);
        let mut ended = Vec::new();
        let mut rows = Vec::with_capacity(step.req_ids.len());
        let (ids, requests) = (&self.engines[engine].ids, &mut self.requests);
        for ((link_id, &token), &reason) in step.req_ids.iter().zip(&step.tokens).zip(&step.reasons) {
            let id = ids.get(link_id).copied();
            let Some((id, request)) = id.and_then(|id| Some((id, requests.get_mut(&id)?))) else {
                rows.push(None);
                continue;
            };
            if token >= 0 {
                request.push_token(token);
            }
            if reason != 0 {
                ended.push((*link_id, id));
            }
            rows.push(request.owner());
        }
        let owner = |link_id: i64| -> Owner { requests.get(ids.get(&link_id)?)?.owner() };
        let errors = step.errors.0.iter().map(|one| owner(one.0)).collect();
        let prompts = step.prompt_logprobs.iter().map(|one| owner(one.req_id)).collect();
        let embeddings = step.embeddings.iter().map(|one| owner(one.req_id)).collect();
        let first_time = |&(link_id, _): &(i64, i32)| -> Owner {
            let request = requests.get_mut(ids.get(&link_id)?)?;
            let is_first = request.record_admission();
            request.owner().filter(|_| is_first)
        };
        let admitted = step.admitted.iter().map(first_time).collect();
        let owned = OwnedStep {
            step,
            rows,
            admitted,
            errors,
            prompts,
            embeddings,
        };
        owned.split(&mut self.parts);
        for (link_id, id) in ended {
            self.engines[engine].ids.remove(&link_id);
            self.forget(id);
        }
    }
}
