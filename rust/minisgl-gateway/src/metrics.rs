//! What the gateway measures, in the words and bounds of `metrics/server_metrics.py`, which adds both up.
//!
//! Invariants: one thread counts, any thread reads; counting neither locks nor allocates. Nothing is observed before the
//! bounds are told.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::answer::choice::Finish;

/// How it is measured: `server/gateway_config.py`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetricsConfig {
    /// Upper ends of the buckets of times.
    pub seconds: Vec<f64>,
    /// Upper ends of the buckets of lengths.
    pub tokens: Vec<f64>,
    /// What is recent began in the last one or in the one before.
    pub window_s: f64,
}

/// Counts by bucket; the last is of what lies beyond the bounds.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: OnceLock<Vec<(f64, AtomicU64)>>, // upper ends, and counts
    sum: AtomicU64,                           // the bits of a float
}

impl Histogram {
    fn bind(&self, bounds: &[f64]) {
        let ends = bounds.iter().copied().chain([f64::INFINITY]);
        let _ = self.buckets.set(ends.map(|end| (end, AtomicU64::new(0))).collect()); // or it was told already
    }

    /// `value` was seen `count` times.
    pub fn observe(&self, value: f64, count: u64) {
        let buckets = self.buckets.get().map_or(&[][..], Vec::as_slice);
        let at = buckets.partition_point(|(end, _)| *end < value);
        if let Some((_, counted)) = buckets.get(at) {
            counted.fetch_add(count, Relaxed);
        }
        let sum = f64::from_bits(self.sum.load(Relaxed)) + value * count as f64;
        self.sum.store(sum.to_bits(), Relaxed);
    }

    /// Counts by bucket, none before there are any, and the sum.
    pub fn read(&self) -> (Vec<u64>, f64) {
        let counts = self.buckets.get().into_iter().flatten();
        (
            counts.map(|(_, count)| count.load(Relaxed)).collect(),
            f64::from_bits(self.sum.load(Relaxed)),
        )
    }
}

/// The most that something has been.
#[derive(Debug, Default)]
pub struct Peak {
    most: AtomicU64,
    window: AtomicU64,
    before: AtomicU64,
}

impl Peak {
    /// It is so many now.
    pub fn see(&self, now: u64) {
        self.window.fetch_max(now, Relaxed);
    }

    fn next_window(&self) {
        let window = self.window.swap(0, Relaxed);
        self.most.fetch_max(window, Relaxed);
        self.before.store(window, Relaxed);
    }

    /// In this window and the one before, and since the start.
    pub fn read(&self) -> (u64, u64) {
        let recent = self.window.load(Relaxed).max(self.before.load(Relaxed));
        (recent, self.most.load(Relaxed).max(recent))
    }
}

/// How often something happened, and how long it took, in nanoseconds.
#[derive(Debug, Default)]
pub struct Meter {
    count: AtomicU64,
    total: AtomicU64,
    longest: Peak,
}

impl Meter {
    /// `count` things took `took` together.
    pub fn add(&self, took: Duration, count: u64) {
        let ns = took.as_nanos() as u64;
        self.count.fetch_add(count, Relaxed);
        self.total.fetch_add(ns, Relaxed);
        self.longest.see(ns);
    }

    /// Count, and seconds: altogether, at most, at most in this window and the one before.
    pub fn read(&self) -> (u64, f64, f64, f64) {
        let (recent, longest) = self.longest.read();
        let seconds = |ns: u64| ns as f64 / 1e9;
        let total = self.total.load(Relaxed);
        (
            self.count.load(Relaxed),
            seconds(total),
            seconds(longest),
            seconds(recent),
        )
    }
}

/// Why Python answers a request: the label `reason` of `minisgl:gateway_requests_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Only the Python server has it.
    Route,
    /// It was asked, and had the whole answer: an error.
    Error,
    /// It was asked, and answers it: it has fields that only the Python server shows.
    Field,
    /// There is no room for a body as large, or its client sends it slowly.
    Body,
    /// The model is not there yet.
    Loading,
    /// The server ends.
    Draining,
}

