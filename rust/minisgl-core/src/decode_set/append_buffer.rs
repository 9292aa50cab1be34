//! A buffer for what steps append to many sequences, one entry each: entries go to the sequences 16 at a time.
//!
//! Invariants: no entry is overwritten before it is flushed, as long as whoever appends flushes those that are `due`.
//!
//! Entry number t of a slot's sequence stands in plane (t + slot / BLOCK) mod LENGTH: sequences of the same length
//! write next to each other, and no step has to flush all of them.

use crate::numbers::{ToU32, ToUsize};

const LENGTH: usize = 16;
const BLOCK: usize = 16; // slots in a cache line

pub(super) struct AppendBuffer<T> {
    num_slots: usize,
    planes: Vec<T>, // LENGTH of num_slots
}

impl<T: Copy + Default> AppendBuffer<T> {
    pub fn new(num_slots: usize) -> Self {
        Self {
            num_slots,
            planes: vec![T::default(); LENGTH * num_slots],
        }
    }

    /// Append an entry to each of several sequences: the slot, the entry's place in its sequence, the entry. `due` gets
    /// the positions in `entries` of those whose sequence must be flushed now.
    pub fn push(&mut self, entries: impl Iterator<Item = (u32, u32, T)>, due: &mut Vec<u32>) {
        due.clear();
        let num_slots = self.num_slots;
        let planes = &mut self.planes[..];
        for (number, (slot, at, entry)) in (0..).zip(entries) {
            let plane = plane(slot, at);
            planes[plane * num_slots + slot.to_usize()] = entry;
            if plane == LENGTH - 1 {
                due.push(number);
            }
        }
    }

    /// Append what `sequence`, that of `slot`, lacks of its `len` entries.
    pub fn flush(&self, slot: u32, len: u32, sequence: &mut Vec<T>) {
        let missing = sequence.len().to_u32()..len;
        let planes = &self.planes[..];
        sequence.extend(missing.map(|at| planes[plane(slot, at) * self.num_slots + slot.to_usize()]));
    }
}

fn plane(slot: u32, at: u32) -> usize {
    (at.to_usize() + slot.to_usize() / BLOCK) % LENGTH
}
