//! Failure detection for an engine process by heartbeats, with the error texts of `minisgl.message.heartbeat.Watchdog`.

use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::message::{Heartbeat, Phase};

const NAME: &str = "the engine process";

/// Heartbeat timing in seconds, as in `minisgl.message.heartbeat.WatchTimes`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct WatchTimes {
    pub interval_s: f64,
    pub silent_s: f64,
    pub silence_s: f64,
    pub loop_timeout_s: f64,
}

/// Failure detector for an engine process. Silence counts from the first heartbeat or [`Watchdog::expect`] on.
#[derive(Debug)]
pub struct Watchdog {
    step_timeout: Duration,
    times: WatchTimes,
    began: Option<Instant>,
    last_poll: Option<Instant>,
    last_heard: Option<Instant>,
    beat: Heartbeat,
}

impl Watchdog {
    /// Makes a watchdog. One forward pass may take `step_timeout_s` seconds; any time if that is not a valid duration.
    #[must_use]
    pub fn new(step_timeout_s: f64, times: WatchTimes) -> Self {
        let beat = Heartbeat {
            phase: Phase::Idle,
            age_s: 0.0,
            step: -1,
        };
        Self {
            step_timeout: Duration::try_from_secs_f64(step_timeout_s).unwrap_or(Duration::MAX / 8),
            times,
            began: None,
            last_poll: None,
            last_heard: None,
            beat,
        }
    }

    /// Records a heartbeat that arrived at `now`.
    pub fn on_heartbeat(&mut self, beat: Heartbeat, now: Instant) {
        self.last_heard = Some(now);
        self.beat = beat;
    }

    /// Starts counting the engine's silence at `now`, as if a heartbeat had arrived.
    pub fn expect(&mut self, now: Instant) {
        self.last_heard = Some(now);
    }

    /// Restarts counting silence at `now` if it was counted: the engine's messages were not read until then.
    pub fn restart_silence(&mut self, now: Instant) {
        self.last_heard = self.last_heard.map(|_| now);
    }

    /// Returns the interval at which [`Watchdog::poll`] must be called.
    #[must_use]
    pub fn poll_interval(&self) -> Duration {
        let interval = Duration::try_from_secs_f64(self.times.interval_s);
        interval.unwrap_or(Duration::ZERO).min(self.step_timeout / 4)
    }

    /// Returns the reason if the engine process has failed. Call it every [`Watchdog::poll_interval`]: after a longer
    /// pause this process itself was stopped, and that time does not count.
    pub fn poll(&mut self, now: Instant) -> Option<String> {
        let late = self
            .last_poll
            .replace(now)
            .is_none_or(|last| now.saturating_duration_since(last).as_secs_f64() > self.times.silent_s);
        if late {
            self.began = Some(now);
            self.last_heard = self.last_heard.map(|_| now);
        }
        self.failure(now)
    }

    /// Returns the reason if the engine process counts as failed at `now`, else `None`.
    #[must_use]
    pub fn failure(&self, now: Instant) -> Option<String> {
        let silent_s = now.saturating_duration_since(self.last_heard?).as_secs_f64();
        let watched = self.began.map_or(f64::INFINITY, |began| {
            now.saturating_duration_since(began).as_secs_f64()
        });
        let Heartbeat { phase, age_s, step } = self.beat;
        let running_s = (age_s + silent_s).min(watched);
        let limit_s = self.step_timeout.as_secs_f64();
        let slow = phase == Phase::Forward && running_s > limit_s;
        if silent_s > self.times.silent_s && (slow || silent_s > self.times.silence_s) {
            return Some(format!("no heartbeat from {NAME} for {silent_s:.1} s"));
        }
        if slow {
            let limit = format!(", the limit is {limit_s} (--step-timeout)");
            return Some(format!("{NAME} did not finish step {step} in {running_s:.1} s{limit}"));
        }
        if phase == Phase::Working && age_s > self.times.loop_timeout_s {
            return Some(format!("the step loop of {NAME} has not moved for {age_s:.1} s"));
        }
        None
    }
}
