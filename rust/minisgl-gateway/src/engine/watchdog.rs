//! Whether the engine process gets on, by its heartbeats: `minisgl.message.heartbeat.Watchdog` of one process, with its words.

use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::message::{Heartbeat, Phase};

const NAME: &str = "the engine process";

/// `minisgl.message.heartbeat.WatchTimes`, in seconds.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct WatchTimes {
    pub interval_s: f64,
    pub silent_s: f64,
    pub silence_s: f64,
    pub loop_timeout_s: f64,
}

/// Whether the engine process gets on. Silence counts from the first heartbeat or [`Watchdog::expect`] on.
#[derive(Debug)]
pub struct Watchdog {
    step_timeout: Duration,
    times: WatchTimes,
    began: Option<Instant>,
    last_look: Option<Instant>,
    heard: Option<Instant>,
    beat: Heartbeat,
}

impl Watchdog {
    /// A forward may take `step_timeout_s`; any time, if that is no length of time.
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
            last_look: None,
            heard: None,
            beat,
        }
    }

    /// A heartbeat came.
    pub fn hear(&mut self, beat: Heartbeat, now: Instant) {
        self.heard = Some(now);
        self.beat = beat;
    }

    /// From now on silence counts.
    pub fn expect(&mut self, now: Instant) {
        self.heard = Some(now);
    }

    /// What it says was not read meanwhile: silence counts from now on, if it counted already.
    pub fn was_not_read(&mut self, now: Instant) {
        self.heard = self.heard.map(|_| now);
    }

    /// So often [`Watchdog::look`] wants to be called.
    #[must_use]
    pub fn look_every(&self) -> Duration {
        let interval = Duration::try_from_secs_f64(self.times.interval_s);
        interval.unwrap_or(Duration::ZERO).min(self.step_timeout / 4)
    }

    /// What is wrong with the engine process, if anything, for who asks every [`Watchdog::look_every`]: time in which
    /// this process itself stood still does not count.
    pub fn look(&mut self, now: Instant) -> Option<String> {
        let late = self
            .last_look
            .replace(now)
            .is_none_or(|last| now.saturating_duration_since(last).as_secs_f64() > self.times.silent_s);
        if late {
            self.began = Some(now);
            self.heard = self.heard.map(|_| now);
        }
        self.trouble(now)
    }

    /// What is wrong now; None if the engine process gets on.
    #[must_use]
    pub fn trouble(&self, now: Instant) -> Option<String> {
        let silent_s = now.saturating_duration_since(self.heard?).as_secs_f64();
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
