//! Recurrent states of sequences (for layers without KV cache), in blocks of one size.
//!
//! The first blocks belong to request slots, and forward passes advance them. The others are snapshots: copies of a
//! state after some token, from which other sequences can begin. Layers define the content of their part of a block.
//!
//! Memory is reserved at once and used when it is first touched.
//!
//! Invariants: no two rows of a step share a state, and no snapshot is written twice in a step.

#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ops::Range;

use minisgl_kernels::memory::Reserved;

use crate::error::{Error, Result};
use crate::step::Step;

/// Value of `state_begins` for a slot whose state comes from the page store, through `load`.
pub const FROM_STORE: i32 = -2;
/// Elements per cache line.
const LINE: usize = 16;

/// Recurrent states of all slots, and their snapshots.
pub struct States {
    sizes: Vec<usize>,
    offsets: Vec<usize>,
    size: usize,
    slots: usize,
    checkpoints: usize,
    memory: Reserved,
}

/// Snapshot that a step takes: of `row`, after its first `tokens` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Snapshot {
    row: usize,
    tokens: usize,
    checkpoint: usize,
}

/// States during a forward pass, with the snapshots that it takes.
#[derive(Clone, Copy)]
pub struct StepStates<'a> {
    states: &'a States,
    saves: &'a [Snapshot],
}

impl States {
    /// Reserves states for layers with these sizes in elements (0: none). Errors if they do not fit into memory.
    pub fn new(sizes: &[usize], slots: usize, checkpoints: usize) -> Result<Self> {
        let mut offsets = Vec::with_capacity(sizes.len());
        let size = sizes.iter().fold(0, |at, size| {
            offsets.push(at);
            at + size.next_multiple_of(LINE)
        });
        let bytes = (slots.checked_add(checkpoints)).and_then(|count| count.checked_mul(4 * size));
        let memory = bytes
            .filter(|bytes| *bytes > 0)
            .and_then(Reserved::new)
            .ok_or_else(|| {
                Error::setting(format!(
                    "{slots} states and {checkpoints} checkpoints of {} bytes do not fit into memory",
                    4 * size
                ))
            })?;
        Ok(Self {
            sizes: sizes.to_vec(),
            offsets,
            size,
            slots,
            checkpoints,
            memory,
        })
    }

    /// Returns the bytes of one state for layers with these sizes.
    pub fn bytes_for(sizes: &[usize]) -> usize {
        sizes.iter().map(|size| 4 * size.next_multiple_of(LINE)).sum()
    }

    /// Returns new states of the same sizes, all zero.
    pub fn zeroed(&self) -> Result<Self> {
        Self::new(&self.sizes, self.slots, self.checkpoints)
    }

    /// Checks that the state operations of a step are in bounds and that no state or snapshot is used twice.
    pub fn check(&self, step: &Step) -> Result<()> {
        let within = |value: i32, end: usize| value >= 0 && (value as usize) < end;
        let begins = step.state_begins.iter();
        if let Some(one) = begins.clone().find(|[slot, from]| {
            !within(*slot, self.slots) || !([-1, FROM_STORE].contains(from) || within(*from, self.checkpoints))
        }) {
            return Err(Error::step(format!("step: state_begins: {one:?}: out of bounds")));
        }
        if let Some(one) = step.state_saves.iter().find(|[row, tokens, to]| {
            let of_row = usize::try_from(*row).ok().and_then(|row| step.extend_lens.get(row));
            !of_row.is_some_and(|count| (0..=*count).contains(tokens)) || !within(*to, self.checkpoints)
        }) {
            return Err(Error::step(format!("step: state_saves: {one:?}: out of bounds")));
        }
        let distinct = |count: usize, all: BTreeSet<i32>| all.len() == count;
        if !distinct(step.req_slots.len(), step.req_slots.iter().copied().collect())
            || !distinct(
                step.state_saves.len(),
                step.state_saves.iter().map(|one| one[2]).collect(),
            )
        {
            return Err(Error::step(
                "step: req_slots, state_saves: a slot or checkpoint occurs twice",
            ));
        }
        Ok(())
    }

    /// Returns the bytes of one state.
    pub fn bytes(&self) -> usize {
        4 * self.size
    }

