//! Configuration, statistics and errors of the scheduler: the Rust side of the types in `minisgl.scheduler.api`.

use std::fmt;

use crate::step::Limits;

/// Eviction policy of the prefix cache, or no cache at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachePolicy {
    /// Least recently used: evicts the leaf that was unlocked longest ago.
    Lru,
    /// Least frequently used: evicts the leaf that was locked the fewest times; ties go to the least recently used.
    Lfu,
    /// No prefix cache: every prompt is computed in full.
    Naive,
}

/// Policy that picks the waiting request to start next. `ranking` has the exact rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulePolicy {
    /// First come, first served, within a priority.
    Fcfs,
    /// Longest prefix match: the request with the longest cached prefix first.
    Lpm,
    /// Shortest remaining prefill first: the request with the fewest prompt tokens to compute.
    Srpf,
}

/// Configuration of the scheduler. It has the fields of Python's `ControlPlaneConfig`, which validates them.
#[derive(Clone, Debug)]
pub struct Config {
    /// Number of pages in the KV pool.
    pub num_pages: usize,
    /// Page size, in tokens.
    pub page_size: usize,
    /// Requests that may run at once, which is the maximum number of rows in a step.
    pub max_running_requests: usize,
    /// Token budget of a step.
    pub max_prefill_length: usize,
    /// Context length: maximum number of prompt and generated tokens of a request.
    pub context_len: usize,
    /// Token ids that end every request without `ignore_eos`.
    pub eos_ids: Vec<i32>,
    /// Eviction policy of the prefix cache.
    pub cache: CachePolicy,
    /// Row counts to which a decode step is padded (CUDA graph sizes), ascending.
    pub graph_sizes: Vec<usize>,
    /// Maximum number of pages that requests with `pin` may lock in the prefix cache, in total.
    pub max_pinned_pages: usize,
    /// Maximum number of unlocked tokens in the prefix cache; 0 for no limit.
    pub cache_token_budget: usize,
    /// Length in tokens of the longest prompt that stays cached after its request ends; 0 for no limit.
    pub cache_max_prompt: usize,
    /// Maximum number of draft tokens of a request in one step; 0 disables speculative decoding.
    pub max_draft_len: usize,
    /// Tokens, in whole pages, between two saved states of a sequence; 0 for a model without recurrent state.
    pub checkpoint_interval: usize,
    /// Slots for saved states, in addition to the one of each request slot.
    pub num_checkpoints: usize,
    /// Policy that picks the waiting request to start next.
    pub schedule_policy: SchedulePolicy,
}

impl Config {
    /// Returns the sizes of the step arrays. `max_tokens` exceeds the token budget: decode rows are scheduled whatever
    /// the budget, and the first prefill gets at least one page.
    #[must_use]
    pub fn limits(&self) -> Limits {
        Limits {
            max_rows: self.max_running_requests,
            max_tokens: self.max_running_requests + self.max_prefill_length.max(self.page_size),
            page_size: self.page_size,
            num_pages: self.num_pages,
            max_seq_len: self.context_len.min(self.num_pages * self.page_size + 1),
            num_checkpoints: self.num_checkpoints,
        }
    }
}

/// Counters and gauges of the scheduler. It has the fields of Python's `Stats`; `_total` fields count since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Stats {
    pub num_waiting: usize,
    pub num_running: usize,
    pub num_draining: usize,
    pub num_free_pages: usize,
    pub num_evictable_pages: usize,
    pub num_protected_pages: usize,
    pub num_held_pages: usize,
    pub num_retracted_total: u64,
    pub num_prompt_tokens_total: u64,
    pub num_cached_tokens_total: u64,
    pub num_pinned_pages: usize,
    pub num_inserted_pages_total: u64,
    pub num_evicted_pages_total: u64,
    pub num_hits_total: u64,
    pub num_misses_total: u64,
    pub num_drafted_total: u64,
    pub num_accepted_total: u64,
    pub num_checkpoints: usize,
    pub num_saved_total: u64,
    pub num_cut_short_total: u64,
    pub num_computed_again_total: u64,
    pub num_loaded_pages_total: u64,
}

/// Error of a scheduler call or of a building block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A malformed event. The call changed nothing.
    Event {
        /// Index of the event in the call.
        index: usize,
        /// Name of the invalid field.
        field: &'static str,
        /// Reason why the field is invalid, for example "must be at least 1".
        reason: String,
    },
    /// An invalid argument of a building block (prefix cache, step arrays). The call changed nothing.
    Argument {
        /// Name of the invalid argument.
        name: &'static str,
        /// Rule that the argument's value breaks.
        reason: String,
    },
    /// A broken invariant or a call out of order, with its message. The object must not be used any more.
    Broken(String),
}

/// `Result` with this crate's `Error`.
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Event { index, field, reason } => write!(f, "event {index}: {field}: {reason}"),
            Self::Argument { name, reason } => write!(f, "{name}: {reason}"),
            Self::Broken(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {}

/// Returns `Error::Broken` unless `ok`. `what` builds the message and is called on failure only.
pub(crate) fn need(ok: bool, what: impl FnOnce() -> String) -> Result<()> {
    if ok {
        Ok(())
    } else {
        Err(Error::Broken(format!("broken invariant: {}", what())))
    }
}

/// Returns `Error::Argument` for the argument `name`.
pub(crate) fn argument<T>(name: &'static str, reason: impl Into<String>) -> Result<T> {
    let reason = reason.into();
    Err(Error::Argument { name, reason })
}

/// Checks that `bytes` of memory can be reserved, because a failed allocation would abort the process.
/// `Error::Argument` if not.
pub(crate) fn need_memory(name: &'static str, bytes: usize) -> Result<()> {
    match Vec::<u8>::new().try_reserve_exact(bytes) {
        Ok(()) => Ok(()),
        Err(_) => argument(name, format!("cannot allocate {bytes} bytes")),
    }
}

/// Returns `Error::Broken` with the message `what`.
pub(crate) fn broken<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Broken(what.into()))
}
