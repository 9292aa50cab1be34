//! Input and output of an engine step.
//!
//! Invariants: plain data, in the units of `python/minisgl/step.py` and `engine/api.py`.

use minisgl_kernels::kv::KvShape;

use crate::sampling::TokenLogprobs;

/// Sizes that scheduler and engine agree on.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Pages of the KV pool, without the scratch page.
    pub num_pages: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Requests that may hold a slot at once.
    pub max_rows: usize,
    /// Maximum length of a sequence, in tokens.
    pub max_seq_len: usize,
    /// State snapshots, in addition to the states of slots; only for models with recurrent layers.
    pub num_checkpoints: usize,
}

/// Arrays of a step, as `python/minisgl/step.py` describes them, without padding rows.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// Token id of each position; -(slot + 1) stands for the token that the slot sampled last.
    pub input_ids: Vec<i32>,
    /// Position in its sequence, for each token.
    pub positions: Vec<i32>,
    /// KV slot (page * page_size + offset), for each token.
    pub out_loc: Vec<i32>,
    /// Request slot of each row.
    pub req_slots: Vec<i32>,
    /// Sequence length of each row after the step, in tokens.
    pub seq_lens: Vec<i32>,
    /// Tokens of each row in this step.
    pub extend_lens: Vec<i32>,
    /// Rows that sample a token.
    pub sample_rows: Vec<i32>,
    /// Changes of the page table as (slot, first page index, count), which consume `page_ids` in order.
    pub page_table_updates: Vec<[i32; 3]>,
    /// Page ids for `page_table_updates`.
    pub page_ids: Vec<i32>,
    /// Number of decode rows, which come first.
    pub num_decode_rows: usize,
    /// Slots whose requests have ended.
    pub freed: Vec<i32>,
    /// Staged pages to load before the forward pass, as (slot, first page index, count).
    pub page_loads: Vec<[i32; 3]>,
    /// States to initialize before the forward pass, as (slot, snapshot); -1 zeroes the state, -2 loads the staged one.
    pub state_begins: Vec<[i32; 2]>,
    /// Snapshots to take, as (row, number of its tokens before the snapshot, snapshot index).
    pub state_saves: Vec<[i32; 3]>,
    /// Tokens at the end of each row that only other tokens need; empty if there are none.
    pub added: Vec<usize>,
}

/// Log probabilities of sampled tokens.
#[derive(Debug, Default)]
pub struct StepLogprobs {
    /// Rows that requested log probabilities, ascending.
    pub rows: Vec<i32>,
    /// Log probabilities of these rows.
    pub tokens: Vec<TokenLogprobs>,
}

/// Log probabilities of a part of a prompt.
#[derive(Debug)]
pub struct PromptLogprobs {
    /// Id of the request whose prompt this is.
    pub req_id: i64,
    /// Position of the first token.
    pub first: usize,
    /// Log probabilities from that position on.
    pub tokens: Vec<TokenLogprobs>,
}

/// Embedding (or score) of a prompt that ended in a step.
#[derive(Debug, PartialEq)]
pub struct Embedding {
    /// Id of the request that asked for the embedding.
    pub req_id: i64,
    /// Elements of the embedding, not normalized.
    pub numbers: Vec<f32>,
}

/// Marker in place of a token for a row whose output is not finite (mirrors `python/minisgl/step.py`).
pub const NOT_FINITE: i32 = -2;

/// Result of an engine step: tokens, log probabilities, embeddings and failures.
#[derive(Debug, Default)]
pub struct Sampled {
    /// Token id of each row; -1 if the row does not sample, `NOT_FINITE` if its output is not finite.
    pub tokens: Vec<i32>,
    /// Log probabilities of sampled tokens; `None` if no row requested them.
    pub logprobs: Option<StepLogprobs>,
    /// Log probabilities of prompt tokens, for requests that want them.
    pub prompts: Vec<PromptLogprobs>,
    /// Embeddings and scores of prompts that ended in this step.
    pub embeddings: Vec<Embedding>,
    /// Failed rows as (row, reason): output not finite, or the grammar allows no token (the row's token is then an end
    /// of sequence). An empty reason means that the mask took too long; the request may continue once it is ready.
    pub failures: Vec<(i32, String)>,
}

/// Engine settings that the user chooses.
#[derive(Clone, Debug)]
pub struct Choices {
    /// Shape of the KV pool, with its scratch page.
    pub kv: KvShape,
    /// True if the parts of forward passes are timed.
    pub timed: bool,
}
