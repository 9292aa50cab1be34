//! Changes to a request's logits before sampling: penalties, bias, allowed tokens, bad words, minimum length.
//!
//! Invariants: arithmetic and order equal those of the torch engine, in float32; counts and recent tokens follow the
//! sampled tokens; some token can always be sampled; the cost depends on the request's settings, not on the vocabulary,
//! except for allowed tokens.

use std::collections::{BTreeSet, HashMap};

use super::params::Params;

/// Banned sequences of tokens: the last id of one is banned where the output ends with the ids before it.
#[derive(Clone, Debug)]
struct BadSequences {
    sequences: Vec<Vec<u32>>,
    recent: Vec<u32>,
    longest: usize, // ids of the longest sequence, without its last
}

/// Changes to the logits of one slot, for a request that has any.
#[derive(Clone, Debug)]
pub(super) struct Changes {
    repetition: f32,
    frequency: f32,
    presence: f32,
    seen: Option<HashMap<u32, u32>>, // tokens of prompt and output, with their count in the output
    bias: Vec<(u32, f32)>,
    allowed: Option<Vec<u32>>,
    bad: Option<BadSequences>,
    ends: Vec<u32>,
    first_free: u64, // first position at which the output may end
}

impl Changes {
    /// Creates the changes for a request whose sequence so far is `prompt` and `output`. Ignores ids >= `vocab`.
    pub fn new(params: &Params, prompt: &[i32], output: &[i32], vocab: usize, eos_ids: &[u32]) -> Self {
        let valid = |id: &u32| (*id as usize) < vocab;
        let mut ends = BTreeSet::new();
        if params.min_tokens > 0 {
            ends.extend(params.stop_token_ids.iter().copied().filter(valid));
            if !params.ignore_eos {
                ends.extend(eos_ids.iter().copied().filter(valid));
            }
        }
        let allowed: BTreeSet<u32> = params.allowed_token_ids.iter().copied().filter(valid).collect();
        let seen = params.has_penalties().then(|| {
            let mut seen = HashMap::new();
            for id in ids(prompt).filter(valid) {
                seen.entry(id).or_insert(0);
            }
            for id in ids(output).filter(valid) {
                *seen.entry(id).or_insert(0) += 1;
            }
            seen
        });
        Self {
            repetition: params.repetition_penalty,
            frequency: params.frequency_penalty,
            presence: params.presence_penalty,
            seen,
            bias: params.logit_bias.iter().copied().filter(|(id, _)| valid(id)).collect(),
            allowed: (!params.allowed_token_ids.is_empty()).then(|| allowed.into_iter().collect()),
            bad: BadSequences::new(&params.bad_token_ids, output, vocab),
            ends: ends.into_iter().collect(),
            first_free: (prompt.len() as u64).saturating_add(params.min_tokens as u64),
        }
    }

    /// Changes the logits of the token at `position` in place.
    pub fn apply(&self, logits: &mut [f32], position: u64) {
        if let Some(seen) = &self.seen {
            for (&id, &count) in seen {
                self.penalize(&mut logits[id as usize], count);
            }
        }
        for &(id, bias) in &self.bias {
            logits[id as usize] += bias;
        }
        if let Some(allowed) = &self.allowed {
            let values: Vec<f32> = allowed.iter().map(|&id| logits[id as usize]).collect();
            logits.fill(f32::NEG_INFINITY);
            for (&id, value) in allowed.iter().zip(values) {
                logits[id as usize] = value;
            }
        }
        let ends: &[u32] = if position < self.first_free { &self.ends } else { &[] };
        let bad = self.bad.iter().flat_map(BadSequences::banned);
        let banned: Vec<(u32, f32)> = bad
            .chain(ends.iter().copied())
            .map(|id| (id, std::mem::replace(&mut logits[id as usize], f32::NEG_INFINITY)))
            .collect();
        if !banned.is_empty() && logits.iter().all(|&x| x == f32::NEG_INFINITY) {
            for &(id, value) in banned.iter().rev() {
                logits[id as usize] = value; // in reverse: the first saved value of an id is the original
            }
        }
    }

    fn penalize(&self, logit: &mut f32, count: u32) {
        if self.repetition != 1.0 {
            let positive = *logit > 0.0;
            *logit = if positive {
                *logit / self.repetition
            } else {
                *logit * self.repetition
            };
        }
        if count > 0 {
            *logit -= self.frequency * count as f32;
            *logit -= self.presence;
        }
    }

    /// Records a sampled token, for later penalties and bad words.
    pub fn record(&mut self, token: u32) {
        if let Some(bad) = &mut self.bad {
            bad.record(token);
        }
        if let Some(seen) = &mut self.seen {
            *seen.entry(token).or_insert(0) += 1;
        }
    }
}

impl BadSequences {
    fn new(sequences: &[Vec<u32>], output: &[i32], vocab: usize) -> Option<Self> {
        let can_be = |ids: &&Vec<u32>| !ids.is_empty() && ids.iter().all(|&id| (id as usize) < vocab);
        let sequences: Vec<Vec<u32>> = sequences.iter().filter(can_be).cloned().collect();
        let longest = sequences.iter().map(|ids| ids.len() - 1).max()?;
        let start = output.len().saturating_sub(longest);
        Some(Self {
            recent: ids(&output[start..]).collect(),
            sequences,
            longest,
        })
    }

    fn banned(&self) -> impl Iterator<Item = u32> + '_ {
        self.sequences.iter().filter_map(|ids| {
            let (&last, before) = ids.split_last()?;
            self.recent.ends_with(before).then_some(last)
        })
    }

    fn record(&mut self, token: u32) {
        self.recent.push(token);
        let beyond = self.recent.len().saturating_sub(self.longest);
        self.recent.drain(..beyond);
    }
}

/// Converts to token ids. A negative one becomes an id beyond every vocabulary.
fn ids(tokens: &[i32]) -> impl Iterator<Item = u32> + '_ {
    tokens.iter().map(|&token| u32::try_from(token).unwrap_or(u32::MAX))
}
