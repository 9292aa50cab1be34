//! Embeddings of prompts: hidden numbers of their tokens, pooled over the steps that compute them.
//!
//! Invariants: what comes out does not depend on how a prompt was cut into steps; a slot that is bound again begins anew.

use crate::sampling::{Binding, Pooling};
use crate::step::Embedding;

/// By request slot.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    slots: Vec<Option<Pool>>,
    count: usize,
}

#[derive(Debug)]
struct Pool {
    req_id: i64,
    kind: Pooling,
    num_prompt: usize,
    sum: Vec<f32>,
}

impl Pools {
    /// No requests yet.
    pub fn new(num_slots: usize) -> Self {
        Self {
            slots: (0..num_slots).map(|_| None).collect(),
            count: 0,
        }
    }

    /// The slot forgets the request before.
    pub fn bind(&mut self, slot: usize, binding: &Binding) {
        let made = binding.params.embedding.map(|kind| Pool {
            req_id: binding.req_id,
            kind,
            num_prompt: binding.num_prompt,
            sum: Vec::new(),
        });
        self.count += usize::from(made.is_some());
        self.count -= usize::from(self.slots[slot].is_some());
        self.slots[slot] = made;
    }

    /// Whether no slot wants any.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether the token at `position` of the slot's request is part of it.
    pub fn wants(&self, slot: usize, position: usize) -> bool {
        self.slots[slot].as_ref().is_some_and(|pool| match pool.kind {
            Pooling::Mean => position < pool.num_prompt,
            Pooling::Last => position + 1 == pool.num_prompt,
        })
    }

    /// The hidden numbers of a token that is wanted; with the last of the prompt comes the embedding.
    pub fn add(&mut self, slot: usize, position: usize, hidden: &[f32]) -> Option<Embedding> {
        let pool = self.slots[slot].as_mut()?;
        pool.sum.resize(hidden.len(), 0.0);
        for (sum, number) in pool.sum.iter_mut().zip(hidden) {
            *sum += number;
        }
        if position + 1 < pool.num_prompt {
            return None;
        }
        let count = match pool.kind {
            Pooling::Mean => pool.num_prompt as f32,
            Pooling::Last => 1.0,
        };
        let numbers = pool.sum.drain(..).map(|sum| sum / count).collect();
        Some(Embedding {
            req_id: pool.req_id,
            numbers,
        })
    }
}
