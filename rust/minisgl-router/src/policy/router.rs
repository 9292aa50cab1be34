//! The router: requests wait in a queue until `place` assigns them to an engine, and count there until `remove`.
//!
//! Invariants: a request is in the queue or on one engine; limits hold at every moment.

use std::collections::HashMap;

use super::config::{Policy, RouterConfig};
use super::engines::Engines;
use super::prefixes::Prefixes;
use super::queue::{FairQueue, QueueKey};

/// Placement of one request on one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Id of the placed request.
    pub req_id: i64,
    /// Index of the engine that was chosen.
    pub engine: usize,
    /// Tokens, in whole pages, that the engine's prefix cache is expected to match; 0 without `Policy::CacheAware`.
    pub matched_len: usize,
}

/// Pages remembered per page of an engine's cache. More than one, because the router forgets whole prompts while an
/// engine evicts single pages, and what is left of a conversation there is still worth a placement.
const REMEMBERED_PER_PAGE: usize = 2;

enum Location {
    Queued(QueueKey),
    /// Engine that the request is on, and the count of its placement.
    OnEngine(usize, u64),
}

struct Request {
    key: usize,
    prompt_len: usize,
    /// Hashes of the prompt's full pages; empty once the request is placed.
    hashes: Vec<u64>,
    location: Location,
}

/// Router of requests to engines, with a fair queue between API keys. The reference is `minisgl.routing.api.Router`.
pub struct Router {
    config: RouterConfig,
    queue: FairQueue,
    engines: Engines,
    prefixes: Prefixes,
    requests: HashMap<i64, Request>,
    num_inflight: usize,
    num_placements: u64,
}

impl Router {
    /// Makes a router with no engine up.
    ///
    /// # Errors
    /// Names the invalid field of `config`.
    pub fn new(config: RouterConfig) -> Result<Self, String> {
        config.check()?;
        Ok(Self {
            queue: FairQueue::new(&config.keys),
            engines: Engines::new(&config),
            prefixes: Prefixes::new(config.num_engines, config.page_size),
            requests: HashMap::new(),
            num_inflight: 0,
            num_placements: 0,
            config,
        })
    }

    /// Marks `engine` as up, with an empty cache of `num_pages` pages (`None`: unknown, `tree_pages` counts).
    ///
    /// # Panics
    /// If there is no such engine, as in every method with an engine argument.
    pub fn engine_up(&mut self, engine: usize, num_pages: Option<usize>) {
        self.engines.set_up(engine, true);
        let remembered = num_pages.map_or(self.config.tree_pages, |pages| {
            pages.saturating_mul(REMEMBERED_PER_PAGE)
        });
        self.prefixes.resize(engine, remembered);
    }

    /// Marks `engine` as down, removes its requests and returns their ids in the order of their placement.
    pub fn engine_down(&mut self, engine: usize) -> Vec<i64> {
        self.engines.set_up(engine, false);
        self.prefixes.clear(engine);
        let lost = |(&req_id, request): (&i64, &Request)| match request.location {
            Location::OnEngine(on, turn) if on == engine => Some((turn, req_id)),
            _ => None,
        };
        let mut lost: Vec<_> = self.requests.iter().filter_map(lost).collect();
        lost.sort_unstable();
        for &(_, req_id) in &lost {
            self.remove(req_id, 0);
        }
        lost.into_iter().map(|(_, req_id)| req_id).collect()
    }

    /// Sets the load that `engine` reported last. What exceeds the requests placed there is load of other clients.
    pub fn report(&mut self, engine: usize, num_waiting: usize, num_running: usize) {
        self.engines.report(engine, num_waiting.saturating_add(num_running));
    }

