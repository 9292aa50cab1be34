//! Who is there, which requests there are and where; what each message does to that.
//!
//! Invariants: what is to be sent stands in `out` in order; a request's tokens are counted before they are passed on.

use std::collections::BTreeMap;
use std::rc::Rc;

use minisgl_gateway::message::{FromPool, Heartbeat, LoadProgress, Phase, StepTokens, ToEngine, encode_from_pool};

use super::engines::{Engine, State};
use super::requests::{ABORT, ById, ERROR, FrontEnd, FrontEndRules, OwnPrefixes, Place, Request, Rest, STOP, as_i64};
use crate::policy::{Placed, Router, RouterConfig};

/// What is counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readings {
    /// By engine: requests that are there.
    pub loads: Vec<usize>,
    /// By engine: `starting`, `ready`, `silent` or `dead`.
    pub states: Vec<&'static str>,
    /// By engine: how often one that was ready was lost.
    pub num_losses_total: Vec<u64>,
    /// Requests that have not ended.
    pub num_live: usize,
    /// Of these, those that stand in line.
    pub num_waiting: usize,
    /// Requests that went on in another engine.
    pub num_moved_total: u64,
}

/// Something to be sent.
#[derive(Clone, Debug)]
pub enum Out {
    /// To this engine.
    Engine(usize, ToEngine),
    /// To this front end; one that is `droppable` need not wait for one that does not read.
    Frame {
        /// Its number.
        to: u32,
        /// With its length in front.
        frame: Rc<Vec<u8>>,
        /// Whether it may be left out.
        droppable: bool,
    },
    /// Nothing more goes to this front end.
    Close(u32),
}

/// What is known of a pool, and what becomes of it.
pub struct Switchboard {
    pub(super) router: Router,
    pub(super) engines: Vec<Engine>,
    pub(super) front_ends: BTreeMap<u32, FrontEnd>,
    pub(super) requests: ById<Request>,
    next_id: i64,
    next_link_id: i64,
    /// Where there are several keys. Then a priority orders the requests of a key in the line, and engines, which know
    /// no keys, do not hear of it.
    pub(super) own_prefixes: Option<OwnPrefixes>,
    next_front_end: u32,
    rules: Rc<FrontEndRules>,
    pub(super) prefixes: BTreeMap<i64, (Vec<i32>, bool)>,
    pub(super) adapters: BTreeMap<i64, (String, String)>,
    pub(super) said_ready: Option<minisgl_gateway::message::EngineReady>,
    pub(super) is_shutting_down: bool,
    pub(super) ended: Option<String>,
    pub(super) num_moved: u64,
    pub(super) parts: Vec<(u32, StepTokens)>,
    placed: Vec<Placed>,
    pub(super) out: Vec<Out>,
}

