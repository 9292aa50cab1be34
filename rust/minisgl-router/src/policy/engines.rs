//! State of the engines as the router sees it: which are up, their load, and which was chosen last.
//!
//! Invariants: only an engine that is up and below its limit is chosen.

use super::config::RouterConfig;

#[derive(Clone, Default)]
pub(super) struct EngineState {
    pub up: bool,
    /// Requests that the router placed on this engine and that were not removed since.
    pub load: usize,
    /// Requests that the engine reported in addition to `load`: other clients sent them.
    extra: usize,
    /// Placement count at which this engine was chosen last; 0: never.
    turn: u64,
}

pub(super) struct Engines {
    pub all: Vec<EngineState>,
    max_load: usize,
    balance_requests: usize,
    balance_percent: usize,
    num_turns: u64,
    next: usize,
    random: u64,
}

impl Engines {
    pub fn new(config: &RouterConfig) -> Self {
        let max_load = match config.max_inflight_per_engine {
            0 => usize::MAX,
            limit => limit,
        };
        Self {
            all: vec![EngineState::default(); config.num_engines],
            max_load,
            balance_requests: config.balance_requests,
            balance_percent: config.balance_percent,
            num_turns: 0,
            next: 0,
            random: config.seed,
        }
    }

    pub fn report(&mut self, engine: usize, num_live: usize) {
        let state = &mut self.all[engine];
        state.extra = num_live.saturating_sub(state.load);
    }

    pub fn set_up(&mut self, engine: usize, up: bool) {
        self.all[engine].up = up;
        self.all[engine].extra = 0;
    }

    /// Counts a request that was placed on `engine`.
    pub fn record_placement(&mut self, engine: usize) {
        self.num_turns += 1;
        let state = &mut self.all[engine];
        state.turn = self.num_turns;
        state.load += 1;
        self.next = engine + 1;
    }

    fn can_accept(&self, engine: usize) -> bool {
        let state = &self.all[engine];
        state.up && state.load < self.max_load
    }

    fn available(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.all.len()).filter(|&engine| self.can_accept(engine))
    }

    pub fn has_available(&self) -> bool {
        self.available().next().is_some()
    }

    fn load(&self, engine: usize) -> usize {
        self.all[engine].load + self.all[engine].extra
    }

    /// Returns the engine of `among` with the least load; of equal ones the one chosen longest ago, then the first.
    fn best(&self, among: impl Iterator<Item = usize>) -> Option<usize> {
        among.min_by_key(|&engine| (self.load(engine), self.all[engine].turn, engine))
    }

    pub fn least_load(&self) -> Option<usize> {
        self.best(self.available())
    }

    /// Returns the next available engine after the one chosen last, wrapping around. `None` if no engine is available.
    pub fn next_in_turn(&self) -> Option<usize> {
        let first = self.available().next();
        self.available().find(|&engine| engine >= self.next).or(first)
    }

    /// Returns a random available engine, or `None`. The generator is `splitmix64`, as in the Python reference.
    pub fn random(&mut self) -> Option<usize> {
        let count = self.available().count();
        if count == 0 {
            return None;
        }
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.random;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^= bits >> 31;
        let at = (u128::from(bits) * count as u128) >> 64;
        self.available().nth(at as usize)
    }

    /// Returns the load limit for engines with a prefix match, which grows with the match. `None` if none is available.
    pub fn balanced_load(&self) -> Option<BalancedLoad> {
        let least = self.available().map(|engine| self.load(engine)).min()?;
        let slack = self
            .balance_requests
            .max(least.saturating_mul(self.balance_percent) / 100);
        Some(BalancedLoad { least, slack })
    }

    /// Returns true if `engine` can accept a request and its load is at most `load`.
    pub fn can_accept_at(&self, engine: usize, load: usize) -> bool {
        self.can_accept(engine) && self.load(engine) <= load
    }

    /// Returns the least loaded engine of `holders` that can accept a request and has at most `load` requests.
    pub fn best_of(&self, holders: impl Iterator<Item = usize>, load: usize) -> Option<usize> {
        self.best(holders.filter(|&engine| self.can_accept_at(engine, load)))
    }
}

/// Load limit for an engine with a prefix match: the least load plus up to `slack` requests for a full match.
#[derive(Clone, Copy)]
pub(super) struct BalancedLoad {
    least: usize,
    slack: usize,
}

impl BalancedLoad {
    /// Returns the load limit for a match of `depth` of the prompt's `num_pages` pages.
    pub fn limit(self, depth: usize, num_pages: usize) -> usize {
        self.least + self.slack.saturating_mul(depth) / num_pages
    }
}
