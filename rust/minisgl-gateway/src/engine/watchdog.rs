//! Whether the engine process gets on, by its heartbeats: `minisgl.message.heartbeat.Watchdog` of one process, with its words.

use std::time::{Duration, Instant};

use crate::message::{Heartbeat, Phase};

/// Between two heartbeats.
const INTERVAL: Duration = Duration::from_millis(500);
/// A process that was silent for so long does not merely wait for another one.
const SILENT: Duration = Duration::from_millis(1500);
/// The longest silence.
const SILENCE: Duration = Duration::from_secs(3);
/// Between two forwards, in seconds; a step of the loop takes milliseconds.
const LOOP_TIMEOUT_S: f64 = 3.0;
const NAME: &str = "the engine process";

/// Whether the engine process gets on. Silence counts from the first heartbeat or [`Watchdog::expect`] on.
#[derive(Debug)]
pub struct Watchdog {
    step_timeout: Duration,
    began: Option<Instant>,
    last_look: Option<Instant>,
    heard: Option<Instant>,
    beat: Heartbeat,
}

impl Watchdog {
    /// A forward may take `step_timeout`.
    #[must_use]
    pub fn new(step_timeout: Duration) -> Self {
        let beat = Heartbeat {
            phase: Phase::Idle,
            age_s: 0.0,
            step: -1,
        };
        Self {
            step_timeout,
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
        INTERVAL.min(self.step_timeout / 4)
    }

    /// What is wrong with the engine process, if anything, for who asks every [`Watchdog::look_every`]: time in which
    /// this process itself stood still does not count.
    pub fn look(&mut self, now: Instant) -> Option<String> {
        let late = self
            .last_look
            .replace(now)
            .is_none_or(|last| now.saturating_duration_since(last) > SILENT);
        if late {
            self.began = Some(now);
            self.heard = self.heard.map(|_| now);
        }
        self.trouble(now)
    }

    /// What is wrong now; None if the engine process gets on.
    #[must_use]
    pub fn trouble(&self, now: Instant) -> Option<String> {
        let silent = now.saturating_duration_since(self.heard?);
        let watched = self.began.map_or(f64::INFINITY, |began| {
            now.saturating_duration_since(began).as_secs_f64()
        });
        let Heartbeat { phase, age_s, step } = self.beat;
        let running_s = (age_s + silent.as_secs_f64()).min(watched);
        let limit_s = self.step_timeout.as_secs_f64();
        let slow = phase == Phase::Forward && running_s > limit_s;
        if silent > SILENT && (slow || silent > SILENCE) {
            return Some(format!("no heartbeat from {NAME} for {:.1} s", silent.as_secs_f64()));
        }
        if slow {
            let limit = format!(", the limit is {limit_s} (--step-timeout)");
            return Some(format!("{NAME} did not finish step {step} in {running_s:.1} s{limit}"));
        }
        if phase == Phase::Working && age_s > LOOP_TIMEOUT_S {
            return Some(format!("the step loop of {NAME} has not moved for {age_s:.1} s"));
        }
        None
    }
}
