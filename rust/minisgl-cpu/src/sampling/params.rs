//! Sampling parameters of one request, as the engine needs them.
//!
//! Invariants: numbers have the precision of the arithmetic that uses them, float32.

/// Sampling parameters of one request, validated and with a seed. Ids beyond the vocabulary are ignored.
#[derive(Clone, Debug, PartialEq)]
pub struct Params {
    /// Divisor of the logits; 0 is greedy.
    pub temperature: f32,
    /// Number of most likely tokens to sample from; 0 or less is off.
    pub top_k: i64,
    /// Nucleus: sample from the fewest tokens whose probabilities reach this sum; 1 is off, 0 is greedy.
    pub top_p: f32,
    /// Minimum probability relative to the most likely token; 0 is off.
    pub min_p: f32,
    /// Random seed; a token is a function of seed and position.
    pub seed: i64,
    /// Divisor of positive logits, and factor of negative ones, for tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Penalty for each time that a token is in the output.
    pub frequency_penalty: f32,
    /// Penalty, once, for each token in the output.
    pub presence_penalty: f32,
    /// Addends of logits as (token id, bias).
    pub logit_bias: Vec<(u32, f32)>,
    /// Token ids to sample from; empty allows all.
    pub allowed_token_ids: Vec<u32>,
    /// Token sequences that the output must not contain.
    pub bad_token_ids: Vec<Vec<u32>>,
    /// Minimum output length in tokens; tokens that end the output are banned before.
    pub min_tokens: usize,
    /// Token ids that end the output, in addition to the model's own.
    pub stop_token_ids: Vec<u32>,
    /// True if the model's end-of-sequence ids do not end the output.
    pub ignore_eos: bool,
    /// Number of most likely tokens to report with each sampled one; `None` reports no log probabilities.
    pub logprobs: Option<usize>,
    /// Number of most likely tokens to report with each prompt token; `None` reports no log probabilities.
    pub prompt_logprobs: Option<usize>,
    /// Pooling of the prompt's embedding; `None` for requests that generate.
    pub embedding: Option<Pooling>,
}

/// Tokens whose hidden states form an embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Mean over all prompt tokens.
    Mean,
    /// Last prompt token.
    Last,
    /// First prompt token.
    First,
    /// Pooling of the model's score head, whose result is a score.
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
    /// Returns true if the most likely token is taken, without randomness.
    pub fn is_greedy(&self) -> bool {
        !(self.temperature > 0.0 && self.top_p > 0.0)
    }

    /// Returns true if logits are changed before temperature is applied.
    pub fn changes_logits(&self) -> bool {
        self.has_penalties()
            || !self.logit_bias.is_empty()
            || !self.allowed_token_ids.is_empty()
            || !self.bad_token_ids.is_empty()
            || self.min_tokens > 0
    }

    /// Returns true if logits depend on the individual tokens of the sequence so far.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }
}
