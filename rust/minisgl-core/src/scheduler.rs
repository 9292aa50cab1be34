//! The scheduler: takes events, decides steps, takes the sampled tokens.
//!
//! Invariants: every schedule has exactly one commit (or the `ForwardFailed` in its place); every accepted request ends
//! exactly once; a request slot is not reassigned before the last step with a row of it is committed; after an error in
//! the middle of a call every later call is an error.
//!
//! One pass decides a step. Started rows come first, in order of (age, id): each decode row gets its token, and prefill
//! rows share the rest of the token budget. Then waiting requests are admitted, in the same order, until the first that
//! gets no chunk. Background requests have a second pass, in a step in which no other request remains waiting; to other
//! requests they are as good as absent.

mod commit;
mod drafting;
mod events;
mod pass;

use crate::api::{Config, Error, Result, Stats, broken};
use crate::background::Background;
use crate::faulty::{Call, Faults, Moment};
use crate::inputs::CheckedEvents;
use crate::invariants::{TableWatch, check_all};
use crate::metadata::DecidedStep;
use crate::numbers::{MultiplesOf, ToI64, ToU32};
use crate::page_pool::{Page, PageSize};
use crate::radix::{Checkpoints, ROOT, TreeView};
use crate::request::Index;
use crate::state::{InFlight, SchedulerState};
use crate::step::{CommitEntry, Event, Limits, Plan, RingEntry, TokenBudget, UNBOUNDED};

/// The scheduler: the Rust implementation of `minisgl.scheduler.api.ControlPlane`.
pub struct Scheduler {
    config: Config,
    limits: Limits,
    page_size: PageSize,
    budgets: TokenBudget,
    background: Background,
    saved_lens: MultiplesOf, // sequence lengths at which a decoding request saves its state
    state: SchedulerState,
    spare: Vec<InFlight>,
    ended_in_flight: Vec<(i64, Index)>, // (step, request) to free at the commit of the step
    decided: DecidedStep,
    prefilling: bool, // whether a started request still prefills after the last pass
    num_prompt_tokens: u64,
    num_cached_tokens: u64,
    num_retracted: u64,
    num_hits: u64,
    num_misses: u64,
    num_drafted: u64,
    num_accepted: u64,
    num_saved: u64,
    num_cut_short: u64,
    num_computed_again: u64,
    num_loaded: u64,
    num_arrivals: [i64; 2], // ordinary requests, background requests
    last_step: Option<i64>,
    ends: Vec<CommitEntry>,
    watch: TableWatch,
    faults: Faults,
    dead: Option<String>,
}

