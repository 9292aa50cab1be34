//! State of a pool (front ends, engines and requests), and the effect of each message on it.
//!
//! Invariants: messages to be sent are in `out`, in order; a request's tokens are counted before they are forwarded.

use std::collections::BTreeMap;
use std::rc::Rc;

use minisgl_gateway::message::{
    EngineReady, FromEngine, Heartbeat, LoadProgress, NewRequest, Pairs, Phase, StepTokens, ToEngine,
    encode_from_engine,
};
use serde::Serialize;

use super::engines::{Engine, State, wrap_messages};
use super::requests::{ABORT, Assignment, ById, ERROR, FrontEnd, FrontEndRules, OwnPrefixes, Request, STOP, as_i64};
use crate::policy::{Placed, Router, RouterConfig};

/// Metrics snapshot of a pool: loads, states and counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Readings {
    /// Number of requests on each engine.
    pub loads: Vec<usize>,
    /// State of each engine: `starting`, `ready`, `silent` or `dead`.
    pub states: Vec<&'static str>,
    /// Number of times that each engine was lost while ready.
    pub num_losses_total: Vec<u64>,
    /// Number of unfinished requests.
    pub num_live: usize,
    /// Number of unfinished requests that are queued.
    pub num_waiting: usize,
    /// Requests that were moved from a lost engine to another one, in total.
    pub num_moved_total: u64,
}

/// A message to be sent, or a connection to be closed.
#[derive(Clone, Debug)]
pub enum Out {
    /// A message for the engine of this index.
    Engine(usize, ToEngine),
    /// An encoded frame for one front end.
    Frame {
        /// Id of the front end that gets the frame.
        to: u32,
        /// Encoded messages with the length prefix.
        frame: Rc<Vec<u8>>,
        /// Whether the frame may be dropped if the front end does not read.
        droppable: bool,
    },
    /// Close the front end of this id once its queue is sent.
    Close(u32),
}

/// State machine of a pool: takes events, and gives the messages to send with `take_out`. No I/O, no clock.
pub struct Switchboard {
    pub(super) router: Router,
    pub(super) engines: Vec<Engine>,
    pub(super) front_ends: BTreeMap<u32, FrontEnd>,
    pub(super) requests: ById<Request>,
    next_id: i64,
    next_link_id: i64,
    /// Cached prefixes by API key; `None` without keys. With keys a priority orders only the queue, and engines get 0.
    pub(super) own_prefixes: Option<OwnPrefixes>,
    next_front_end: u32,
    rules: Rc<FrontEndRules>,
    /// Messages that an engine gets when it becomes ready, by adapter id and by prefix id.
    pub(super) adapters: BTreeMap<i64, ToEngine>,
    pub(super) prefixes: BTreeMap<i64, ToEngine>,
    pub(super) sent_ready: Option<Box<EngineReady>>,
    pub(super) is_shutting_down: bool,
    pub(super) ended: Option<String>,
    pub(super) num_moved: u64,
    pub(super) parts: Vec<(u32, StepTokens)>,
    placed: Vec<Placed>,
    pub(super) out: Vec<Out>,
}

impl Switchboard {
    /// Makes a pool with all engines starting and no front end.
    ///
    /// # Errors
    /// Names the invalid field of the router's configuration.
    pub fn new(config: RouterConfig, rules: Rc<FrontEndRules>) -> Result<Self, String> {
        let engines = (0..config.num_engines).map(|_| Engine::default()).collect();
        Ok(Self {
            own_prefixes: (!config.keys.is_empty()).then(|| OwnPrefixes::new(config.page_size)),
            router: Router::new(config)?,
            engines,
            rules,
            front_ends: BTreeMap::new(),
            requests: ById::default(),
            next_id: 0,
            next_link_id: 0,
            next_front_end: 0,
            prefixes: BTreeMap::new(),
            adapters: BTreeMap::new(),
            sent_ready: None,
            is_shutting_down: false,
            ended: None,
            num_moved: 0,
            parts: Vec::new(),
            placed: Vec::new(),
            out: Vec::new(),
        })
    }

    /// Places the requests that may go, and returns all messages to be sent since the last call.
    pub fn take_out(&mut self) -> Vec<Out> {
        if self.ended.is_none() {
            self.place();
            self.flush_parts();
        }
        std::mem::take(&mut self.out)
    }

    /// Writes the counters into `readings`.
    pub(super) fn write_metrics(&self, readings: &mut Readings) {
        let engines = &self.engines;
        readings.loads.clear();
        readings.loads.extend(engines.iter().map(|one| one.ids.len()));
        readings.states.clear();
        readings.states.extend(engines.iter().map(|one| one.state.name()));
        readings.num_losses_total.clear();
        readings
            .num_losses_total
            .extend(engines.iter().map(|one| one.num_losses));
        readings.num_live = self.requests.len();
        readings.num_waiting = self.router.num_waiting();
        readings.num_moved_total = self.num_moved;
    }