    /// Queues a request; with `again` in front of all requests that were never placed. Its prefix matches only requests
    /// of the same `namespace`.
    ///
    /// # Errors
    /// The id is in use, or there is no such key.
    pub fn add(
        &mut self,
        req_id: i64,
        tokens: &[i32],
        priority: i64,
        key: usize,
        again: bool,
        namespace: u32,
    ) -> Result<(), String> {
        if self.requests.contains_key(&req_id) {
            return Err(format!("req_id {req_id}: is in use"));
        }
        if key >= self.queue.num_keys() {
            return Err(format!("key {key}: must be below {}", self.queue.num_keys()));
        }
        let hashes = match self.config.policy {
            Policy::CacheAware => self.prefixes.hashes(tokens, namespace),
            _ => Vec::new(),
        };
        let location = Location::Queued(self.queue.push(req_id, priority, key, again));
        let request = Request {
            key,
            prompt_len: tokens.len(),
            hashes,
            location,
        };
        self.requests.insert(req_id, request);
        Ok(())
    }

    /// Places all requests that may go now and appends them to `out`, in order.
    pub fn place(&mut self, out: &mut Vec<Placed>) {
        let limit = match self.config.max_inflight {
            0 => usize::MAX,
            limit => limit,
        };
        while self.num_inflight < limit && self.engines.has_available() {
            let Some((key, req_id)) = self.queue.first() else {
                return;
            };
            let Some(request) = self.requests.get_mut(&req_id) else {
                return;
            };
            let hashes = std::mem::take(&mut request.hashes);
            let prompt_len = request.prompt_len;
            let Some((engine, matched_len)) = self.choose(&hashes, prompt_len) else {
                return;
            };
            self.queue.pop_placed(key, prompt_len);
            self.engines.record_placement(engine);
            self.num_inflight += 1;
            self.num_placements += 1;
            if let Some(request) = self.requests.get_mut(&req_id) {
                request.location = Location::OnEngine(engine, self.num_placements);
            }
            out.push(Placed {
                req_id,
                engine,
                matched_len,
            });
        }
    }

    /// Removes a request and charges its key for `num_generated` tokens. No-op if the id is unknown.
    pub fn remove(&mut self, req_id: i64, num_generated: usize) {
        let Some(request) = self.requests.remove(&req_id) else {
            return;
        };
        self.queue.charge(request.key, num_generated);
        match request.location {
            Location::Queued(key) => self.queue.remove(request.key, key),
            Location::OnEngine(engine, _) => {
                self.engines.all[engine].load -= 1;
                self.num_inflight -= 1;
                self.queue.record_end(request.key);
            }
        }
    }

    /// Returns the number of requests on each engine: placed there and not removed.
    #[must_use]
    pub fn loads(&self) -> Vec<usize> {
        self.engines.all.iter().map(|engine| engine.load).collect()
    }

    /// Returns the number of queued requests.
    #[must_use]
    pub fn num_waiting(&self) -> usize {
        self.queue.num_waiting()
    }

    fn choose(&mut self, hashes: &[u64], prompt_len: usize) -> Option<(usize, usize)> {
        match self.config.policy {
            Policy::RoundRobin => Some((self.engines.next_in_turn()?, 0)),
            Policy::LeastLoad => Some((self.engines.least_load()?, 0)),
            Policy::Random => Some((self.engines.random()?, 0)),
            Policy::CacheAware => {
                let load = self.engines.balanced_load()?;
                let (engines, size) = (&self.engines, self.config.page_size);
                self.prefixes.find(hashes);
                // an engine always computes at least the last prompt token
                let max_pages = prompt_len.saturating_sub(1) / size;
                let (depth, engine) = {
                    let (depth, holders) = self.prefixes.deepest(max_pages, |engine, depth| {
                        engines.can_accept_at(engine, load.limit(depth, hashes.len()))
                    });
                    match depth {
                        0 => (0, engines.least_load()?),
                        _ => (depth, engines.best_of(holders, load.limit(depth, hashes.len()))?),
                    }
                };
                self.prefixes.insert(engine, hashes);
                Some((engine, depth * size))
            }
        }
    }
}
