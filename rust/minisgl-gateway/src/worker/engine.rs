//! Messages from and to the engine process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::Worker;
use crate::answer::errors::Failure;
use crate::answer::generation::Generation;
use crate::engine::{EngineLink, Watchdog};
use crate::message::{FromEngine, ToEngine};

impl Worker {
    /// Handles messages of the engine process until the connection is lost, and then fails all requests.
    pub async fn follow(&self, link: EngineLink) {
        let link = Rc::new(link);
        *self.link.borrow_mut() = Some(Rc::clone(&link));
        let (mut messages, mut due) = (Vec::new(), Vec::new());
        let reason = loop {
            if let Err(error) = link.receive(&mut messages).await {
                break error;
            }
            let began = Instant::now();
            if let Some(failure) = self.handle(&mut messages, &mut due) {
                break failure;
            }
            self.notify_all(&mut due);
            self.publish_counts();
            self.shared.metrics.dispatch.add(began.elapsed(), 1);
            tokio::task::yield_now().await; // let other tasks run
        };
        self.engine_gone(&reason);
    }

    /// Handles messages. Returns the engine's fatal error message, if it sent one.
    fn handle(&self, messages: &mut Vec<FromEngine>, due: &mut Vec<Rc<Generation>>) -> Option<String> {
        for message in messages.drain(..) {
            match message {
                FromEngine::StepTokens(mut step) => {
                    self.live.borrow_mut().process(&mut step, &self.shared.metrics, due);
                }
                FromEngine::Heartbeat(beat) => self.with_watchdog(|watchdog, now| watchdog.on_heartbeat(beat, now)),
                FromEngine::EngineReady(_) => {
                    self.is_ready.set(true);
                    if let Some(waits) = self.connected.borrow_mut().take() {
                        let _ = waits.send(()); // an error means that the receiver is gone
                    }
                    self.with_watchdog(Watchdog::expect);
                }
                FromEngine::EngineFailed(text) => return Some(text),
                _ => {} // only the Python server uses the others
            }
        }
        None
    }

    fn notify_all(&self, due: &mut Vec<Rc<Generation>>) {
        let now = Instant::now();
        for generation in due.drain(..) {
            generation.is_due.set(false);
            self.notify(&generation, now);
        }
    }

    pub(super) fn notify(&self, generation: &Rc<Generation>, now: Instant) {
        let metrics = &self.shared.metrics;
        let scratch = &mut *self.scratch.borrow_mut();
        let result = catch_unwind(AssertUnwindSafe(|| generation.notify(now, metrics, scratch)));
        match result {
            Ok(stops) => stops
                .into_iter()
                .for_each(|id| self.finish(id, ToEngine::FinishRequest(id))),
            Err(_) => generation.fail(Failure::Internal),
        }
    }

    pub(super) fn finish(&self, id: i64, message: ToEngine) {
        if self.live.borrow_mut().remove(id) {
            self.send(message);
        }
    }

    pub(super) fn send(&self, message: ToEngine) {
        if let Some(link) = &*self.link.borrow() {
            link.send(message);
        }
    }

    pub(super) fn engine_gone(&self, reason: &str) {
        *self.link.borrow_mut() = None;
        self.failure.borrow_mut().get_or_insert_with(|| reason.to_owned());
        let all = self.live.borrow_mut().take_all();
        for generation in all {
            generation.fail(Failure::EngineGone(reason.to_owned()));
        }
        self.publish_counts();
    }

    /// Returns the reason for which the engine was lost; empty if it was not.
    pub(super) fn reason_gone(&self) -> String {
        self.failure.borrow().clone().unwrap_or_default()
    }

    /// Publishes the numbers of waiting and running choices to the metrics.
    pub(super) fn publish_counts(&self) {
        let num_live = self.live.borrow().len();
        self.shared.metrics.in_flight.record(num_live as u64);
        let num_waiting = self.shared.waiting.requests.load(Relaxed);
        self.shared.metrics.queued.record(num_waiting as u64);
        self.shared.num_live.store(num_live, Relaxed);
    }

    /// Polls the watchdog. Call it every half second: `is_healthy` has the result.
    pub fn poll_watchdog(&self) {
        self.with_watchdog(|watchdog, now| drop(watchdog.poll(now))); // `is_healthy` computes the failure itself
    }

    fn with_watchdog(&self, what: impl FnOnce(&mut Watchdog, Instant)) {
        if let Some(watchdog) = &mut *self.watchdog.borrow_mut() {
            what(watchdog, Instant::now());
        }
    }
}