    /// Returns the reason for which the pool has ended (empty after a shutdown), or `None` while it runs.
    pub fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    /// Returns true if the front end has unfinished requests.
    pub(super) fn is_busy(&self, front_end: u32) -> bool {
        self.front_ends.get(&front_end).is_some_and(|one| !one.live.is_empty())
    }

    pub(super) fn is_shutting_down(&self) -> bool {
        self.is_shutting_down
    }

    /// Returns the number of unfinished requests.
    pub fn num_live(&self) -> usize {
        self.requests.len()
    }

    // ------------------------------------------------------------------------------------------------- front ends

    /// Registers a new front end and returns its id. Queues a snapshot of every engine's state for it.
    pub fn add_front_end(&mut self) -> u32 {
        let id = self.next_front_end;
        self.next_front_end += 1;
        self.front_ends.insert(id, FrontEnd::new(id, &self.rules));
        let engines = self.engines.iter().enumerate();
        let mut messages: Vec<_> = engines.flat_map(|(engine, one)| one.snapshot(engine)).collect();
        messages.extend(self.sent_ready.clone().map(FromEngine::EngineReady));
        messages.iter().for_each(|message| self.send(id, message, false));
        id
    }

    /// Handles a message of a front end; no-op if the id is unknown. An error is the reason to disconnect it.
    pub fn handle_message(&mut self, id: u32, message: ToEngine) -> Result<(), String> {
        let Some(front_end) = self.front_ends.get_mut(&id) else {
            return Ok(());
        };
        front_end.check(&message)?;
        match message {
            ToEngine::Hello { name } => front_end.hello(&name),
            ToEngine::AddRequest(given) => self.add(id, given),
            ToEngine::AbortRequest(own_id) => self.end_early(id, own_id, ABORT, ToEngine::AbortRequest),
            ToEngine::FinishRequest(own_id) => self.end_early(id, own_id, STOP, ToEngine::FinishRequest),
            ToEngine::Shutdown => {
                self.is_shutting_down = true;
                for engine in (0..self.engines.len()).filter(|&engine| self.engines[engine].is_linked) {
                    self.out.push(Out::Engine(engine, ToEngine::Shutdown));
                }
                self.end_if_all_left();
            }
            for_all => {
                match for_all {
                    ToEngine::AddPrefix { prefix_id, .. } => drop(self.prefixes.insert(prefix_id, for_all.clone())),
                    ToEngine::RemovePrefix(prefix_id) => drop(self.prefixes.remove(&prefix_id)),
                    ToEngine::LoadAdapter { adapter, .. } => drop(self.adapters.insert(adapter, for_all.clone())),
                    ToEngine::UnloadAdapter(adapter) => drop(self.adapters.remove(&adapter)),
                    _ => {} // `ClearCache` and `Watch` leave no state
                }
                self.send_to_ready(&for_all);
            }
        }
        Ok(())
    }

    /// Removes a front end that has disconnected, or must be for `reason`. Aborts its requests and logs that to the
    /// others.
    pub fn remove_front_end(&mut self, id: u32, reason: Option<&str>) {
        let Some(removed) = self.front_ends.remove(&id) else {
            return;
        };
        if let Some(reason) = reason {
            let text = self.rules.ends.replace("{reason}", reason);
            self.send(id, &FromEngine::EngineFailed(text), true);
        }
        self.out.push(Out::Close(id));
        let mut live: Vec<i64> = removed.live.values().copied().collect();
        live.sort_unstable();
        for &id in &live {
            let Some(request) = self.requests.get_mut(&id) else {
                continue;
            };
            request.front_end = None;
            match request.assignment {
                Some(Assignment { engine, link_id }) => {
                    self.out.push(Out::Engine(engine, ToEngine::AbortRequest(link_id)));
                }
                None => self.forget(id),
            }
        }
        if reason.is_some() || !live.is_empty() {
            let text = match reason {
                Some(reason) => self.rules.put_out.replace("{reason}", reason),
                None => self.rules.has_gone.clone(),
            };
            let text = text.replace("{num_live}", &live.len().to_string());
            self.send_log_line(text.replace("{name}", &removed.name));
        }
    }

    fn add(&mut self, owner: u32, given: NewRequest) {
        let (own_id, num_generated) = (given.req_id, given.num_generated);
        let most = as_i64(given.tokens.len()).min(given.sampling.max_tokens.unwrap_or(i64::MAX));
        let generated = usize::try_from(num_generated).ok().filter(|_| num_generated < most);
        let id = self.next_id;
        self.next_id += 1;
        let request = Request::new(owner, given, generated.unwrap_or(0));
        let refused = match (generated, num_generated) {
            (None, n) if n != 0 => Err(format!("num_generated: {n}: must leave a prompt and a token to make")),
            _ => self.enqueue(id, &request, false),
        };
        self.requests.insert(id, request);
        if let Some(front_end) = self.front_ends.get_mut(&owner) {
            front_end.live.insert(own_id, id);
        }
        if let Err(text) = refused {
            self.end(id, ERROR, Some(&text));
        }
    }

