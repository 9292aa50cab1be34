//! Rows of the decode set, one array for each field, so that a step's loops over a field are loops over a plain array.
//!
//! Invariants: all columns have the same length.

use crate::numbers::{LowBits, ToU32, ToUsize};
use crate::page_pool::Page;
use crate::request::Index;

/// Flags by which a row differs from a plain decode row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RowFlags {
    pub prefills: bool,
    pub awaits_token: bool,
    pub drafting: bool, // a draft is in flight: the page table extends beyond `kv_len`
    pub has_stop_ids: bool,
    pub background: bool,
}

impl RowFlags {
    /// Returns true if the row may have to wait though it has tokens left to generate.
    pub fn is_special(self) -> bool {
        self.prefills || self.awaits_token
    }
}

/// Defines `Row` and its column form from one list of fields.
macro_rules! columns {
    ($($name:ident: $kind:ty,)*) => {
        /// A started request's row in the decode set. Lengths in tokens.
        #[derive(Clone, Debug, PartialEq)]
        pub(crate) struct Row {
            $(pub $name: $kind,)*
        }

        /// Columns of the decode set: one array for each field of `Row`.
        #[derive(Default)]
        pub(super) struct Columns {
            $(pub $name: Vec<$kind>,)*
        }

        impl Columns {
            pub fn with_capacity(rows: usize) -> Self {
                Self {
                    $($name: Vec::with_capacity(rows),)*
                }
            }

            pub fn get(&self, at: usize) -> Row {
                Row {
                    $($name: self.$name[at],)*
                }
            }

            pub fn insert(&mut self, at: usize, row: &Row) {
                $(self.$name.insert(at, row.$name);)*
            }

            pub fn remove(&mut self, at: usize) {
                $(self.$name.remove(at);)*
            }

            pub fn drop_first(&mut self, count: usize) {
                $(self.$name.drain(..count);)*
            }

            pub fn clear(&mut self) {
                $(self.$name.clear();)*
            }
        }
    };
}

columns! {
    req_id: i64,
    index: Index,
    slot: u32,
    kv_len: u32,      // tokens whose KV is computed or scheduled
    left: u32,        // tokens that may still be scheduled for sampling
    num_pending: u32, // tokens scheduled for sampling and not committed
    last_page: Page,  // last page of the page table
    last_token: i32,  // last committed token
    last_step: u32,   // low bits of the last step with a row of the request
    kind: RowFlags,
}

impl Columns {
    pub fn len(&self) -> usize {
        self.index.len()
    }
}

const LENGTH: usize = 16;
const BLOCK: usize = 16; // slots in a cache line
const TILE: usize = LENGTH * BLOCK;

/// Ring buffer of the last `LENGTH` elements appended to each slot's sequence; older ones must have been flushed. Slots
/// are grouped in tiles, so that elements of one step share a cache line for equally long sequences.
pub(super) struct AppendBuffer<T> {
    tiles: Vec<[T; TILE]>,
    cells: Vec<u32>, // scratch: cell of each element of a call
}

impl<T: Copy + Default> AppendBuffer<T> {
    pub fn new(num_slots: usize) -> Self {
        Self {
            tiles: vec![[T::default(); TILE]; num_slots.div_ceil(BLOCK)],
            cells: Vec::with_capacity(num_slots),
        }
    }

    /// Appends one element to the sequence of each slot in `slots`. `places`: its index in the sequence.
    pub fn push(&mut self, slots: &[u32], places: impl Iterator<Item = u32>, entries: &[T]) {
        self.cells.clear();
        self.cells
            .extend(slots.iter().zip(places).map(|(&slot, place)| cell(slot, place)));
        let tiles = self.tiles.as_flattened_mut();
        for (&cell, &entry) in self.cells.iter().zip(entries) {
            tiles[cell.to_usize()] = entry;
        }
    }

    /// Appends to `sequence`, that of `slot`, the buffered elements that it lacks, up to a length of `len`.
    pub fn flush(&self, slot: u32, len: u32, sequence: &mut Vec<T>) {
        let missing = sequence.len().to_u32()..len;
        let tile = &self.tiles[slot.to_usize() / BLOCK];
        sequence.extend(missing.map(|place| tile[cell(slot, place).to_usize() % TILE]));
    }
}

/// Returns the index in the tiles of element `place` of a slot's sequence.
fn cell(slot: u32, place: u32) -> u32 {
    let (slots, rows) = (BLOCK.to_u32(), LENGTH.to_u32());
    let block = slot / slots;
    (block * rows + (place + block) % rows) * slots + slot % slots
}

/// Returns the elements of `of_slots` for slots that are flushed in `step`: each block once in `LENGTH` steps.
pub(super) fn due<T: Copy>(step: i64, of_slots: &[T]) -> impl Iterator<Item = T> {
    let blocks = of_slots.chunks(BLOCK);
    blocks
        .skip(step.low_u32().to_usize() % LENGTH)
        .step_by(LENGTH)
        .flatten()
        .copied()
}
