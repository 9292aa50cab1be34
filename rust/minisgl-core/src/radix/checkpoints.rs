//! State checkpoints: slots for the recurrent state after the tokens from the root of the radix tree to a node's end.
//!
//! Invariants: a slot is free, a node's, or the tail of one started request; a checkpoint saved in a step can be
//! matched from the next step on, and its slot is not reused before.
//!
//! Eviction follows GreedyDual-Size (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", 1997). At its save and
//! each use, a checkpoint is worth the tokens since the checkpoint above it, plus the worth of the checkpoint evicted
//! last. The one of least worth is evicted next; ties go to the one used first.

use std::collections::BTreeSet;

use super::nodes::{NO_NODE, NodeId, Slot};
use crate::numbers::{ToU32, ToUsize};

/// Slots for state checkpoints: the free ones as a stack (the lowest on top at start), and the eviction order.
pub(crate) struct Checkpoints {
    pub(super) free: Vec<Slot>,
    pub(super) nodes: Vec<NodeId>,                // node, by slot
    pub(super) order: BTreeSet<(u64, u64, Slot)>, // evictable slots: (worth, use count for ties, slot)
    pub(super) worth: Vec<Option<(u64, u64)>>,    // (worth, use count) of evictable slots, by slot
    pub(super) held: Vec<u32>,                    // number of pins that hold it, by slot
    pub(super) new: Vec<Slot>,                    // saved in this step
    pub(super) floor: u64,                        // worth of the checkpoint evicted last
    pub(super) uses: u64,
}

impl Checkpoints {
    pub fn new(num_slots: usize) -> Self {
        let mut checkpoints = Self {
            free: Vec::with_capacity(num_slots),
            nodes: vec![NO_NODE; num_slots],
            order: BTreeSet::new(),
            worth: vec![None; num_slots],
            held: vec![0; num_slots],
            new: Vec::with_capacity(num_slots),
            floor: 0,
            uses: 0,
        };
        checkpoints.reset();
        checkpoints
    }

    /// Frees all slots and stacks them as at start.
    pub fn reset(&mut self) {
        self.free.clear();
        self.free.extend((0..self.nodes.len().to_u32()).rev());
        self.nodes.fill(NO_NODE);
        self.order.clear();
        self.worth.fill(None);
        self.held.fill(0);
        self.new.clear();
    }

    pub fn num_slots(&self) -> usize {
        self.nodes.len()
    }

    pub fn num_used(&self) -> usize {
        self.nodes.len() - self.free.len()
    }

    pub fn free_slots(&self) -> &[Slot] {
        &self.free
    }

    /// Returns the slots that nodes have, each with its node.
    pub fn of_nodes(&self) -> impl Iterator<Item = (Slot, NodeId)> + '_ {
        let nodes = self.nodes.iter().zip(0..).map(|(&node, slot)| (slot, node));
        nodes.filter(|&(_, node)| node != NO_NODE)
    }

    /// Returns whether `slot` is evictable, and how many pins hold it. For invariant checks.
    pub fn listing(&self, slot: Slot) -> (bool, u32) {
        (self.worth[slot.to_usize()].is_some(), self.held[slot.to_usize()])
    }

    pub fn push(&mut self, slot: Slot) {
        self.free.push(slot);
    }

    /// Removes `slot` from the eviction order.
    pub(super) fn unlist(&mut self, slot: Slot) {
        if let Some((worth, uses)) = self.worth[slot.to_usize()].take() {
            self.order.remove(&(worth, uses, slot));
        }
    }
}