    pub(super) fn enqueue(&mut self, id: i64, request: &Request, again: bool) -> Result<(), String> {
        let given = &request.given;
        let Ok(key) = usize::try_from(given.key) else {
            return Err(format!("key {}: must be at least 0", given.key));
        };
        let namespace = u32::try_from(given.sampling.adapter).unwrap_or(0);
        let priority = if given.background { i64::MAX } else { given.priority };
        self.router.add(id, &given.tokens, priority, key, again, namespace)
    }

    /// Ends a request early (abort or finish): forwards `message` to its engine, or ends it here if it is queued.
    fn end_early(&mut self, front_end: u32, own_id: i64, reason: i32, message: fn(i64) -> ToEngine) {
        let Some(id) = self.front_ends.get(&front_end).and_then(|one| one.live.get(&own_id)) else {
            return; // the request has ended in the meantime
        };
        let id = *id;
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        request.ending.get_or_insert(reason);
        match request.assignment {
            Some(Assignment { engine, link_id }) => self.out.push(Out::Engine(engine, message(link_id))),
            None => self.end(id, reason, None),
        }
    }

    // --------------------------------------------------------------------------------------------------- requests

    fn place(&mut self) {
        self.router.place(&mut self.placed);
        for Placed { req_id, engine, .. } in self.placed.drain(..) {
            let Some(request) = self.requests.get_mut(&req_id) else {
                continue;
            };
            let link_id = self.next_link_id;
            self.next_link_id += 1;
            self.engines[engine].ids.insert(link_id, req_id);
            let message = request.assign(Assignment { engine, link_id }, self.own_prefixes.is_none());
            self.out.push(Out::Engine(engine, message));
        }
    }

    /// Ends a request without an engine, with a finish reason and an optional error text.
    pub(super) fn end(&mut self, id: i64, reason: i32, text: Option<&str>) {
        let Some(request) = self.requests.get(&id) else { return };
        if let Some((owner, own_id)) = request.owner() {
            let step = StepTokens {
                req_ids: vec![own_id],
                tokens: vec![-1],
                reasons: vec![reason],
                errors: Pairs(text.map(|text| (own_id, text.to_owned())).into_iter().collect()),
                ..StepTokens::default()
            };
            self.parts.push((owner, step));
        }
        self.forget(id);
    }

    pub(super) fn forget(&mut self, id: i64) {
        let Some(request) = self.requests.remove(&id) else {
            return;
        };
        self.router.remove(id, request.num_generated());
        if let Some(own) = self.own_prefixes.as_mut().filter(|_| request.reported_admission) {
            own.add(&request);
        }
        if let Some(front_end) = request.front_end.and_then(|owner| self.front_ends.get_mut(&owner)) {
            front_end.live.remove(&request.given.req_id);
        }
    }

    // ------------------------------------------------------------------------------------------------------- send

    /// Queues the collected step outputs, in one frame per front end.
    pub(super) fn flush_parts(&mut self) {
        while let Some(&(owner, _)) = self.parts.first() {
            let of_owner = self.parts.extract_if(.., |part| part.0 == owner);
            let messages: Vec<_> = of_owner.map(|part| FromEngine::StepTokens(part.1)).collect();
            let frame = Rc::new(encode_from_engine(&messages));
            self.out.push(Out::Frame {
                to: owner,
                frame,
                droppable: false,
            });
        }
    }

    /// Sends a heartbeat to all front ends.
    pub fn beat(&mut self) {
        let beat = Heartbeat {
            phase: Phase::Idle,
            age_s: 0.0,
            step: -1,
        };
        self.send_all(FromEngine::Heartbeat(beat), true);
    }

    pub(super) fn forward(&mut self, engine: usize, raw: &[u8], droppable: bool) {
        self.send_all(wrap_messages(engine, &[raw]), droppable);
    }

    /// Sends a log line to all front ends.
    pub(super) fn send_log_line(&mut self, text: String) {
        let (done, total) = (0, 0);
        self.send_all(FromEngine::LoadProgress(LoadProgress { text, done, total }), false);
    }

    /// Sends a message to all front ends, after the tokens that were handled before it.
    pub(super) fn send_all(&mut self, message: FromEngine, droppable: bool) {
        self.flush_parts();
        let frame = Rc::new(encode_from_engine(&[message]));
        for &to in self.front_ends.keys() {
            let frame = Rc::clone(&frame);
            self.out.push(Out::Frame { to, frame, droppable });
        }
    }

    fn send(&mut self, to: u32, message: &FromEngine, droppable: bool) {
        let frame = Rc::new(encode_from_engine(std::slice::from_ref(message)));
        self.out.push(Out::Frame { to, frame, droppable });
    }

    fn send_to_ready(&mut self, message: &ToEngine) {
        for (engine, one) in self.engines.iter().enumerate() {
            if one.state == State::Ready {
                self.out.push(Out::Engine(engine, message.clone()));
            }
        }
    }
}
