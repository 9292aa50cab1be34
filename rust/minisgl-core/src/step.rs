//! Data that scheduler and engine exchange: events, step arrays, plans, sampled tokens (the types of `minisgl.step`).

/// Output tokens for which a request's sequence reserves memory at arrival, so that a decode step need not allocate.
pub const RESERVED_OUTPUT: usize = 1024;

/// A new request, or one that is added again with the tokens it generated so far. See `minisgl.step.Arrival`.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct Arrival {
    pub req_id: i64,
    pub tokens: Vec<i32>,
    pub num_prompt: i64,
    pub num_generated: i64,
    pub max_tokens: i64,
    pub min_tokens: i64,
    pub stop_ids: Vec<i32>,
    pub ignore_eos: bool,
    pub priority: i64,
    pub no_overlap: bool,
    pub no_match: bool,
    pub background: bool,
    pub pin: bool,
    pub namespace: i64,
    pub no_drafts: bool,
    pub stored_from: i64,
    pub stored_to: i64,
}

/// Units per token in which `TokenBudget::background` counts: one unit is 1/1024 token.
pub(crate) const TOKEN_PARTS: i64 = 1024;

/// Value of a background budget that sets no limit.
pub(crate) const UNBOUNDED: i64 = 1 << 40;

/// Token budgets of the following steps, each capped by `max_prefill_length`. See `minisgl.step.TokenBudget`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct TokenBudget {
    pub beside_decode: i64,
    pub prefill_only: i64,
    pub background: i64,
}

/// Range of pages of a request's sequence that can be loaded from the page store. See `minisgl.step.PagesRead`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct PagesRead {
    pub req_id: i64,
    pub stored_from: i64,
    pub stored_to: i64,
}

/// Draft tokens that may follow the first `length` tokens of a request's sequence. See `minisgl.step.Draft`.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Draft {
    pub req_id: i64,
    pub length: i64,
    pub tokens: Vec<i32>,
}

/// An input event of `Scheduler::schedule`.
#[derive(Clone, Debug)]
pub enum Event {
    /// A new request.
    Arrival(Arrival),
    /// Stop string matched in the output of the request with this id: the request ends.
    Finish(i64),
    /// Client of the request with this id disconnected: the request ends.
    Abort(i64),
    /// Forward pass of this step failed. Must be the first event of its call.
    ForwardFailed(i64),
    /// Releases the pin of the request with this id: its pages may be evicted.
    Unpin(i64),
    /// Evicts every unlocked page of the prefix cache.
    ClearCache,
    /// New token budgets, from this step on.
    TokenBudget(TokenBudget),
    /// Pages of a waiting request that are ready to be loaded.
    PagesRead(PagesRead),
    /// Draft tokens from outside the scheduler, for example from a draft model.
    Draft(Draft),
}

/// Sizes of the step arrays. It has the fields of Python's `StepLimits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Number of request slots. The scratch slot has this index.
    pub max_rows: usize,
    /// Maximum number of tokens in a step.
    pub max_tokens: usize,
    /// Page size, in tokens.
    pub page_size: usize,
    /// Number of pages in the KV pool. The scratch page has this index.
    pub num_pages: usize,
    /// Maximum length of a sequence (prompt and output), in tokens.
    pub max_seq_len: usize,
    /// Slots for saved states, in addition to the one of each request slot.
    pub num_checkpoints: usize,
}

impl Limits {
    /// Returns the maximum number of page-table entries that one step may write.
    #[must_use]
    pub fn max_page_changes(&self) -> usize {
        let per_request = self.max_seq_len.div_ceil(self.page_size);
        self.max_rows + per_request.max(self.num_pages.min(65_536))
    }
}

/// Value of `state_begins` for a row that starts from the state stored with its loaded pages.
pub const FROM_STORE: i32 = -2;

/// Arrays of one step, in the order of Python's `RingEntry`. `page_table_updates`, `state_saves` and `page_loads` are
/// [n, 3], `assigned` and `state_begins` [n, 2].
#[allow(missing_docs)]
pub struct RingEntry<'a> {
    pub input_ids: &'a mut [i32],
    pub positions: &'a mut [i32],
    pub out_loc: &'a mut [i32],
    pub req_slots: &'a mut [i32],
    pub seq_lens: &'a mut [i32],
    pub extend_lens: &'a mut [i32],
    pub qo_indptr: &'a mut [i32],
    pub kv_indptr: &'a mut [i32],
    pub last_page_len: &'a mut [i32],
    pub sample_rows: &'a mut [i32],
    pub page_table_updates: &'a mut [i32],
    pub page_ids: &'a mut [i32],
    pub assigned: &'a mut [i32],
    pub assigned_ids: &'a mut [i64],
    pub freed: &'a mut [i32],
    pub state_begins: &'a mut [i32],
    pub state_saves: &'a mut [i32],
    pub page_loads: &'a mut [i32],
}

/// Header of a step: the number of live elements in each array. It has the fields of Python's `StepPlan`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Plan {
    pub step: i64,
    pub ring_index: usize,
    pub num_rows: usize,
    pub num_decode_rows: usize,
    pub padded_rows: usize,
    pub num_tokens: usize,
    pub num_samples: usize,
    pub num_page_table_updates: usize,
    pub num_page_ids: usize,
    pub num_assigned: usize,
    pub num_freed: usize,
    pub num_retracted: usize,
    pub num_free_pages: usize,
    pub num_evictable_pages: usize,
    pub num_state_begins: usize,
    pub num_state_saves: usize,
    pub num_page_loads: usize,
    pub num_background: usize,
}

/// Sampled-token value for a row with non-finite logits. Its request ends, and nothing of it stays in the prefix cache.
pub const NOT_FINITE: i32 = -2;

/// Reason why a request ended, with the values of the Python side, where 0 means that it continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum FinishReason {
    /// A stop token was sampled, or a stop string matched.
    Stop = 1,
    /// The request reached `max_tokens`, the context length or the size of the KV pool.
    Length = 2,
    /// The client disconnected.
    Abort = 3,
    /// The request was refused, or its forward pass failed.
    Error = 4,
}

/// Output of one request in a `commit`: a token, an end, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitEntry {
    /// Id of the request.
    pub req_id: i64,
    /// Sampled token. `None` if the request ends without a new token.
    pub sampled: Option<Sampled>,
    /// Finish reason. `None` if the request continues.
    pub reason: Option<FinishReason>,
}

/// A sampled token, and the index of the step's row that sampled it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Sampled {
    pub token: i32,
    pub row: u32,
}