impl Reason {
    /// All, in order, as they are shown.
    pub const NAMES: [&'static str; 6] = ["route", "error", "field", "body", "loading", "draining"];
}

/// Requests by route, and by what became of them.
#[derive(Debug, Default)]
pub struct Requests([[AtomicU64; Reason::NAMES.len() + 1]; Requests::ROUTES.len()]);

impl Requests {
    /// As they are shown; whatever else is asked for is the last one.
    pub const ROUTES: [&'static str; 4] = ["/v1/chat/completions", "/v1/completions", "/generate", "other"];

    /// One more; None: it was answered here.
    pub fn add(&self, route: &str, passed_on: Option<Reason>) {
        let of_route = Self::ROUTES.iter().position(|one| *one == route);
        let of_route = &self.0[of_route.unwrap_or(Self::ROUTES.len() - 1)];
        of_route[passed_on.map_or(0, |reason| 1 + reason as usize)].fetch_add(1, Relaxed);
    }

    /// Those that there are: route, reason (empty: answered), how many.
    pub fn read(&self) -> Vec<(&'static str, &'static str, u64)> {
        let reasons = || std::iter::once("").chain(Reason::NAMES);
        let routes = Self::ROUTES.iter().zip(&self.0);
        let all = routes.flat_map(|(route, counts)| {
            reasons()
                .zip(counts)
                .map(|(reason, count)| (*route, reason, count.load(Relaxed)))
        });
        all.filter(|(_, _, count)| *count > 0).collect()
    }
}

/// See the module.
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Metrics {
    pub in_flight: Peak,
    pub queued: Peak,
    pub accepted: AtomicU64,
    pub finished: [AtomicU64; 4], // stop, length, abort, error
    pub generated: AtomicU64,
    pub requests: Requests,
    pub ttft: Histogram,
    pub itl: Histogram,
    pub e2e: Histogram,
    pub queue: Histogram,
    pub prompt: Histogram,
    pub answer: Histogram,
    pub dispatch: Meter,
    pub detokenize: Meter,
}

impl Metrics {
    /// From now on histograms count.
    pub fn bind(&self, config: &MetricsConfig) {
        for one in [&self.ttft, &self.itl, &self.e2e, &self.queue] {
            one.bind(&config.seconds);
        }
        for one in [&self.prompt, &self.answer] {
            one.bind(&config.tokens);
        }
    }

    /// The histograms by name.
    pub fn histograms(&self) -> [(&'static str, &Histogram); 6] {
        [
            ("ttft", &self.ttft),
            ("itl", &self.itl),
            ("e2e", &self.e2e),
            ("queue", &self.queue),
            ("prompt", &self.prompt),
            ("answer", &self.answer),
        ]
    }

    /// The meters by name.
    pub fn meters(&self) -> [(&'static str, &Meter); 2] {
        [("dispatch", &self.dispatch), ("detokenize", &self.detokenize)]
    }

    /// `count` tokens of one request came at once; the time since the last is shared among them.
    pub fn tokens(&self, count: usize, arrival: Instant, last: Option<Instant>, now: Instant) {
        self.generated.fetch_add(count as u64, Relaxed);
        match last {
            None => self.ttft.observe((now - arrival).as_secs_f64(), 1),
            Some(last) => self
                .itl
                .observe((now - last).as_secs_f64() / count as f64, count as u64),
        }
    }

    /// Tokens of its prompt and of its answer.
    pub fn ended(&self, reason: Finish, arrival: Instant, num_prompt: usize, num_generated: usize) {
        let at = match reason {
            Finish::Stop => 0,
            Finish::Length => 1,
            Finish::Abort => 2,
            Finish::Error => 3,
        };
        self.finished[at].fetch_add(1, Relaxed);
        self.prompt.observe(num_prompt as f64, 1);
        if matches!(reason, Finish::Stop | Finish::Length) {
            self.answer.observe(num_generated as f64, 1);
            self.e2e.observe(arrival.elapsed().as_secs_f64(), 1);
        }
    }
}

/// Turns the meters' windows over.
#[derive(Debug)]
pub struct Windows(Instant);

/// The first begins.
impl Default for Windows {
    fn default() -> Windows {
        Windows(Instant::now())
    }
}

impl Windows {
    /// Called before meters are read.
    pub fn turn(&mut self, metrics: &Metrics, window_s: f64) {
        if self.0.elapsed().as_secs_f64() >= window_s {
            self.0 = Instant::now();
            let meters = metrics.meters().map(|(_, meter)| &meter.longest);
            for peak in meters.into_iter().chain([&metrics.in_flight, &metrics.queued]) {
                peak.next_window();
            }
        }
    }
}
