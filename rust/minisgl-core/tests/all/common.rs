//! Shared parts of the integration tests: a scheduler with its own arrays, driven without an engine.

use minisgl_core::{
    Arrival, CachePolicy, CheckedEvents, CommitEntry, Config, Event, Plan, Result, RingEntry, SchedulePolicy, Scheduler,
};

/// Returns a configuration without end tokens, drafts, states or cache limits.
pub fn config(page_size: usize, num_pages: usize, max_running_requests: usize) -> Config {
    Config {
        num_pages,
        page_size,
        max_running_requests,
        max_prefill_length: 10 * max_running_requests,
        context_len: 2048,
        eos_ids: vec![],
        cache: CachePolicy::Lru,
        graph_sizes: vec![],
        max_pinned_pages: 0,
        cache_token_budget: 0,
        cache_max_prompt: 0,
        max_draft_len: 0,
        checkpoint_interval: 0,
        num_checkpoints: 0,
        schedule_policy: SchedulePolicy::Fcfs,
    }
}

/// Scheduler under test, its arrays, and the entries of its last commit.
pub struct Bench {
    pub scheduler: Scheduler,
    arrays: [Vec<i32>; 17], // each of the maximum length needed
    assigned_ids: Vec<i64>,
    pub entries: Vec<CommitEntry>,
    tokens: Vec<i32>,
}

impl Bench {
    pub fn new(config: Config) -> Self {
        let limits = config.limits();
        let largest = config.graph_sizes.iter().copied().max().unwrap_or(0);
        let rows = limits.max_rows.max(largest);
        let tables = limits.max_page_changes().max(3 * limits.num_checkpoints);
        let longest = tables.max(limits.max_tokens + 3 * rows + 1);
        Self {
            scheduler: Scheduler::new(config),
            arrays: std::array::from_fn(|_| vec![0; longest]),
            assigned_ids: vec![0; limits.max_rows],
            entries: Vec::with_capacity(rows),
            tokens: vec![0; rows],
        }
    }

    pub fn schedule(&mut self, step: i64, events: Vec<Event>) -> Result<Plan> {
        let [
            input_ids,
            positions,
            out_loc,
            req_slots,
            seq_lens,
            extend_lens,
            qo_indptr,
            kv_indptr,
            last_page_len,
            sample_rows,
            page_table_updates,
            page_ids,
            assigned,
            freed,
            state_begins,
            state_saves,
            page_loads,
        ] = &mut self.arrays;
        let mut entry = RingEntry {
            input_ids,
            positions,
            out_loc,
            req_slots,
            seq_lens,
            extend_lens,
            qo_indptr,
            kv_indptr,
            last_page_len,
            sample_rows,
            page_table_updates,
            page_ids,
            assigned,
            assigned_ids: &mut self.assigned_ids,
            freed,
            state_begins,
            state_saves,
            page_loads,
        };
        let mut checked = CheckedEvents::default();
        for event in events {
            self.scheduler.check_event(event, &mut checked)?;
        }
        self.scheduler.schedule(step, checked, &mut entry, 0, || {})
    }

    /// Commits a step of `num_rows` rows that all sampled `token`.
    pub fn commit(&mut self, step: i64, num_rows: usize, token: i32) -> Result<()> {
        self.entries.clear();
        self.tokens[..num_rows].fill(token);
        self.scheduler.commit(step, &self.tokens[..num_rows], &mut self.entries)
    }

    /// Returns the ids of the requests that ended in the last commit.
    pub fn ended(&self) -> impl Iterator<Item = i64> + '_ {
        let ends = self.entries.iter().filter(|entry| entry.reason.is_some());
        ends.map(|entry| entry.req_id)
    }
}

pub fn arrival(req_id: i64, tokens: Vec<i32>, max_tokens: i64) -> Arrival {
    Arrival {
        req_id,
        num_prompt: tokens.len() as i64,
        tokens,
        max_tokens,
        ..Arrival::default()
    }
}
