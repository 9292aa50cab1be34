//! LoRA adapters that a running engine has loaded, and the runs of tokens in a step that use them.
//!
//! Invariants: a run covers adjacent tokens with the same adapter, and never mixes decode rows with prefill rows.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::model::{Adapter, RUN, Run};
use crate::sampling::Binding;
use crate::step::Step;

/// Registry of the loaded LoRA adapters by id, and of the adapter id that each slot uses (0: no adapter).
pub struct Adapters {
    by_id: BTreeMap<u32, Adapter>,
    by_slot: Vec<u32>,
}

impl Adapters {
    /// Creates a registry without adapters for `num_slots` slots.
    pub fn new(num_slots: usize) -> Self {
        Self {
            by_id: BTreeMap::new(),
            by_slot: vec![0; num_slots],
        }
    }

    /// Registers `adapter` under `id`, replacing an old one. Later steps may use it.
    pub fn add(&mut self, id: u32, adapter: Adapter) {
        self.by_id.insert(id, adapter);
    }

    /// Drops the adapter `id`. A later step whose slot still uses it fails.
    pub fn remove(&mut self, id: u32) {
        self.by_id.remove(&id);
    }

    /// Sets the adapter of `slot` to that of the request that now owns the slot.
    pub fn bind(&mut self, slot: usize, binding: &Binding) {
        self.by_slot[slot] = binding.adapter;
    }

    /// Returns the runs of adjacent tokens that share an adapter, at most `RUN` tokens each. Row `i` of the step has
    /// the tokens `starts[i]..starts[i + 1]`. Errors if a slot's adapter is not loaded.
    pub fn runs(&self, step: &Step, starts: &[u32]) -> Result<Vec<Run<'_>>> {
        let mut runs: Vec<(u32, Run<'_>)> = Vec::new();
        if self.by_id.is_empty() && self.by_slot.iter().all(|id| *id == 0) {
            return Ok(Vec::new());
        }
        for (row, slot) in step.req_slots.iter().enumerate() {
            let id = self.by_slot[*slot as usize];
            if id == 0 {
                continue;
            }
            let Some(adapter) = self.by_id.get(&id) else {
                return Err(Error::step(format!("adapter {id} is not loaded")));
            };
            let (mut start, end) = (starts[row] as usize, starts[row + 1] as usize);
            let starts_prefill = row == step.num_decode_rows;
            if let Some((run_id, last)) = runs.last_mut()
                && !starts_prefill
                && (*run_id, last.tokens.end) == (id, start)
            {
                let more = (end - start).min(RUN - last.tokens.len());
                last.tokens.end += more;
                start += more;
            }
            for from in (start..end).step_by(RUN) {
                let tokens = from..end.min(from + RUN);
                runs.push((id, Run { adapter, tokens }));
            }
        }
        Ok(runs.into_iter().map(|(_, run)| run).collect())
    }
}
