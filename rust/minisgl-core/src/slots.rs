//! Request slots: rows of the engine's request table, which holds sampling parameters and page tables.
//!
//! Invariants: a slot is free, in use by one started request, or *draining*: its request has left, but a step in flight
//! still has a row of it. The plan of the next step names each freed slot once.

use crate::api::{Result, broken};
use crate::numbers::{ToU32, ToUsize};

pub(crate) struct SlotTable {
    num_slots: usize,
    free: Vec<u32>,
    in_use: Vec<bool>,
    draining: Vec<(i64, u32)>, // (last step with a row of the slot, slot), in order of release
    pub freed: Vec<u32>,
}

impl SlotTable {
    /// Creates slots 0 .. num_slots - 1, all free. The free ones are a stack, at start with the lowest on top.
    pub fn new(num_slots: usize) -> Self {
        Self {
            num_slots,
            free: (0..num_slots.to_u32()).rev().collect(),
            in_use: vec![false; num_slots],
            draining: Vec::with_capacity(num_slots),
            freed: Vec::with_capacity(num_slots),
        }
    }

    pub fn num_slots(&self) -> usize {
        self.num_slots
    }

    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    pub fn num_draining(&self) -> usize {
        self.draining.len()
    }

    pub fn assign(&mut self) -> Result<u32> {
        match self.free.pop() {
            Some(slot) => {
                self.in_use[slot.to_usize()] = true;
                Ok(slot)
            }
            None => broken("a slot was assigned, but none is free"),
        }
    }

    /// Frees `slot` at once, or at the commit of step `last_step` if given. `Error::Broken` if it is not in use.
    pub fn free(&mut self, slot: u32, last_step: Option<i64>) -> Result<()> {
        if !self.in_use.get(slot.to_usize()).is_some_and(|&used| used) {
            return broken(format!("slot {slot} was freed, but is not in use"));
        }
        self.in_use[slot.to_usize()] = false;
        match last_step {
            None => self.put_back(slot),
            Some(step) => self.draining.push((step, slot)),
        }
        Ok(())
    }

    /// Frees the draining slots whose last step is `step`, in the order of their release. Call at the commit of `step`.
    pub fn drain(&mut self, step: i64) {
        let mut at = 0;
        while at < self.draining.len() {
            if self.draining[at].0 == step {
                let (_, slot) = self.draining.remove(at);
                self.put_back(slot);
            } else {
                at += 1;
            }
        }
    }

    /// Frees all slots after a failed forward pass, restacked as at start. Those not free are appended to `freed`,
    /// ascending.
    pub fn reset(&mut self) {
        let mut is_free = vec![false; self.num_slots];
        for &slot in &self.free {
            is_free[slot.to_usize()] = true;
        }
        let assigned = (0..self.num_slots.to_u32()).filter(|&slot| !is_free[slot.to_usize()]);
        self.freed.extend(assigned);
        self.free.clear();
        self.free.extend((0..self.num_slots.to_u32()).rev());
        self.in_use.fill(false);
        self.draining.clear();
    }

    /// Returns the free slots, the slots in use (ascending) and the draining slots. For invariant checks.
    pub fn owners(&self) -> (&[u32], Vec<u32>, Vec<u32>) {
        let in_use = (0..self.num_slots.to_u32()).filter(|&slot| self.in_use[slot.to_usize()]);
        let draining = self.draining.iter().map(|&(_, slot)| slot);
        (&self.free, in_use.collect(), draining.collect())
    }

    fn put_back(&mut self, slot: u32) {
        self.free.push(slot);
        self.freed.push(slot);
    }
}