    /// Overwrites the state of `slot` with a stored snapshot. Returns false if slot or size is wrong.
    pub fn load(&mut self, slot: usize, state: &[u8]) -> bool {
        let fits = slot < self.slots && state.len() == self.bytes();
        if fits {
            // SAFETY: a whole block within the mapping, and `&mut self` is exclusive.
            unsafe {
                let to = self.block(slot).cast::<u8>();
                to.copy_from_nonoverlapping(state.as_ptr(), state.len());
            }
        }
        fits
    }

    /// Returns a copy of snapshot `index`. No forward pass may run meanwhile.
    pub fn checkpoint(&self, index: usize) -> Vec<u8> {
        // SAFETY: a whole block within the mapping; any bit pattern is valid.
        unsafe { std::slice::from_raw_parts(self.block(self.slots + index).cast::<u8>(), self.bytes()) }.to_vec()
    }

    /// Initializes the states that begin in a checked step, but for loaded ones. Returns the snapshots to take, sorted.
    pub fn begin(&mut self, step: &Step) -> Vec<Snapshot> {
        for [slot, from] in step.state_begins.iter().filter(|[_, from]| *from != FROM_STORE) {
            let to = self.block(*slot as usize);
            // SAFETY: whole blocks within the mapping, and `&mut self` is exclusive.
            unsafe {
                if *from < 0 {
                    to.write_bytes(0, self.size);
                } else {
                    to.copy_from_nonoverlapping(self.block(self.slots + *from as usize), self.size);
                }
            }
        }
        let saves = step.state_saves.iter().map(|one| one.map(|number| number as usize));
        let mut saves: Vec<Snapshot> = saves
            .map(|[row, tokens, checkpoint]| Snapshot {
                row,
                tokens,
                checkpoint,
            })
            .collect();
        saves.sort_unstable();
        saves
    }

    /// Returns access to the states for a forward pass that takes these snapshots.
    pub fn for_step<'a>(&'a self, saves: &'a [Snapshot]) -> StepStates<'a> {
        StepStates { states: self, saves }
    }

    /// Returns the address of a block; snapshots follow the slots.
    fn block(&self, index: usize) -> *mut f32 {
        assert!(index < self.slots + self.checkpoints, "state {index}");
        // SAFETY: within the mapping.
        unsafe { self.memory.as_ptr().cast::<f32>().add(index * self.size) }
    }
}

