//! What a scheduler is told, what it can count, and what can go wrong in a call: the types of `minisgl.scheduler.api`.

use std::fmt;

use crate::step::Limits;

/// Which prefix cache, and in which order it gives pages back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachePolicy {
    /// Least recently used first.
    Lru,
    /// Least often used first, then least recently.
    Lfu,
    /// No cache.
    Naive,
}

/// Which waiting request starts next; see `ranking`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulePolicy {
    /// The first that came.
    Fcfs,
    /// The one with the longest cached prefix.
    Lpm,
    /// The one with the shortest prefill.
    Srpf,
}

/// The same fields as `ControlPlaneConfig` of the Python side, which checks them.
#[derive(Clone, Debug)]
pub struct Config {
    /// Pages of the KV pool.
    pub num_pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Rows of a step.
    pub max_running_requests: usize,
    /// Token budget of a step.
    pub max_prefill_length: usize,
    /// Prompt and generated tokens of a request.
    pub context_len: usize,
    /// Ids that end every request that does not ignore them.
    pub eos_ids: Vec<i32>,
    /// The prefix cache.
    pub cache: CachePolicy,
    /// Padded row counts, ascending.
    pub graph_sizes: Vec<usize>,
    /// Pages that requests with `pin` may keep in the tree.
    pub max_pinned_pages: usize,
    /// Tokens that the tree keeps for nobody; 0 for no limit.
    pub cache_token_budget: usize,
    /// Tokens of the longest prompt that the tree keeps after its request; 0 for no limit.
    pub cache_max_prompt: usize,
    /// Tokens of a request that are guessed and computed in one step; 0 for none.
    pub max_draft_len: usize,
    /// Tokens, in whole pages, after which a long text saves its state; 0 for a model without states.
    pub checkpoint_interval: usize,
    /// Slots for states, beside that of each request slot.
    pub num_checkpoints: usize,
    /// Which waiting request starts next.
    pub schedule_policy: SchedulePolicy,
}

impl Config {
    /// Decode rows are scheduled whatever the budget, and the first prefill gets a page whatever is left.
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

/// Counts of this moment; the same fields as `Stats` of the Python side.
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

/// An error of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// A malformed event: its index, the field and the reason. The call changed nothing.
    Event {
        /// Index of the event in the call.
        index: usize,
        /// Name of the field.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A bad argument of a building block. The call changed nothing.
    Argument {
        /// The argument's name.
        name: &'static str,
        /// The rule that its value breaks.
        reason: String,
    },
    /// A broken invariant: the object must not be used any more.
    Broken(String),
}

/// A result of this crate.
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

/// A broken invariant unless `ok`; `what` is made only if it is needed.
pub(crate) fn need(ok: bool, what: impl FnOnce() -> String) -> Result<()> {
    if ok {
        Ok(())
    } else {
        Err(Error::Broken(format!("broken invariant: {}", what())))
    }
}

/// A bad argument of a building block.
pub(crate) fn argument<T>(name: &'static str, reason: impl Into<String>) -> Result<T> {
    let reason = reason.into();
    Err(Error::Argument { name, reason })
}

/// Whether so much memory can be had; where it cannot, an allocation would end the process.
pub(crate) fn need_memory(name: &'static str, bytes: usize) -> Result<()> {
    match Vec::<u8>::new().try_reserve_exact(bytes) {
        Ok(()) => Ok(()),
        Err(_) => argument(name, format!("no memory for {bytes} bytes")),
    }
}

/// A refused call or a broken invariant.
pub(crate) fn broken<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Broken(what.into()))
}
