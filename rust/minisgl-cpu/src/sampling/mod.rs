//! From the logits of a step's rows to tokens: what each request slot asks, and the rules.
//!
//! Invariants: the rules are those of the Python package's `engine/sampler.py`: the same logits, the same token; a row
//! that asks for nothing keeps its logits bit for bit, and rows pay only for what they ask; a slot that is bound again
//! starts from the sequence it is bound with. Rows do not touch each other: one thread may work on one row, another on
//! the next.

mod changes;
mod grammar;
mod logprobs;
mod mask;
mod params;
mod sampler;

use std::sync::{Arc, Mutex, PoisonError};

use changes::Changes;
use grammar::Masked;
pub use grammar::{Grammar, Masks, SharedGrammar};
pub use logprobs::{TokenLogprobs, logprobs};
pub use mask::words as mask_words;
use minisgl_store::Staged;
pub use params::{Params, Pooling};
pub use sampler::{Best, Scratch, argmax, sample, uniform};

/// Whose request a slot holds from now on.
#[derive(Clone, Debug, Default)]
pub struct Binding {
    /// The request.
    pub req_id: i64,
    /// What it asks.
    pub params: Params,
    /// The whole sequence known at this moment.
    pub tokens: Vec<i32>,
    /// How many of `tokens` are the prompt, which penalties count apart.
    pub num_prompt: usize,
    /// What its tokens have to follow.
    pub grammar: Option<SharedGrammar>,
    /// Number of the adapter that changes the model for it; 0: none.
    pub adapter: u32,
    /// In the store of pages it shares some with those of the same space alone; empty: with all of none.
    pub space: Vec<u8>,
    /// Pages of `tokens` that were computed before.
    pub staged: Option<Arc<Staged>>,
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

/// A row's next token.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// It.
    pub token: u32,
    /// If the request wants them.
    pub logprobs: Option<TokenLogprobs>,
}

/// A row's next token, or why its grammar lets none come (empty: its mask takes long); the token is an end of sequence
/// then.
pub type Followed = (Drawn, Option<String>);

/// Tokens of a prompt whose log probabilities are wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PromptPart<'a> {
    /// The request.
    pub req_id: i64,
    /// Position of the first of `tokens`: its distribution is in the row's logits at the position before.
    pub first: usize,
    /// At `first` and on: at most one for each position that the step computes.
    pub tokens: &'a [i32],
    /// How many of the most likely ones are wanted beside each.
    pub count: usize,
}

/// By request slot.
#[derive(Debug)]
pub struct Slots {
    vocab: usize,
    eos_ids: Vec<u32>,
    slots: Vec<Slot>,
}

impl Slots {
    /// `eos_ids` end a request's output unless it ignores them.
    pub fn new(num_slots: usize, vocab: usize, eos_ids: &[u32]) -> Self {
        Self {
            vocab,
            eos_ids: eos_ids.to_vec(),
            slots: (0..num_slots).map(|_| Slot::default()).collect(),
        }
    }

    /// The slot forgets the request before.
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
        self.slots[slot] = Slot {
            changes,
            prompt: params.prompt_logprobs.map(|count| Prompt { req_id, tokens, count }),
            params,
            grammar,
        };
    }

    /// The slot's request has ended: its grammar may go.
    pub fn free(&mut self, slot: usize) {
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.grammar = None;
        }
    }

    /// What the grammars of these slots allow next: to be filled before their next `follow`.
    pub fn masks(&self, slots: impl Iterator<Item = usize>) -> Masks<'_> {
        Masks::of(slots.filter_map(|slot| self.slots[slot].grammar.as_ref()))
    }

    /// Whether the slot's token is the argmax of the logits as they are, and nothing else of them is wanted: `argmax` of
    /// ranges, merged, does.
    pub fn is_plain(&self, slot: usize) -> bool {
        let Slot { params, changes, .. } = &self.slots[slot];
        params.is_greedy() && changes.is_none() && params.logprobs.is_none()
    }

    /// Change the logits of the token at `position` as the slot's request asks, in place.
    pub fn apply(&self, slot: usize, position: u64, logits: &mut [f32]) {
        if let Some(changes) = &self.slots[slot].changes {
            changes.apply(logits, position);
        }
    }

    /// The token at `position`, of logits that are changed as the request asks.
    pub fn sample(&self, slot: usize, position: u64, logits: &[f32], scratch: &mut Scratch) -> u32 {
        sample(&self.slots[slot].params, position, logits, scratch)
    }

    /// The number of most likely tokens that are wanted beside the sampled one, if log probabilities are.
    pub fn logprobs_wanted(&self, slot: usize) -> Option<usize> {
        self.slots[slot].params.logprobs
    }

    /// All of it: the token at `position` of a row with `logits` as the model put them out, which are changed, and its log
    /// probabilities. `mask` has a bit for each token that may come; no mask, all may.
    pub fn draw(
        &self,
        slot: usize,
        position: u64,
        logits: &mut [f32],
        mask: Option<&[u32]>,
        scratch: &mut Scratch,
    ) -> Drawn {
        let mut raw = std::mem::take(&mut scratch.raw);
        let wanted = self.logprobs_wanted(slot);
        let changed = mask.is_some() || self.slots[slot].changes.is_some();
        if wanted.is_some() && changed {
            raw.clear();
            raw.extend_from_slice(logits);
        }
        if let Some(mask) = mask {
            mask::apply(mask, logits);
        }
        self.apply(slot, position, logits);
        let token = self.sample(slot, position, logits, scratch);
        let before: &[f32] = if changed { &raw } else { logits };
        let logprobs = wanted.map(|count| logprobs(scratch.isa, before, token, count));
        scratch.raw = raw;
        Drawn { token, logprobs }
    }

    /// `draw` by the slot's grammar, if it has one and as its mask says, which then stands behind the token; or it
    /// cannot, and why.
    pub fn follow(&self, slot: usize, position: u64, logits: &mut [f32], scratch: &mut Scratch) -> Followed {
        let Some(masked) = &self.slots[slot].grammar else {
            return (self.draw(slot, position, logits, None, scratch), None);
        };
        let mut masked = masked.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mask) = masked.mask() else {
            return (self.no_token(), Some(String::new()));
        };
        let drawn = self.draw(slot, position, logits, Some(mask), scratch);
        match masked.consume(drawn.token) {
            Some(why) => (self.no_token(), Some(why)),
            None => (drawn, None),
        }
    }

    /// The id that ends the output of a request that cannot go on.
    fn no_token(&self) -> Drawn {
        Drawn {
            token: self.eos_ids.first().copied().unwrap_or_default(),
            logprobs: None,
        }
    }

    /// `token` was sampled: penalties and bad words know it from now on.
    pub fn record(&mut self, slot: usize, token: u32) {
        if let Some(changes) = &mut self.slots[slot].changes {
            changes.record(token);
        }
    }

    /// The prompt tokens that follow those of a row which computes `count` positions from `start` on, if their log
    /// probabilities are wanted.
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