impl StepStates<'_> {
    /// Passes a row through a layer token by token: `work` gets the layer's part of the row's state, and each token. It
    /// may touch only the ranges `own`, which are copied where a snapshot is due.
    ///
    /// # Safety
    /// No other thread may touch these ranges of the row's state meanwhile.
    pub unsafe fn advance(
        &self,
        layer: usize,
        row_and_slot: (usize, usize),
        tokens: Range<usize>,
        own: &[Range<usize>],
        mut work: impl FnMut(*mut f32, usize),
    ) {
        let each = |state, tokens: Range<usize>| tokens.for_each(|token| work(state, token));
        // SAFETY: guaranteed by the caller.
        unsafe { self.advance_runs(layer, row_and_slot, tokens, own, each) };
    }

    /// Passes a row through a layer like `advance`, but calls `work` with runs of tokens, split only at snapshots.
    ///
    /// # Safety
    /// No other thread may touch the ranges `own` of the row's state meanwhile.
    pub unsafe fn advance_runs(
        &self,
        layer: usize,
        (row, slot): (usize, usize),
        tokens: Range<usize>,
        own: &[Range<usize>],
        mut work: impl FnMut(*mut f32, Range<usize>),
    ) {
        let states = self.states;
        let begin = self.saves.partition_point(|save| save.row < row);
        let saves = self.saves[begin..].iter().take_while(|save| save.row == row);
        assert!(own.iter().all(|part| part.end <= states.sizes[layer]), "a state's part");
        let at = states.offsets[layer];
        // SAFETY: the layer's part lies within a block; the caller guarantees the rest.
        unsafe {
            let state = states.block(slot).add(at);
            let mut done = tokens.start;
            let mut until = |end: usize| {
                if done < end {
                    work(state, done..end);
                }
                done = end;
            };
            for save in saves {
                until(tokens.start + save.tokens);
                let to = states.block(states.slots + save.checkpoint).add(at);
                for part in own {
                    let from = state.add(part.start);
                    to.add(part.start).copy_from_nonoverlapping(from, part.len());
                }
            }
            until(tokens.end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [usize; 3] = [3, 0, 20];

    fn advance(states: &mut States, step: &Step, add: f32) {
        states.check(step).unwrap();
        let saves = states.begin(step);
        let for_step = states.for_step(&saves);
        let mut first = 0;
        for (row, (slot, count)) in step.req_slots.iter().zip(&step.extend_lens).enumerate() {
            for (layer, size) in SIZES.into_iter().enumerate().filter(|(_, size)| *size > 0) {
                let (tokens, whole) = (first..first + *count as usize, 0..size);
                let own = std::slice::from_ref(&whole);
                // SAFETY: one thread.
                unsafe {
                    for_step.advance(layer, (row, *slot as usize), tokens, own, |state, token| {
                        for i in 0..size {
                            *state.add(i) = *state.add(i) * 3.0 + token as f32 + add + i as f32;
                        }
                    });
                }
            }
            first += *count as usize;
        }
    }

    fn of(states: &States, index: usize) -> Vec<f32> {
        let at = states.block(index);
        // SAFETY: a block.
        unsafe { std::slice::from_raw_parts(at, states.size) }.to_vec()
    }

    fn step(slots: &[i32], counts: &[i32], begins: &[[i32; 2]], saves: &[[i32; 3]]) -> Step {
        Step {
            req_slots: slots.to_vec(),
            extend_lens: counts.to_vec(),
            state_begins: begins.to_vec(),
            state_saves: saves.to_vec(),
            ..Step::default()
        }
    }

    #[test]
    fn state_continues_from_its_snapshot() {
        let mut states = States::new(&SIZES, 3, 2).unwrap();
        assert_eq!(states.size * 4, States::bytes_for(&SIZES));
        advance(&mut states, &step(&[1], &[4], &[[1, -1]], &[[0, 2, 1], [0, 4, 0]]), 0.0);
        assert_eq!(of(&states, 1), of(&states, 3), "the last was saved to checkpoint 0");
        let (whole, half) = (of(&states, 1), of(&states, 4));
        assert_ne!(whole, half);
        // continues after two tokens in another slot, while slot 0 begins with a zero state
        advance(&mut states, &step(&[0, 2], &[2, 2], &[[0, -1], [2, 1]], &[]), 0.0);
        assert_eq!(of(&states, 2), whole);
        assert_eq!(of(&states, 0), half);
        assert_eq!(of(&states.zeroed().unwrap(), 2), vec![0.0; states.size]);
    }

    #[test]
    fn stored_snapshot_is_loaded_and_saved_unchanged() {
        let mut states = States::new(&SIZES, 3, 2).unwrap();
        advance(&mut states, &step(&[1], &[4], &[[1, -1]], &[[0, 2, 1]]), 0.0);
        let (whole, given) = (of(&states, 1), states.checkpoint(1));
        let mut other = States::new(&SIZES, 3, 2).unwrap();
        assert!(!other.load(3, &given) && !other.load(0, &given[1..]), "of another size");
        assert!(other.load(2, &given));
        // continues after two tokens; the rest are again tokens 2 and 3 of the step
        advance(&mut other, &step(&[0, 2], &[2, 2], &[[2, -2]], &[[1, 0, 0]]), 0.0);
        assert_eq!(of(&other, 2), whole);
        assert_eq!(other.checkpoint(0), given, "as the row began");
    }

    #[test]
    fn check_rejects_indices_out_of_bounds() {
        let states = States::new(&SIZES, 3, 2).unwrap();
        for (begins, saves) in [
            (vec![[3, -1]], vec![]),
            (vec![[0, 2]], vec![]),
            (vec![[0, -3]], vec![]),
            (vec![], vec![[1, 1, 0]]),
            (vec![], vec![[0, -1, 0]]),
            (vec![], vec![[0, 5, 0]]),
            (vec![], vec![[0, 1, 2]]),
            (vec![], vec![[0, 1, 1], [0, 2, 1]]),
        ] {
            let error = states.check(&step(&[0], &[4], &begins, &saves)).unwrap_err();
            assert!(error.to_string().contains("step: "), "{error}");
        }
        assert!(
            states.check(&step(&[0, 0], &[1, 1], &[], &[])).is_err(),
            "one state for two rows"
        );
        assert!(States::new(&[0], 3, 2).is_err());
        assert!(States::new(&[usize::MAX / 8], 3, 2).is_err());
    }
}