impl Scheduler {
    /// Creates a scheduler without requests. `config` must be valid.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let limits = config.limits();
        let rows = limits.max_rows;
        Self {
            state: SchedulerState::new(&config),
            spare: Vec::with_capacity(3),
            ended_in_flight: Vec::with_capacity(rows),
            decided: DecidedStep::default(),
            prefilling: false,
            num_prompt_tokens: 0,
            num_cached_tokens: 0,
            num_retracted: 0,
            num_hits: 0,
            num_misses: 0,
            num_drafted: 0,
            num_accepted: 0,
            num_saved: 0,
            num_cut_short: 0,
            num_computed_again: 0,
            num_loaded: 0,
            num_arrivals: [0; 2],
            last_step: None,
            ends: Vec::with_capacity(rows),
            watch: TableWatch::default(),
            faults: Faults::default(),
            dead: None,
            page_size: PageSize::new(limits.page_size),
            saved_lens: MultiplesOf::new(config.checkpoint_interval.max(1).to_u32()),
            budgets: TokenBudget {
                beside_decode: config.max_prefill_length.to_i64(),
                prefill_only: config.max_prefill_length.to_i64(),
                background: UNBOUNDED,
            },
            background: Background::default(),
            config,
            limits,
        }
    }

    /// Returns the sizes of the step arrays.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Makes every later call fail with the reason `why`, unless one was set before.
    pub fn poison(&mut self, why: String) {
        self.dead.get_or_insert(why);
    }

    /// Requests a panic in the call `call` for step `step`, at `moment`. For tests.
    #[cfg(feature = "test-panics")]
    pub fn panic_at(&mut self, call: Call, step: i64, moment: Moment) {
        self.faults.order = Some((call, step, moment));
    }

    // ----------------------------------------------------------------------------------------------------- calls

    /// Validates an event for the next `schedule` and appends it to `into`. Nothing changes on an error.
    ///
    /// # Errors
    /// `Error::Event` if it is malformed, `Error::Broken` after an earlier failure.
    pub fn check_event(&self, event: Event, into: &mut CheckedEvents) -> Result<()> {
        self.require_alive()?;
        into.add(event, &self.state, &self.config)
    }

    /// Applies `events`, decides step `step` and writes its arrays into `entry`. The first call may have any step
    /// number, each later one the next. `decided` is called after the decision and before most arrays are written, so
    /// that a caller can time both.
    ///
    /// # Errors
    /// `Error::Broken`; every later call fails then.
    pub fn schedule(
        &mut self,
        step: i64,
        events: CheckedEvents,
        entry: &mut RingEntry,
        ring_index: usize,
        decided: impl FnOnce(),
    ) -> Result<Plan> {
        self.require_alive()?;
        let result = self.schedule_alive(step, events, entry, ring_index, decided);
        self.remember(result, || format!("schedule({step})"))
    }

    /// Commits the sampled tokens of `step`, one for each row, and appends the clients' entries to `into`. Slots that
    /// drained with this step are freed first, then rows are handled in order.
    ///
    /// # Errors
    /// `Error::Broken`; every later call fails then.
    pub fn commit(&mut self, step: i64, tokens: &[i32], into: &mut Vec<CommitEntry>) -> Result<()> {
        self.require_alive()?;
        let result = self.commit_alive(step, tokens, into);
        self.remember(result, || format!("commit({step})"))
    }

    /// Returns the current counters and gauges.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let held_pages = self.state.started.iter().map(|row| {
            self.state.started.num_pages(&row, &self.state.requests)
                - self.state.requests.cold(row.index).num_tree_pages
        });
        Stats {
            num_waiting: self.state.waiting.len(),
            num_running: self.state.started.len(),
            num_draining: self.state.slots.num_draining(),
            num_free_pages: self.state.tree.pool.num_free(),
            num_evictable_pages: self.state.tree.num_evictable(),
            num_protected_pages: self.state.tree.num_protected(),
            num_held_pages: held_pages.sum(),
            num_retracted_total: self.num_retracted,
            num_prompt_tokens_total: self.num_prompt_tokens,
            num_cached_tokens_total: self.num_cached_tokens,
            num_pinned_pages: self.state.pins.num_locked_pages(&self.state.tree),
            num_inserted_pages_total: self.state.tree.num_inserted_total,
            num_evicted_pages_total: self.state.tree.num_evicted_total,
            num_hits_total: self.num_hits,
            num_misses_total: self.num_misses,
            num_drafted_total: self.num_drafted,
            num_accepted_total: self.num_accepted,
            num_checkpoints: self.state.tree.checkpoints.as_ref().map_or(0, Checkpoints::num_used),
            num_saved_total: self.num_saved,
            num_cut_short_total: self.num_cut_short,
            num_computed_again_total: self.num_computed_again,
            num_loaded_pages_total: self.num_loaded,
        }
    }

    /// Returns the `limit` largest nodes of the prefix cache, for people. Read only. O(nodes).
    #[must_use]
    pub fn tree_view(&self, limit: usize) -> TreeView {
        self.state
            .tree
            .view(limit, &self.state.pins.locked_nodes(&self.state.tree))
    }

    /// Returns how many full pages of `tokens` the prefix cache has in `namespace`; for a model with states, up to the
    /// last checkpoint. Read only.
    #[must_use]
    pub fn cached_pages(&self, tokens: &[i32], namespace: u32) -> usize {
        let tree = &self.state.tree;
        let mut matched = tree.find(ROOT, namespace, tokens, 0, tokens.len() / tree.page_size());
        if tree.checkpoints.is_some() {
            matched = tree.beginning(ROOT, matched, self.last_step.unwrap_or(0) + 1);
        }
        matched.pages.len()
    }

    /// Checks every invariant. O(everything).
    ///
    /// # Errors
    /// `Error::Broken` with the first that does not hold; every later call fails then.
    pub fn check(&mut self) -> Result<()> {
        self.require_alive()?;
        self.synchronize_all();
        let mut watch = std::mem::take(&mut self.watch);
        let result = check_all(&self.state).and_then(|()| watch.check(&self.state));
        self.watch = watch;
        self.remember(result, || "check()".into())
    }

    // ------------------------------------------------------------------------------------------------- for tests

    /// Returns each cached page with all tokens of its path up to the page's end.
    #[must_use]
    pub fn tree_pages(&self) -> Vec<(Vec<i32>, Page)> {
        self.state.tree.tree_pages()
    }

    /// Returns each state checkpoint's slot with the tokens of the path to it, in the format of `tree_pages`.
    #[must_use]
    pub fn tree_states(&self) -> Vec<(Vec<i32>, u32)> {
        self.state.tree.tree_states()
    }

    /// Returns the page table of a live request (empty while it waits), or `None` if it is not live.
    #[must_use]
    pub fn page_table(&self, req_id: i64) -> Option<Vec<Page>> {
        let index = *self.state.live.get(&req_id)?;
        Some(self.state.started.page_table(index, &self.state.requests))
    }

    /// Returns the stack of free pages. The last element is allocated next.
    #[must_use]
    pub fn free_pages(&self) -> &[Page] {
        self.state.tree.pool.free_pages()
    }

    /// Returns the reserve ratio, in 1/1024, mutable so that tests can provoke retractions.
    pub fn reserve_ratio_mut(&mut self) -> &mut usize {
        &mut self.state.ratio.value
    }

    // ---------------------------------------------------------------------------------------------------- events

    fn schedule_alive(
        &mut self,
        step: i64,
        events: CheckedEvents,
        entry: &mut RingEntry,
        ring_index: usize,
        decided: impl FnOnce(),
    ) -> Result<Plan> {
        let failed = matches!(events.first(), Some(Event::ForwardFailed(_)));
        if let Some(last) = self.last_step
            && step != last + 1
        {
            return broken(format!("schedule({step}) came after schedule({last})"));
        }
        if self.state.in_flight.len() > 1 && !failed {
            let oldest = self.state.in_flight[0].step;
            return broken(format!("schedule({step}) came before commit({oldest})"));
        }
        self.faults.point(Call::Schedule, step, Moment::Before);
        self.last_step = Some(step);
        for event in events {
            self.apply(event)?;
        }
        self.decide(step, entry)?;
        self.faults.point(Call::Schedule, step, Moment::Amid);
        decided();
        let plan = self.write(entry, ring_index);
        self.faults.point(Call::Schedule, step, Moment::After);
        Ok(plan)
    }

    // ---------------------------------------------------------------------------------------------------- errors

    fn require_alive(&self) -> Result<()> {
        match &self.dead {
            None => Ok(()),
            Some(why) => broken(format!("the scheduler is dead: {why}")),
        }
    }

    /// Records a failed `call`, which leaves the state half changed: every later call fails, too. Returns `result`.
    fn remember<T>(&mut self, result: Result<T>, call: impl FnOnce() -> String) -> Result<T> {
        if let Err(Error::Broken(what)) = &result {
            self.dead = Some(format!("{}: {what}", call()));
        }
        result
    }
}
