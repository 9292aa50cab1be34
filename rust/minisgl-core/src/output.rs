//! What a commit tells the clients, and counts of the moment.

/// How a request ended; the numbers of the Python side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum FinishReason {
    /// It goes on.
    None = 0,
    /// A stop token, or a stop string in the text.
    Stop = 1,
    /// max_tokens, the context, or the pool is used up.
    Length = 2,
    /// The client is gone.
    Abort = 3,
    /// Refused, or its forward failed.
    Error = 4,
}

/// One entry of a `commit`: token and row are -1 for an end without a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The request.
    pub req_id: i64,
    /// The token.
    pub token: i32,
    /// Whether it is the last, and why.
    pub reason: FinishReason,
    /// The row of the committed step.
    pub row: i32,
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
}
