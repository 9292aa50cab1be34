//! Draft tokens of the model's MTP layer, which predicts the token after the next.
//!
//! Invariants: the layer runs after a step's tokens are sampled, and changes none of them; its keys and values lie in
//! the pages of the sequences, as of one more layer, so that a prefix that is found in the cache has them; what it
//! skipped, or computed for a wrong token, makes later drafts worse and changes nothing else.

use std::collections::BTreeMap;

use crate::sampling::Binding;
use crate::step::Step;

/// Steps in a row whose drafts nobody asked for, after which the layer skips steps without prompts.
const UNASKED: usize = 4;

/// Draft token of a sequence.
struct Draft {
    req_id: i64,
    /// Tokens of the sequence that it follows.
    len: usize,
    token: u32,
}

/// Drafts of the last step, and what is known of the requests in each slot.
pub struct Drafts {
    /// Request of each slot, and its tokens when the slot was bound.
    slots: Vec<(i64, Vec<i32>)>,
    drafts: Vec<Draft>,
    unasked: usize,
    /// Whether the layer runs in measurements of a prompt; `None` outside of them.
    pub measured: Option<bool>,
}

impl Drafts {
    /// Creates an empty store for `num_slots` slots.
    pub fn new(num_slots: usize) -> Self {
        Self {
            slots: vec![(-1, Vec::new()); num_slots],
            drafts: Vec::new(),
            unasked: 0,
            measured: None,
        }
    }

    /// Remembers the tokens of the request that now owns `slot`.
    pub fn bind(&mut self, slot: usize, binding: &Binding) {
        self.slots[slot] = (binding.req_id, binding.tokens.clone());
    }

    /// Returns the draft tokens after sequences, given as (request, length); `None` where there is none.
    pub fn take(&mut self, sequences: &[(i64, usize)]) -> Vec<Option<u32>> {
        self.unasked = 0;
        let of = |(id, len)| self.drafts.iter().find(|one| (one.req_id, one.len) == (id, len));
        sequences.iter().map(|one| of(*one).map(|draft| draft.token)).collect()
    }

    /// Drops the drafts of the last step. Returns whether the layer runs in `step`, and whether it drafts.
    pub fn begin(&mut self, step: &Step) -> (bool, bool) {
        self.drafts.clear();
        let all_decode = step.num_decode_rows == step.req_slots.len();
        self.unasked += usize::from(all_decode);
        let is_asked = self.unasked <= UNASKED;
        self.measured
            .map_or((is_asked || !all_decode, is_asked), |runs| (runs, false))
    }

    /// Adds drafts for the `rows` of a step.
    pub fn add(&mut self, step: &Step, rows: &[usize], tokens: impl Iterator<Item = u32>) {
        let drafts = rows.iter().zip(tokens).map(|(row, token)| Draft {
            req_id: self.slots[step.req_slots[*row] as usize].0,
            len: step.seq_lens[*row] as usize + 1,
            token,
        });
        self.drafts.extend(drafts);
    }

    /// Returns the id of the token that follows each token of a step: the next one of its row, the `sampled` one, or
    /// the next one of the prompt. Where none of them is known, it is the token itself.
    pub fn next_ids(&self, step: &Step, ids: &[u32], starts: &[u32], sampled: &[i32]) -> Vec<u32> {
        let mut next = Vec::with_capacity(ids.len());
        for (row, slot) in step.req_slots.iter().enumerate() {
            let (start, last) = (starts[row] as usize, starts[row + 1] as usize - 1);
            next.extend_from_slice(&ids[start + 1..=last]);
            let known = self.slots[*slot as usize].1.get(step.seq_lens[row] as usize);
            let found = [Some(&sampled[row]), known].into_iter().flatten().find(|id| **id >= 0);
            next.push(found.map_or(ids[last], |id| *id as u32));
        }
        next
    }
}

/// Returns the row of each sequence whose token is its last: the first row of a slot, or a row of an accepted draft.
pub fn last_rows(step: &Step, ids: &[u32], starts: &[u32], sampled: &[i32]) -> Vec<usize> {
    let mut rows = BTreeMap::new();
    for row in step
        .sample_rows
        .iter()
        .map(|row| *row as usize)
        .filter(|row| sampled[*row] >= 0)
    {
        let first = starts[row] as usize;
        let last = rows.entry(step.req_slots[row]).or_insert(row);
        let follows = step.positions[first] == step.seq_lens[*last] && ids[first] as i32 == sampled[*last];
        if follows {
            *last = row;
        }
    }
    rows.into_values().collect()
}
