//! Adapters that a running engine has, and whose rows want which.
//!
//! Invariants: a run is of tokens side by side with the same adapter, of rows that decode or of others.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::model::{Adapter, RUN, Run};
use crate::sampling::Binding;
use crate::step::Step;

/// By number, and by slot.
pub struct Adapters {
    by_number: BTreeMap<u32, Adapter>,
    by_slot: Vec<u32>,
}

impl Adapters {
    /// None at first.
    pub fn new(num_slots: usize) -> Self {
        Self {
            by_number: BTreeMap::new(),
            by_slot: vec![0; num_slots],
        }
    }

    /// For steps from now on.
    pub fn add(&mut self, number: u32, adapter: Adapter) {
        self.by_number.insert(number, adapter);
    }

    /// No step from now on names it.
    pub fn remove(&mut self, number: u32) {
        self.by_number.remove(&number);
    }

    /// A slot is of another request.
    pub fn bind(&mut self, slot: usize, binding: &Binding) {
        self.by_slot[slot] = binding.adapter;
    }

    /// The runs of tokens with an adapter in a step whose rows begin at the tokens `starts`.
    pub fn runs(&self, step: &Step, starts: &[u32]) -> Result<Vec<Run<'_>>> {
        let mut found: Vec<(u32, Run<'_>)> = Vec::new();
        if self.by_number.is_empty() && self.by_slot.iter().all(|number| *number == 0) {
            return Ok(Vec::new());
        }
        for (row, slot) in step.req_slots.iter().enumerate() {
            let number = self.by_slot[*slot as usize];
            if number == 0 {
                continue;
            }
            let Some(adapter) = self.by_number.get(&number) else {
                return Err(Error::step(format!("adapter {number} is not there")));
            };
            let (mut start, end) = (starts[row] as usize, starts[row + 1] as usize);
            let begins = row == step.num_decode_rows;
            if let Some((of, last)) = found.last_mut()
                && !begins
                && (*of, last.tokens.end) == (number, start)
            {
                let more = (end - start).min(RUN - last.tokens.len());
                last.tokens.end += more;
                start += more;
            }
            for from in (start..end).step_by(RUN) {
                let tokens = from..end.min(from + RUN);
                found.push((number, Run { adapter, tokens }));
            }
        }
        Ok(found.into_iter().map(|(_, run)| run).collect())
    }
}
