//! What the integration tests share: a scheduler with arrays of its own, driven without an engine.

use minisgl_core::{
    Arrival, CachePolicy, CheckedEvents, Config, Entry, Event, Plan, Result, RingEntry, SchedulePolicy, Scheduler,
};

/// A scheduler without end tokens, drafts, states or bounds of its cache.
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

/// The arrays of one step, of the sizes that `minisgl.step.RingEntry` has.
struct Arrays {
    per_token: [Vec<i32>; 3],
    per_row: [Vec<i32>; 7],
    page_table_updates: Vec<i32>,
    page_ids: Vec<i32>,
    assigned: Vec<i32>,
    assigned_ids: Vec<i64>,
    freed: Vec<i32>,
    state_begins: Vec<i32>,
    state_saves: Vec<i32>,
    page_loads: Vec<i32>,
}

/// A scheduler, its arrays, and what its last commit said.
pub struct Bench {
    pub scheduler: Scheduler,
    arrays: Arrays,
    pub entries: Vec<Entry>,
    tokens: Vec<i32>,
}

impl Bench {
    pub fn new(config: Config) -> Self {
        let limits = config.limits();
        let largest = config.graph_sizes.iter().copied().max().unwrap_or(0);
        let rows = limits.max_rows.max(largest);
        let zeros = |n: usize| vec![0; n];
        Self {
            scheduler: Scheduler::new(config),
            arrays: Arrays {
                per_token: std::array::from_fn(|_| zeros(limits.max_tokens + rows)),
                per_row: std::array::from_fn(|_| zeros(rows + 1)),
                page_table_updates: zeros(3 * rows),
                page_ids: zeros(limits.max_page_changes()),
                assigned: zeros(2 * limits.max_rows),
                assigned_ids: vec![0; limits.max_rows],
                freed: zeros(limits.max_rows),
                state_begins: zeros(2 * limits.max_rows),
                state_saves: zeros(3 * limits.num_checkpoints),
                page_loads: zeros(3 * limits.max_rows),
            },
            entries: Vec::with_capacity(rows),
            tokens: zeros(rows),
        }
    }

    pub fn schedule(&mut self, step: i64, events: Vec<Event>) -> Result<Plan> {
        let a = &mut self.arrays;
        let [input_ids, positions, out_loc] = &mut a.per_token;
        let [
            req_slots,
            seq_lens,
            extend_lens,
            qo_indptr,
            kv_indptr,
            last_page_len,
            sample_rows,
        ] = &mut a.per_row;
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
            page_table_updates: &mut a.page_table_updates,
            page_ids: &mut a.page_ids,
            assigned: &mut a.assigned,
            assigned_ids: &mut a.assigned_ids,
            freed: &mut a.freed,
            state_begins: &mut a.state_begins,
            state_saves: &mut a.state_saves,
            page_loads: &mut a.page_loads,
        };
        let mut checked = CheckedEvents::default();
        for event in events {
            self.scheduler.check_event(event, &mut checked)?;
        }
        self.scheduler.schedule(step, checked, &mut entry, 0, || {})
    }

    /// Commit a step of `num_rows` rows that all sampled `token`.
    pub fn commit(&mut self, step: i64, num_rows: usize, token: i32) -> Result<()> {
        self.entries.clear();
        self.tokens[..num_rows].fill(token);
        self.scheduler.commit(step, &self.tokens[..num_rows], &mut self.entries)
    }

    /// Ids that the last commit ended.
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
