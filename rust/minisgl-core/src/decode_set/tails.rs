//! The ends of sequences that grow by one entry a step: what was added since they were last brought together with the
//! rest.
//!
//! Keeps true: an end holds at most `LENGTH` entries, as whoever appends is told whose end must be settled.
//! Doesn't know: where a sequence begins, who holds a slot.
//!
//! Entry t of a slot's sequence stands in plane (t + slot / BLOCK) mod LENGTH: sequences of the same length write next to
//! each other, and no step settles all of them at once.

const LENGTH: usize = 16;
const BLOCK: usize = 16; // slots in a cache line

pub(super) struct Tails<T> {
    num_slots: usize,
    planes: Vec<T>, // LENGTH of num_slots
}

impl<T: Copy + Default> Tails<T> {
    pub fn new(num_slots: usize) -> Self {
        Self {
            num_slots,
            planes: vec![T::default(); LENGTH * num_slots],
        }
    }

    /// Append an entry to each of several sequences: the slot, the entry's place in its sequence, the entry. `due` gets
    /// the numbers of those that must be settled now.
    pub fn push(&mut self, entries: impl Iterator<Item = (u32, u32, T)>, due: &mut Vec<u32>) {
        due.clear();
        let num_slots = self.num_slots;
        let planes = &mut self.planes[..];
        for (number, (slot, at, entry)) in (0..).zip(entries) {
            let plane = plane(slot, at);
            planes[plane * num_slots + slot as usize] = entry;
            if plane == LENGTH - 1 {
                due.push(number);
            }
        }
    }

    /// Complete the sequence of `slot`, which is `len` long.
    pub fn settle(&self, slot: u32, len: u32, sequence: &mut Vec<T>) {
        let missing = sequence.len() as u32..len;
        let planes = &self.planes[..];
        sequence.extend(missing.map(|at| planes[plane(slot, at) * self.num_slots + slot as usize]));
    }
}

fn plane(slot: u32, at: u32) -> usize {
    (at as usize + slot as usize / BLOCK) % LENGTH
}
