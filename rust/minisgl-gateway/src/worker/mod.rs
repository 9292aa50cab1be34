//! Event loop of the gateway: probes, and generation requests from header to response.
//!
//! Invariants: nothing was written for a request that is proxied; leaving `answer`, in whatever way, aborts what still
//! runs in the engine and writes the access log line; a panic is an error of one request.

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
use crate::engine::{EngineLink, Watchdog};
use crate::http::{Handler, Head, Outcome, Writer};
use crate::live::Live;
use crate::message::prepared::Prepared;
use crate::metrics::Reason;
use crate::shared::{Loaded, Shared};

/// Paths of generation requests, which Python prepares: the route's label in metrics, and an alias (empty: none).
const PATHS: [(&str, &str); 3] = [
    ("/v1/chat/completions", "/chat/completions"),
    ("/v1/completions", "/completions"),
    ("/generate", ""),
];

fn route_of(path: &str) -> Option<&'static str> {
    let mut routes = PATHS.iter().filter(|(route, other)| [*route, other].contains(&path));
    routes.next().map(|(route, _)| *route)
}

/// Handler of the gateway's requests, and state of its event loop.
pub struct Worker {
    shared: Arc<Shared>,
    loaded: RefCell<Option<Arc<Loaded>>>,
    live: RefCell<Live>,
    link: RefCell<Option<Rc<EngineLink>>>,
    watchdog: RefCell<Option<Watchdog>>, // set by `serve`
    is_ready: Cell<bool>,
    connected: RefCell<Option<Sender<()>>>,
    scratch: RefCell<Scratch>,
    failure: RefCell<Option<String>>, // why the engine was lost
    draining: Cell<bool>,
    me: Weak<Worker>,
}

impl Worker {
    /// Makes a worker that answers only probes.
    pub fn new(shared: Arc<Shared>) -> Rc<Worker> {
        Rc::new_cyclic(|me| Worker {
            shared,
            loaded: RefCell::new(None),
            live: RefCell::new(Live::default()),
            link: RefCell::new(None),
            watchdog: RefCell::new(None),
            is_ready: Cell::new(false),
            connected: RefCell::new(None),
            scratch: RefCell::new(Scratch::default()),
            failure: RefCell::new(None),
            draining: Cell::new(false),
            me: Weak::clone(me),
        })
    }

    /// Starts answering generation requests once the engine process is ready, and notifies `connected` then.
    pub fn serve(&self, loaded: Arc<Loaded>, connected: Sender<()>) {
        *self.connected.borrow_mut() = Some(connected);
        let mut watchdog = Watchdog::new(loaded.config.limits.step_timeout, loaded.config.watch);
        watchdog.expect(Instant::now());
        *self.watchdog.borrow_mut() = Some(watchdog);
        *self.loaded.borrow_mut() = Some(loaded);
    }

    /// Proxies all later requests.
    pub fn drain(&self) {
        self.draining.set(true);
    }

    /// Proxies all later requests, and ends those in progress with the error `reason`.
    pub fn fail(&self, reason: &str) {
        self.drain();
        self.engine_gone(reason);
    }

    /// Returns the loaded model, or the reason for which requests cannot be answered here.
    fn serving(&self) -> Result<Arc<Loaded>, Reason> {
        if self.draining.get() {
            return Err(Reason::Draining);
        }
        let is_there = self.is_ready.get() && self.link.borrow().is_some();
        let loaded = self.loaded.borrow().clone();
        loaded.filter(|_| is_there).ok_or(Reason::Loading)
    }

    /// Counts a request by its route; `None`: the gateway answered it.
    fn count(&self, head: &Head, by_python: Option<Reason>) {
        let route = route_of(&head.target).unwrap_or("other");
        self.shared.metrics.requests.add(route, by_python);
    }

    fn is_healthy(&self) -> bool {
        let is_well = |one: &Watchdog| one.failure(Instant::now()).is_none();
        self.link.borrow().is_some() && self.is_ready.get() && self.watchdog.borrow().as_ref().is_some_and(is_well)
    }

    fn route_post(&self, head: &Head) -> Result<usize, Reason> {
        let is_asked = head.method == "POST" && route_of(&head.target).is_some();
        is_asked.then_some(()).ok_or(Reason::Route)?;
        let limit = self.serving()?.config.limits.max_body_bytes;
        (head.content_length <= limit).then_some(limit).ok_or(Reason::Body)
    }
}

impl Handler for Worker {
    fn route(&self, head: &Head) -> Option<usize> {
        if self.probe_response(head).is_some() {
            return Some(0);
        }
        let route = self.route_post(head);
        route.map_err(|reason| self.count(head, Some(reason))).ok()
    }

    async fn can_send_body(&self, head: &Head) -> bool {
        let reply = self.shared.questions.ask(head, None).await;
        matches!(reply, Some((Prepared::Read, _)))
    }

    fn on_proxied(&self, head: &Head) {
        self.count(head, Some(Reason::Body));
    }

    async fn answer(self: Rc<Self>, head: Rc<Head>, body: Bytes, writer: Writer) -> Outcome {
        if head.method == "GET" {
            return self.answer_probe(&head, &writer);
        }
        let (outcome, reason) = Rc::clone(&self).answer_post(&head, body, writer).await;
        self.count(&head, reason);
        outcome
    }
}
