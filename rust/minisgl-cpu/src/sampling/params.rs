//! How one request samples, as the engine needs it.
//!
//! Invariants: numbers are as exact as the arithmetic that uses them, float32.

/// Parameters of one request, valid and with a seed: whoever accepts requests has seen to both. Ids beyond the
/// vocabulary are passed over.
#[derive(Clone, Debug, PartialEq)]
pub struct Params {
    /// Logits are divided by it; 0 is the most likely token, without a draw.
    pub temperature: f32,
    /// Only the k most likely tokens; at most 0 is off.
    pub top_k: i64,
    /// Only the fewest tokens whose share reaches p; 1 is off, 0 is greedy.
    pub top_p: f32,
    /// Only tokens of at least this share of the most likely one's probability; 0 is off.
    pub min_p: f32,
    /// Token and seed: the same draw.
    pub seed: i64,
    /// Positive logits of tokens in prompt or output are divided by it, negative ones multiplied; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted as often as a token is in the output.
    pub frequency_penalty: f32,
    /// Subtracted once from tokens in the output.
    pub presence_penalty: f32,
    /// Added to logits, by id.
    pub logit_bias: Vec<(u32, f32)>,
    /// Only these; empty: all.
    pub allowed_token_ids: Vec<u32>,
    /// Sequences that the output must not have.
    pub bad_token_ids: Vec<Vec<u32>>,
    /// Before so many tokens of output none of those that end it is sampled.
    pub min_tokens: usize,
    /// Tokens that end the output, beside the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The model's own do not end it.
    pub ignore_eos: bool,
    /// How many of the most likely tokens are reported beside the sampled one; None: no log probabilities.
    pub logprobs: Option<usize>,
    /// The same of each token of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// What is wanted is the prompt's embedding, pooled so.
    pub embedding: Option<Pooling>,
}

/// Which tokens' hidden numbers an embedding is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// All: their mean.
    Mean,
    /// The last one.
    Last,
    /// The first one.
    First,
    /// Those that the head of scores wants, which makes a score of them.
    Score,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: -1,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed_token_ids: Vec::new(),
            bad_token_ids: Vec::new(),
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            embedding: None,
        }
    }
}

impl Params {
    /// The most likely token, without a draw.
    pub fn is_greedy(&self) -> bool {
        !(self.temperature > 0.0 && self.top_p > 0.0)
    }

    /// Whether anything happens to the logits before temperature.
    pub fn changes_logits(&self) -> bool {
        self.has_penalties()
            || !self.logit_bias.is_empty()
            || !self.allowed_token_ids.is_empty()
            || !self.bad_token_ids.is_empty()
            || self.min_tokens > 0
    }

    /// Whether logits depend on which tokens came before, one by one.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }
}
