//! Sampling: from the logits of a step's rows to tokens, by the settings of each request slot.
//!
//! Invariants: the rules equal those of the Python package's `engine/sampler.py`: equal logits give equal tokens; a row
//! without settings keeps its logits bit for bit, and a row pays only for its own settings; a slot that is bound again
//! starts from the sequence it is bound with; rows are independent, so that threads can work on different rows.

mod changes;
mod grammar;
mod logprobs;
mod mask;
mod params;
mod sampler;

use std::sync::{Arc, Mutex, PoisonError};

use crate::images::PromptImage;
use changes::Changes;
use grammar::Masked;
pub use grammar::{Grammar, Masks, SharedGrammar};
pub use logprobs::{TokenLogprobs, logprobs};
pub use mask::words as mask_words;
use minisgl_store::Staged;
pub use params::{Params, Pooling};
pub use sampler::{Best, Scratch, argmax, sample, uniform};

/// Request that takes over a slot, with its settings and its sequence so far.
#[derive(Clone, Debug, Default)]
pub struct Binding {
    /// Id of the request that owns the slot.
    pub req_id: i64,
    /// Sampling parameters of the request.
    pub params: Params,
    /// Token ids known so far: prompt, then output.
    pub tokens: Vec<i32>,
    /// Length of the prompt in `tokens`; penalties treat it separately.
    pub num_prompt: usize,
    /// Grammar that the output must follow.
    pub grammar: Option<SharedGrammar>,
    /// Id of the LoRA adapter, 0 for none.
    pub adapter: u32,
    /// Cache namespace: stored pages are shared only within it. Empty is the default namespace.
    pub space: Vec<u8>,
    /// Stored pages of `tokens` that are staged for loading.
    pub staged: Option<Arc<Staged>>,
    /// Images of the prompt, by start.
    pub images: Vec<PromptImage>,
}

#[derive(Debug, Default)]
struct Slot {
    params: Params,
    changes: Option<Changes>,
    prompt: Option<Prompt>,
    grammar: Option<Mutex<Masked>>,
}

#[derive(Debug)]
struct Prompt {
    req_id: i64,
    tokens: Vec<i32>,
    count: usize,
}

/// Next token of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Sampled token id.
    pub token: u32,
    /// Log probabilities, if the request wants them.
    pub logprobs: Option<TokenLogprobs>,
}

/// Next token of a row, or an end-of-sequence id and why the grammar allows none (empty: its mask took too long).
pub type SampleResult = (SampledToken, Option<String>);

/// Prompt tokens of a step whose log probabilities are requested.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PromptPart<'a> {
    /// Id of the request whose prompt this is.
    pub req_id: i64,
    /// Position of the first of `tokens`. Its distribution is in the logits of the position before.
    pub first: usize,
    /// Token ids from position `first` on, at most one for each position that the step computes.
    pub tokens: &'a [i32],
    /// Number of most likely tokens to report for each.
    pub count: usize,
}

/// Sampling state of all request slots.
#[derive(Debug)]
pub struct Slots {
    vocab: usize,
    eos_ids: Vec<u32>,
    slots: Vec<Slot>,
}

impl Slots {
    /// Creates `num_slots` empty slots. `eos_ids` end a request's output unless it ignores them.
    pub fn new(num_slots: usize, vocab: usize, eos_ids: &[u32]) -> Self {
        Self {
            vocab,
            eos_ids: eos_ids.to_vec(),
            slots: (0..num_slots).map(|_| Slot::default()).collect(),
        }
    }

    /// Resets the slot for a new request.
    pub fn bind(&mut self, slot: usize, binding: Binding) {
        let Binding {
            req_id,
            params,
            mut tokens,
            num_prompt,
            grammar,
            ..
        } = binding;
        let (prompt, output) = tokens.split_at(num_prompt.min(tokens.len()));
        let changes = params
            .changes_logits()
            .then(|| Changes::new(&params, prompt, output, self.vocab, &self.eos_ids));
        let grammar = grammar.map(|grammar| Mutex::new(Masked::new(grammar, output, mask_words(self.vocab))));
        tokens.truncate(num_prompt);
        let is_text = tokens.iter().all(|token| (*token as usize) < self.vocab);
        self.slots[slot] = Slot {
            changes,
            prompt: params
                .prompt_logprobs
                .filter(|_| is_text)
                .map(|count| Prompt { req_id, tokens, count }),
            params,
            grammar,
        };
    }