impl Switchboard {
    /// All engines are starting, no front end is there.
    ///
    /// # Errors
    /// Names the field of the router's configuration that cannot be.
    pub fn new(config: RouterConfig, rules: Rc<FrontEndRules>) -> Result<Self, String> {
        let engines = (0..config.num_engines).map(|_| Engine::new()).collect();
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
            said_ready: None,
            is_shutting_down: false,
            ended: None,
            num_moved: 0,
            parts: Vec::new(),
            placed: Vec::new(),
            out: Vec::new(),
        })
    }

    /// What is to be sent since the last call. Requests that may go are placed first.
    pub fn take_out(&mut self) -> Vec<Out> {
        if self.ended.is_none() {
            self.place();
            self.flush_parts();
        }
        std::mem::take(&mut self.out)
    }

    /// Fills in what is counted.
    pub(super) fn read(&self, readings: &mut Readings) {
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

    /// Why nothing more can be done; empty after a shutdown.
    pub fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    /// Whether a front end has requests that have not ended.
    pub(super) fn is_busy(&self, front_end: u32) -> bool {
        self.front_ends.get(&front_end).is_some_and(|one| !one.live.is_empty())
    }

    pub(super) fn is_shutting_down(&self) -> bool {
        self.is_shutting_down
    }

    /// Requests that have not ended.
    pub fn num_live(&self) -> usize {
        self.requests.len()
    }

    // ------------------------------------------------------------------------------------------------- front ends

    /// Its number. It gets what there was so far.
    pub fn front_end_came(&mut self) -> u32 {
        let number = self.next_front_end;
        self.next_front_end += 1;
        self.front_ends.insert(number, FrontEnd::new(number, &self.rules));
        let mut frames = Vec::new();
        for (engine, one) in self.engines.iter().enumerate() {
            one.snapshot(engine, |message| frames.push(encode_from_pool(&[message])));
        }
        if let Some(ready) = &self.said_ready {
            frames.push(encode_from_pool(&[FromPool::EngineReady(ready)]));
        }
        let frames = frames.into_iter().map(|frame| Out::Frame {
            to: number,
            frame: Rc::new(frame),
            droppable: false,
        });
        self.out.extend(frames);
        number
    }

    /// Why it must go, if that is so.
    pub fn front_end_says(&mut self, number: u32, message: ToEngine) -> Result<(), String> {
        let Some(front_end) = self.front_ends.get_mut(&number) else {
            return Ok(());
        };
        front_end.check(&message)?;
        match message {
            ToEngine::Hello { name } => front_end.hello(&name),
            ToEngine::AddRequest {
                req_id,
                tokens,
                sampling,
                priority,
                num_generated,
                key,
                background,
            } => {
                let rest = Rest {
                    sampling,
                    priority,
                    key,
                    background,
                };
                self.add(number, req_id, tokens, num_generated, rest);
            }
            ToEngine::AbortRequest(own_id) => self.end_early(number, own_id, ABORT, ToEngine::AbortRequest),
            ToEngine::FinishRequest(own_id) => self.end_early(number, own_id, STOP, ToEngine::FinishRequest),
            ToEngine::AddPrefix { prefix_id, tokens, pin } => {
                self.prefixes.insert(prefix_id, (tokens.clone(), pin));
                self.tell_ready(&ToEngine::AddPrefix { prefix_id, tokens, pin });
            }
            ToEngine::RemovePrefix(prefix_id) => {
                self.prefixes.remove(&prefix_id);
                self.tell_ready(&ToEngine::RemovePrefix(prefix_id));
            }
            ToEngine::ClearCache => self.tell_ready(&ToEngine::ClearCache),
            ToEngine::LoadAdapter { adapter, name, path } => {
                self.adapters.insert(adapter, (name.clone(), path.clone()));
                self.tell_ready(&ToEngine::LoadAdapter { adapter, name, path });
            }
            ToEngine::UnloadAdapter(adapter) => {
                self.adapters.remove(&adapter);
                self.tell_ready(&ToEngine::UnloadAdapter(adapter));
            }
            ToEngine::Watch { steps, tree } => self.tell_ready(&ToEngine::Watch { steps, tree }),
            ToEngine::Shutdown => {
                self.is_shutting_down = true;
                for engine in (0..self.engines.len()).filter(|&engine| self.engines[engine].is_linked) {
                    self.out.push(Out::Engine(engine, ToEngine::Shutdown));
                }
                self.end_if_all_left();
            }
        }
        Ok(())
    }

    /// It ended the connection, or for `reason` must go: its requests end, and the others' logs say so.
    pub fn front_end_gone(&mut self, number: u32, reason: Option<&str>) {
        let Some(gone) = self.front_ends.remove(&number) else {
            return;
        };
        if let Some(reason) = reason {
            let text = self.rules.ends.replace("{reason}", reason);
            self.send(number, FromPool::EngineFailed(&text), true);
        }
        self.out.push(Out::Close(number));
        let mut live: Vec<i64> = gone.live.values().copied().collect();
        live.sort_unstable();
        for &id in &live {
            let Some(request) = self.requests.get_mut(&id) else {
                continue;
            };
            request.owner = None;
            match request.place {
                Some(Place { engine, link_id }) => {
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
            self.say_line(text.replace("{name}", &gone.name));
        }
    }

    fn add(&mut self, owner: u32, own_id: i64, tokens: Vec<i32>, num_generated: i64, rest: Rest) {
        let most = as_i64(tokens.len()).min(rest.sampling.max_tokens.unwrap_or(i64::MAX));
        let generated = usize::try_from(num_generated).ok().filter(|_| num_generated < most);
        let id = self.next_id;
        self.next_id += 1;
        let request = Request::new(owner, own_id, tokens, generated.unwrap_or(0), rest);
        let refused = match (generated, num_generated) {
            (None, n) if n != 0 => Err(format!("num_generated: {n}: must leave a prompt and a token to make")),
            _ => self.stand_in_line(id, &request, false),
        };
        self.requests.insert(id, request);
        if let Some(front_end) = self.front_ends.get_mut(&owner) {
            front_end.live.insert(own_id, id);
        }
        if let Err(text) = refused {
            self.end(id, ERROR, Some(&text));
        }
    }

    pub(super) fn stand_in_line(&mut self, id: i64, request: &Request, again: bool) -> Result<(), String> {
        let Ok(key) = usize::try_from(request.key) else {
            return Err(format!("key: {}: there is no such key", request.key));
        };
        let namespace = u32::try_from(request.sampling.adapter).unwrap_or(0);
        let priority = if request.background { i64::MAX } else { request.priority };
        self.router.add(id, &request.tokens, priority, key, again, namespace)
    }

    /// Its front end does not wait for more of it.
    fn end_early(&mut self, front_end: u32, own_id: i64, reason: i32, message: fn(i64) -> ToEngine) {
        let Some(id) = self.front_ends.get(&front_end).and_then(|one| one.live.get(&own_id)) else {
            return; // it has ended meanwhile
        };
        let id = *id;
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        request.ending.get_or_insert(reason);
        match request.place {
            Some(Place { engine, link_id }) => self.out.push(Out::Engine(engine, message(link_id))),
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
            let message = request.placed(Place { engine, link_id }, self.own_prefixes.is_none());
            self.out.push(Out::Engine(engine, message));
        }
    }

    /// An end that no engine says.
    pub(super) fn end(&mut self, id: i64, reason: i32, text: Option<&str>) {
        let Some(request) = self.requests.get(&id) else { return };
        if let Some(owner) = request.owner {
            let own_id = request.own_id;
            let step = StepTokens {
                req_ids: vec![own_id],
                tokens: vec![-1],
                reasons: vec![reason],
                errors: text.map(|text| (own_id, text.to_owned())).into_iter().collect(),
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
        if let Some(own) = self.own_prefixes.as_mut().filter(|_| request.said_admitted) {
            own.add(&request);
        }
        if let Some(front_end) = request.owner.and_then(|owner| self.front_ends.get_mut(&owner)) {
            front_end.live.remove(&request.own_id);
        }
    }

    // ------------------------------------------------------------------------------------------------------- send

    /// What steps brought, in one frame to each front end.
    pub(super) fn flush_parts(&mut self) {
        while let Some(&(owner, _)) = self.parts.first() {
            let of_owner = self.parts.iter().filter(|part| part.0 == owner);
            let messages: Vec<_> = of_owner.map(|part| FromPool::StepTokens(&part.1)).collect();
            let frame = Rc::new(encode_from_pool(&messages));
            self.parts.retain(|part| part.0 != owner);
            self.out.push(Out::Frame {
                to: owner,
                frame,
                droppable: false,
            });
        }
    }

    /// A sign of life.
    pub fn beat(&mut self) {
        let beat = Heartbeat {
            phase: Phase::Idle,
            age_s: 0.0,
            step: -1,
        };
        self.send_all(FromPool::Heartbeat(&beat), true);
    }

    pub(super) fn pass_on(&mut self, engine: usize, raw: &[u8], droppable: bool) {
        let message = FromPool::EngineSays {
            engine: as_i64(engine),
            messages: &[raw],
        };
        self.send_all(message, droppable);
    }

    /// For the logs of all front ends.
    pub(super) fn say_line(&mut self, text: String) {
        let (done, total) = (0, 0);
        self.send_all(FromPool::LoadProgress(&LoadProgress { text, done, total }), false);
    }

    /// Send a message to all front ends, behind the tokens that were taken before it.
    pub(super) fn send_all(&mut self, message: FromPool<'_>, droppable: bool) {
        self.flush_parts();
        let frame = Rc::new(encode_from_pool(&[message]));
        for &to in self.front_ends.keys() {
            let frame = Rc::clone(&frame);
            self.out.push(Out::Frame { to, frame, droppable });
        }
    }

    fn send(&mut self, to: u32, message: FromPool<'_>, droppable: bool) {
        let frame = Rc::new(encode_from_pool(&[message]));
        self.out.push(Out::Frame { to, frame, droppable });
    }

    fn tell_ready(&mut self, message: &ToEngine) {
        for (engine, one) in self.engines.iter().enumerate() {
            if one.state == State::Ready {
                self.out.push(Out::Engine(engine, message.clone()));
            }
        }
    }
}
