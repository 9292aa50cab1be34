//! Metrics of the gateway, with the names and bounds of `metrics/server_metrics.py`, which adds those of both servers.
//!
//! Invariants: one thread writes, any reads; counting neither locks nor allocates; histograms need `set_bounds` first.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::answer::choice::Finish;

/// Bucket bounds and window of the metrics, from `server/gateway_config.py`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetricsConfig {
    /// Upper bounds of the time buckets, in seconds.
    pub seconds: Vec<f64>,
    /// Upper bounds of the length buckets, in tokens.
    pub tokens: Vec<f64>,
    /// Length of a window in seconds. Recent values are those of the current and the previous window.
    pub window_s: f64,
}

/// Histogram; its last bucket counts values above all bounds.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: OnceLock<Vec<(f64, AtomicU64)>>, // upper bounds and counts
    sum: AtomicU64,                           // the bits of a float
}

impl Histogram {
    fn set_bounds(&self, bounds: &[f64]) {
        let ends = bounds.iter().copied().chain([f64::INFINITY]);
        let _ = self.buckets.set(ends.map(|end| (end, AtomicU64::new(0))).collect()); // the first bounds stay
    }

    /// Adds `count` observations of `value`.
    pub fn observe(&self, value: f64, count: u64) {
        let buckets = self.buckets.get().map_or(&[][..], Vec::as_slice);
        let at = buckets.partition_point(|(end, _)| *end < value);
        if let Some((_, counted)) = buckets.get(at) {
            counted.fetch_add(count, Relaxed);
        }
        let sum = f64::from_bits(self.sum.load(Relaxed)) + value * count as f64;
        self.sum.store(sum.to_bits(), Relaxed);
    }

    /// Returns the count of each bucket (empty before `set_bounds`) and the sum of all values.
    pub fn read(&self) -> (Vec<u64>, f64) {
        let counts = self.buckets.get().into_iter().flatten();
        (
            counts.map(|(_, count)| count.load(Relaxed)).collect(),
            f64::from_bits(self.sum.load(Relaxed)),
        )
    }
}

/// Largest value of a count, since the start and recently.
#[derive(Debug, Default)]
pub struct Peak {
    max: AtomicU64,
    window: AtomicU64,
    before: AtomicU64,
}

impl Peak {
    /// Records `now` as the current value.
    pub fn record(&self, now: u64) {
        self.window.fetch_max(now, Relaxed);
    }

    fn next_window(&self) {
        let window = self.window.swap(0, Relaxed);
        self.max.fetch_max(window, Relaxed);
        self.before.store(window, Relaxed);
    }

    /// Returns the maximum in the current and the previous window, and the maximum since the start.
    pub fn read(&self) -> (u64, u64) {
        let recent = self.window.load(Relaxed).max(self.before.load(Relaxed));
        (recent, self.max.load(Relaxed).max(recent))
    }
}

/// Number of calls of an operation, and their total and longest duration.
#[derive(Debug, Default)]
pub struct Meter {
    count: AtomicU64,
    total: AtomicU64,
    longest: Peak,
}

impl Meter {
    /// Adds `count` operations that took `took` together.
    pub fn add(&self, took: Duration, count: u64) {
        let ns = took.as_nanos() as u64;
        self.count.fetch_add(count, Relaxed);
        self.total.fetch_add(ns, Relaxed);
        self.longest.record(ns);
    }

    /// Returns the count and seconds: in total, of the longest call, and of the longest in the current and previous
    /// window.
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

/// Reason for which Python handles a request: the label `reason` of `minisgl:gateway_requests_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The gateway does not handle this route.
    Route,
    /// Python returned a whole response: an error.
    Error,
    /// The request has fields that only the Python server handles.
    Field,
    /// The body is too large for the free memory, or the client sends it slowly.
    Body,
    /// The model is still loading.
    Loading,
    /// The server is shutting down.
    Draining,
}

impl Reason {
    /// Label values of all reasons, in the order of the variants.
    pub const NAMES: [&'static str; 6] = ["route", "error", "field", "body", "loading", "draining"];
}

/// Request counts by route and by reason.
#[derive(Debug, Default)]
pub struct Requests([[AtomicU64; Reason::NAMES.len() + 1]; Requests::ROUTES.len()]);

impl Requests {
    /// Label values of the routes; the last one counts all other paths.
    pub const ROUTES: [&'static str; 4] = ["/v1/chat/completions", "/v1/completions", "/generate", "other"];

    /// Counts a request to `route`, with the reason for which Python handles it; `None`: the gateway answered it.
    pub fn add(&self, route: &str, reason: Option<Reason>) {
        let of_route = Self::ROUTES.iter().position(|one| *one == route);
        let of_route = &self.0[of_route.unwrap_or(Self::ROUTES.len() - 1)];
        of_route[reason.map_or(0, |reason| 1 + reason as usize)].fetch_add(1, Relaxed);
    }

    /// Returns route, reason (empty: answered by the gateway) and count of all counts above 0.
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

/// All metrics of the gateway: peaks, counters, histograms and meters.
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
    /// Sets the bucket bounds; histograms count from now on.
    pub fn set_bounds(&self, config: &MetricsConfig) {
        for one in [&self.ttft, &self.itl, &self.e2e, &self.queue] {
            one.set_bounds(&config.seconds);
        }
        for one in [&self.prompt, &self.answer] {
            one.set_bounds(&config.tokens);
        }
    }

    /// Returns the histograms with their names.
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

    /// Returns the duration meters with their names.
    pub fn meters(&self) -> [(&'static str, &Meter); 2] {
        [("dispatch", &self.dispatch), ("detokenize", &self.detokenize)]
    }

    /// Counts `count` tokens of one request that arrived together; each gets an equal share of the time since the last.
    pub fn tokens(&self, count: usize, arrival: Instant, last: Option<Instant>, now: Instant) {
        self.generated.fetch_add(count as u64, Relaxed);
        match last {
            None => self.ttft.observe((now - arrival).as_secs_f64(), 1),
            Some(last) => self
                .itl
                .observe((now - last).as_secs_f64() / count as f64, count as u64),
        }
    }

    /// Counts the end of a choice, with its numbers of prompt tokens and generated tokens.
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

/// Timer that starts new windows of the peaks; holds the start of the current one.
#[derive(Debug)]
pub struct Windows(Instant);

/// Starts the first metrics window now.
impl Default for Windows {
    fn default() -> Windows {
        Windows(Instant::now())
    }
}

impl Windows {
    /// Starts a new window if the current one is at least `window_s` seconds old. Call it before reading meters.
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