    /// Drops the grammar of a slot whose request has ended.
    pub fn free(&mut self, slot: usize) {
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.grammar = None;
        }
    }

    /// Returns the grammar masks of these slots. They must be filled before the next `sample_with_grammar`.
    pub fn masks(&self, slots: impl Iterator<Item = usize>) -> Masks<'_> {
        Masks::new(slots.filter_map(|slot| self.slots[slot].grammar.as_ref()))
    }

    /// Returns true if the slot's token is the argmax of the unchanged logits, without log probabilities.
    pub fn is_plain(&self, slot: usize) -> bool {
        let Slot { params, changes, .. } = &self.slots[slot];
        params.is_greedy() && changes.is_none() && params.logprobs.is_none()
    }

    /// Applies the request's logit changes for the token at `position`, in place.
    pub fn apply(&self, slot: usize, position: u64, logits: &mut [f32]) {
        if let Some(changes) = &self.slots[slot].changes {
            changes.apply(logits, position);
        }
    }

    /// Samples the token at `position` from logits that `apply` has changed.
    pub fn sample(&self, slot: usize, position: u64, logits: &[f32], scratch: &mut Scratch) -> u32 {
        sample(&self.slots[slot].params, position, logits, scratch)
    }

    /// Returns how many most likely tokens to report with a sampled one, `None` without log probabilities.
    pub fn num_logprobs(&self, slot: usize) -> Option<usize> {
        self.slots[slot].params.logprobs
    }

    /// Samples the token at `position` from raw `logits`, which are changed. `mask` has the bits of allowed tokens.
    pub fn draw(
        &self,
        slot: usize,
        position: u64,
        logits: &mut [f32],
        mask: Option<&[u32]>,
        scratch: &mut Scratch,
    ) -> SampledToken {
        let mut raw = std::mem::take(&mut scratch.raw);
        let num_logprobs = self.num_logprobs(slot);
        let changed = mask.is_some() || self.slots[slot].changes.is_some();
        if num_logprobs.is_some() && changed {
            raw.clear();
            raw.extend_from_slice(logits);
        }
        if let Some(mask) = mask {
            mask::apply(mask, logits);
        }
        self.apply(slot, position, logits);
        let token = self.sample(slot, position, logits, scratch);
        let before: &[f32] = if changed { &raw } else { logits };
        let logprobs = num_logprobs.map(|count| logprobs(scratch.isa, before, token, count));
        scratch.raw = raw;
        SampledToken { token, logprobs }
    }

    /// Samples the token at `position` under the slot's grammar, if any, and advances it, or returns why it cannot.
    pub fn sample_with_grammar(
        &self,
        slot: usize,
        position: u64,
        logits: &mut [f32],
        scratch: &mut Scratch,
    ) -> SampleResult {
        let Some(masked) = &self.slots[slot].grammar else {
            return (self.draw(slot, position, logits, None, scratch), None);
        };
        let mut masked = masked.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mask) = masked.mask() else {
            return (self.end_token(), Some(String::new()));
        };
        let sampled = self.draw(slot, position, logits, Some(mask), scratch);
        match masked.consume(sampled.token) {
            Some(why) => (self.end_token(), Some(why)),
            None => (sampled, None),
        }
    }

    /// Returns the end-of-sequence id, for a request that cannot continue.
    fn end_token(&self) -> SampledToken {
        SampledToken {
            token: self.eos_ids.first().copied().unwrap_or_default(),
            logprobs: None,
        }
    }

    /// Records a sampled token, for penalties and bad words.
    pub fn record(&mut self, slot: usize, token: u32) {
        if let Some(changes) = &mut self.slots[slot].changes {
            changes.record(token);
        }
    }

    /// Returns the tokens after `count` prompt positions from `start` on, if their log probabilities are requested.
    pub fn prompt_part(&self, slot: usize, start: usize, count: usize) -> Option<PromptPart<'_>> {
        let prompt = self.slots[slot].prompt.as_ref()?;
        let first = start + 1;
        let end = (first + count).min(prompt.tokens.len());
        let tokens = prompt.tokens.get(first..end)?;
        (!tokens.is_empty()).then_some(PromptPart {
            req_id: prompt.req_id,
            first,
            tokens,
            count: prompt.count,
        })
    }
}

#[cfg(test)]
mod tests;
