//! The gateway's event loop: requests that it is sure of, from head to answer.
//!
//! Invariants: what is passed on was not begun; leaving `answer`, however that comes, ends what still runs in the engine,
//! and writes the access line; a panic is the error of one request.

mod engine;
mod generate;
mod native;

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use bytes::Bytes;

use crate::answer::generation::Scratch;
use crate::answer::plan::Endpoint;
use crate::callers::{self, Headers};
use crate::engine::{EngineLink, Watchdog};
use crate::http::{Handler, Head, Outcome, Writer};
use crate::keys::Bucket;
use crate::live::Live;
use crate::metrics::Reason;
use crate::pool::Pool;
use crate::prepare::Loaded;
use crate::shared::Shared;

/// What answers requests: the gateway's own part of the server.
pub struct Worker {
    shared: Arc<Shared>,
    pool: Pool,
    loaded: RefCell<Option<Arc<Loaded>>>,
    live: RefCell<Live>,
    link: RefCell<Option<Rc<EngineLink>>>,
    watchdog: RefCell<Option<Watchdog>>, // since there is something to serve
    is_ready: Cell<bool>,
    connected: RefCell<Option<Sender<()>>>,
    scratch: RefCell<Scratch>,
    num_encoding: Cell<usize>,
    buckets: RefCell<Vec<Option<Bucket>>>, // of API keys, from number 1
    draining: Cell<bool>,
    me: Weak<Worker>,
}

impl Worker {
    /// Answers nothing but probes yet.
    pub fn new(shared: Arc<Shared>, pool: Pool) -> Rc<Worker> {
        Rc::new_cyclic(|me| Worker {
            shared,
            pool,
            loaded: RefCell::new(None),
            live: RefCell::new(Live::default()),
            link: RefCell::new(None),
            watchdog: RefCell::new(None),
            is_ready: Cell::new(false),
            connected: RefCell::new(None),
            scratch: RefCell::new(Scratch::default()),
            num_encoding: Cell::new(0),
            buckets: RefCell::new(Vec::new()),
            draining: Cell::new(false),
            me: Weak::clone(me),
        })
    }

    /// From now on it answers what it is sure of, as soon as the engine process is ready; `connected` is told that.
    pub fn serve(&self, loaded: Arc<Loaded>, connected: Sender<()>) {
        *self.connected.borrow_mut() = Some(connected);
        let mut watchdog = Watchdog::new(loaded.config.limits.step_timeout, loaded.config.watch);
        watchdog.expect(Instant::now());
        *self.watchdog.borrow_mut() = Some(watchdog);
        let now = Instant::now();
        *self.buckets.borrow_mut() = loaded.config.api_keys.iter().map(|key| Bucket::of(key, now)).collect();
        *self.loaded.borrow_mut() = Some(loaded);
    }

    /// From now on it passes everything on.
    pub fn drain(&self) {
        self.draining.set(true);
    }

    /// The same, and what it is answering ends with an error.
    pub fn fail(&self, reason: &str) {
        self.drain();
        self.engine_gone(reason);
    }

    /// What is needed to answer anything.
    fn serving(&self) -> Result<Arc<Loaded>, Reason> {
        if self.draining.get() {
            return Err(Reason::Draining);
        }
        let is_there = self.is_ready.get() && self.link.borrow().is_some();
        let loaded = self.loaded.borrow().clone();
        loaded.filter(|_| is_there).ok_or(Reason::Loading)
    }

    /// What became of a request; None: it was answered.
    fn count(&self, head: &Head, passed_on: Option<Reason>) {
        let route = Endpoint::of(&head.target).map_or("other", |(_, route)| route);
        self.shared.metrics.requests.add(route, passed_on);
    }

    fn is_healthy(&self) -> bool {
        let is_well = |one: &Watchdog| one.trouble(Instant::now()).is_none();
        self.link.borrow().is_some() && self.is_ready.get() && self.watchdog.borrow().as_ref().is_some_and(is_well)
    }

    /// Headers of the answer to a request whose head is plainly in order, and the number of its caller's API key.
    fn caller(head: &Head, loaded: &Loaded) -> Option<(Headers, usize)> {
        let config = &loaded.config;
        let fits = head.method == "POST" && (1..=config.limits.max_body_bytes).contains(&head.content_length);
        (fits && callers::sends_json(head)).then_some(())?;
        let key = callers::may_ask(head, config, true)?;
        let headers = callers::headers(head, config, callers::request_id(head)?)?;
        Some((headers, key))
    }
}

impl Handler for Worker {
    fn route(&self, head: &Head) -> Option<usize> {
        if self.native(head).is_some() {
            return Some(0);
        }
        let found = Endpoint::of(&head.target).ok_or(Reason::Route).and_then(|_| {
            let loaded = self.serving()?;
            Self::caller(head, &loaded).ok_or(Reason::Error)?;
            Ok(loaded.config.limits.max_body_bytes)
        });
        found.map_err(|reason| self.count(head, Some(reason))).ok()
    }

    async fn answer(self: Rc<Self>, head: Rc<Head>, body: Bytes, writer: Writer) -> Outcome {
        if head.method == "GET" {
            return self.answer_native(&head, &writer);
        }
        let found = Rc::clone(&self).answer_generating(&head, body, writer).await;
        self.count(&head, found.err());
        if found.is_ok() {
            Outcome::Answered
        } else {
            Outcome::PassOn
        }
    }
}
