//! What goes into a step of the engine and what comes out.
//!
//! Invariants: plain data, in the units of `python/minisgl/step.py` and `engine/api.py`.

use minisgl_kernels::kv::KvShape;

use crate::sampling::TokenLogprobs;

/// Sizes that the scheduler and the engine agree on.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Pages of the pool, the scratch page aside.
    pub num_pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Requests that have a slot.
    pub max_rows: usize,
    /// Tokens of a sequence.
    pub max_seq_len: usize,
    /// States that are kept, beside those of the slots; only for layers that keep some.
    pub num_checkpoints: usize,
}

/// The arrays of a step, as `python/minisgl/step.py` describes them, without padding rows.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// By token; -(slot + 1): what that slot sampled last.
    pub input_ids: Vec<i32>,
    /// By token.
    pub positions: Vec<i32>,
    /// By token.
    pub out_loc: Vec<i32>,
    /// By row.
    pub req_slots: Vec<i32>,
    /// By row.
    pub seq_lens: Vec<i32>,
    /// By row.
    pub extend_lens: Vec<i32>,
    /// Rows that yield a token.
    pub sample_rows: Vec<i32>,
    /// (slot, first column, count) over `page_ids`.
    pub page_table_updates: Vec<[i32; 3]>,
    /// Pages.
    pub page_ids: Vec<i32>,
    /// Rows that decode come first.
    pub num_decode_rows: usize,
    /// Slots whose requests have ended.
    pub freed: Vec<i32>,
    /// (slot, first column, count): pages that come from what is staged for the slot, before the forward.
    pub page_loads: Vec<[i32; 3]>,
    /// (slot, the checkpoint that its state begins with; -1: nothing, -2: what is at hand for it), before the forward.
    pub state_begins: Vec<[i32; 2]>,
    /// (row, after how many of its tokens its state is copied, the checkpoint that it is copied to).
    pub state_saves: Vec<[i32; 3]>,
}

/// Log probabilities of sampled tokens.
#[derive(Debug, Default)]
pub struct StepLogprobs {
    /// The rows that asked, ascending.
    pub rows: Vec<i32>,
    /// Theirs.
    pub tokens: Vec<TokenLogprobs>,
}

/// Log probabilities of a prompt's tokens.
#[derive(Debug)]
pub struct PromptLogprobs {
    /// Whose.
    pub req_id: i64,
    /// The position of the first.
    pub first: usize,
    /// From there on.
    pub tokens: Vec<TokenLogprobs>,
}

/// The embedding of a prompt that ended in a step.
#[derive(Debug, PartialEq)]
pub struct Embedding {
    /// Whose.
    pub req_id: i64,
    /// Its numbers, of no particular length.
    pub numbers: Vec<f32>,
}

/// See `python/minisgl/step.py`.
pub const NOT_FINITE: i32 = -2;

/// What a step gives.
#[derive(Debug, Default)]
pub struct Sampled {
    /// By row; -1 where the row does not sample, `NOT_FINITE` where what was computed is no numbers.
    pub tokens: Vec<i32>,
    /// Log probabilities of the rows that asked.
    pub logprobs: Option<StepLogprobs>,
    /// Log probabilities of the prompts that asked.
    pub prompts: Vec<PromptLogprobs>,
    /// Embeddings of the prompts that asked, with their last token.
    pub embeddings: Vec<Embedding>,
    /// Rows that are not finite, or whose grammars let no token come, and why: the tokens of these are an end of
    /// sequence. Empty: its mask takes long; it may go on where it was, once that is made.
    pub failures: Vec<(i32, String)>,
}

/// Choices of a user.
#[derive(Clone, Debug)]
pub struct Choices {
    /// The shape of the KV pool, its scratch page included.
    pub kv: KvShape,
    /// Whether the parts of forwards are measured.
    pub timed: bool,
}
