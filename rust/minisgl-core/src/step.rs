//! What crosses the seam between the scheduler and the engine: the types of `minisgl.step`.

/// Tokens for which a request's sequence has room from the start, so that a decode step need not allocate.
pub const RESERVED_OUTPUT: usize = 1024;

/// A new request, or one that is added again with what it generated so far. See `minisgl.step.Arrival`.
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

/// A token has so many of the parts that `TokenBudget::background` counts.
pub(crate) const TOKEN_PARTS: i64 = 1024;

/// No bound of what is in the background.
pub(crate) const UNBOUNDED: i64 = 1 << 40;

/// Tokens of a step, within `max_prefill_length`. See `minisgl.step.TokenBudget`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct TokenBudget {
    pub beside_decode: i64,
    pub prefill_only: i64,
    pub background: i64,
}

/// Pages of a text that can be loaded. See `minisgl.step.PagesRead`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct PagesRead {
    pub req_id: i64,
    pub stored_from: i64,
    pub stored_to: i64,
}

/// What may follow the first `length` tokens of a text. See `minisgl.step.Draft`.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Draft {
    pub req_id: i64,
    pub length: i64,
    pub tokens: Vec<i32>,
}

/// An input of `schedule`.
#[derive(Clone, Debug)]
pub enum Event {
    /// A request comes.
    Arrival(Arrival),
    /// A stop string was found in the text of a request.
    Finish(i64),
    /// The client of a request is gone.
    Abort(i64),
    /// The forward of a step failed; the first event of its call.
    ForwardFailed(i64),
    /// What a request has pinned may be evicted.
    Unpin(i64),
    /// Every page of the tree that nobody holds becomes free.
    ClearCache,
    /// What a step computes from now on.
    TokenBudget(TokenBudget),
    /// Pages of a request that was sent back to wait were read.
    PagesRead(PagesRead),
    /// Somebody else has guessed how a text goes on.
    Draft(Draft),
}

/// The same as `StepLimits` of the Python side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Request slots; the scratch slot has this number.
    pub max_rows: usize,
    /// Tokens of a step.
    pub max_tokens: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Pages; the scratch page has this number.
    pub num_pages: usize,
    /// Total length of a request.
    pub max_seq_len: usize,
    /// Slots for states, beside that of each request slot.
    pub num_checkpoints: usize,
}

impl Limits {
    /// Page-table entries of one step.
    #[must_use]
    pub fn max_page_changes(&self) -> usize {
        let per_request = self.max_seq_len.div_ceil(self.page_size);
        self.max_rows + per_request.max(self.num_pages.min(65_536))
    }
}

/// In the place of a checkpoint with which a slot begins: the state that is at hand with the slot's stored pages.
pub const FROM_STORE: i32 = -2;

/// The arrays of one step, in the order of the Python side's `RingEntry`. `page_table_updates`, `state_saves` and
/// `page_loads` are rows of 3, `assigned` and `state_begins` of 2.
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

/// The header of a step; the same fields as `StepPlan` of the Python side.
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

/// In the place of a row's token: what the model computed for it is no numbers. Its request ends, and the prefix cache
/// keeps nothing of it.
pub const NOT_FINITE: i32 = -2;

/// How a request ended; the numbers of the Python side, where 0 means that it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum FinishReason {
    /// A stop token, or a stop string in the text.
    Stop = 1,
    /// max_tokens, the context, or the pool is used up.
    Length = 2,
    /// The client is gone.
    Abort = 3,
    /// Refused, or its forward failed.
    Error = 4,
}

/// One entry of a `commit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The request.
    pub req_id: i64,
    /// None at an end that comes without a token.
    pub sampled: Option<Sampled>,
    /// How the request ends, if it does.
    pub reason: Option<FinishReason>,
}

/// A token, and the row of the committed step that sampled it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Sampled {
    pub token: i32,
    pub row: u32,
}
