//! The rows of the decode set, one array a field, so that a step's loops over a field are loops over a plain array.
//!
//! Invariants: all columns have the same length.

use crate::numbers::{LowBits, ToU32, ToUsize};
use crate::page_pool::Page;
use crate::request::Index;

/// A started request. Lengths in tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub req_id: i64,
    pub index: Index,
    pub slot: u32,
    pub kv_len: u32,      // tokens whose KV is computed, or scheduled to be
    pub left: u32,        // tokens that may yet be scheduled to be made
    pub num_pending: u32, // tokens scheduled to be made and not committed
    pub last_page: Page,  // of its page table
    pub last_token: i32,  // the last committed one
    pub last_step: u32,   // the low bits of the last step that holds a row of it
    pub kind: Kind,
}

/// What makes a row other than a plain decode row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Kind {
    pub prefills: bool,
    pub awaits_token: bool,
    pub drafting: bool, // its page table goes on beyond `kv_len`
    pub has_stop_ids: bool,
    pub background: bool,
}

impl Kind {
    /// Whether the row may have to wait though tokens are left to make.
    pub fn is_special(self) -> bool {
        self.prefills || self.awaits_token
    }
}

/// `Row` by columns.
#[derive(Default)]
pub(super) struct Columns {
    pub req_id: Vec<i64>,
    pub index: Vec<Index>,
    pub slot: Vec<u32>,
    pub kv_len: Vec<u32>,
    pub left: Vec<u32>,
    pub num_pending: Vec<u32>,
    pub last_page: Vec<Page>,
    pub last_token: Vec<i32>,
    pub last_step: Vec<u32>,
    pub kind: Vec<Kind>,
}

/// Apply a method of `Vec` to every column, with the same arguments.
macro_rules! each {
    ($columns:expr, $method:ident $arguments:tt) => {
        $columns.req_id.$method $arguments;
        $columns.index.$method $arguments;
        $columns.slot.$method $arguments;
        $columns.kv_len.$method $arguments;
        $columns.left.$method $arguments;
        $columns.num_pending.$method $arguments;
        $columns.last_page.$method $arguments;
        $columns.last_token.$method $arguments;
        $columns.last_step.$method $arguments;
        $columns.kind.$method $arguments;
    };
}

impl Columns {
    pub fn with_capacity(rows: usize) -> Self {
        let mut made = Self::default();
        each!(made, reserve_exact(rows));
        made
    }

    pub fn len(&self) -> usize {
        self.index.len()
    }

    pub fn get(&self, at: usize) -> Row {
        Row {
            req_id: self.req_id[at],
            index: self.index[at],
            slot: self.slot[at],
            kv_len: self.kv_len[at],
            left: self.left[at],
            num_pending: self.num_pending[at],
            last_page: self.last_page[at],
            last_token: self.last_token[at],
            last_step: self.last_step[at],
            kind: self.kind[at],
        }
    }

    pub fn insert(&mut self, at: usize, row: &Row) {
        self.req_id.insert(at, row.req_id);
        self.index.insert(at, row.index);
        self.slot.insert(at, row.slot);
        self.kv_len.insert(at, row.kv_len);
        self.left.insert(at, row.left);
        self.num_pending.insert(at, row.num_pending);
        self.last_page.insert(at, row.last_page);
        self.last_token.insert(at, row.last_token);
        self.last_step.insert(at, row.last_step);
        self.kind.insert(at, row.kind);
    }

    pub fn remove(&mut self, at: usize) {
        each!(self, remove(at));
    }

    pub fn drop_first(&mut self, count: usize) {
        each!(self, drain(..count));
    }

    pub fn clear(&mut self) {
        each!(self, clear());
    }
}

const LENGTH: usize = 16;
const BLOCK: usize = 16; // slots in a cache line
const TILE: usize = LENGTH * BLOCK;

/// The last `LENGTH` entries of sequences, one a slot; an older one must have been flushed. A block of slots has a
/// tile, in which the entries that come together lie in one cache line if the sequences are equally long.
pub(super) struct AppendBuffer<T> {
    tiles: Vec<[T; TILE]>,
    cells: Vec<u32>, // scratch: where each entry of a call goes
}

impl<T: Copy + Default> AppendBuffer<T> {
    pub fn new(num_slots: usize) -> Self {
        Self {
            tiles: vec![[T::default(); TILE]; num_slots.div_ceil(BLOCK)],
            cells: Vec::with_capacity(num_slots),
        }
    }

    /// Append an entry to each of several sequences: the slot, the entry's place in its sequence, the entry.
    pub fn push(&mut self, slots: &[u32], places: impl Iterator<Item = u32>, entries: &[T]) {
        self.cells.clear();
        self.cells
            .extend(slots.iter().zip(places).map(|(&slot, place)| cell(slot, place)));
        let tiles = self.tiles.as_flattened_mut();
        for (&cell, &entry) in self.cells.iter().zip(entries) {
            tiles[cell.to_usize()] = entry;
        }
    }

    /// Append what `sequence`, that of `slot`, lacks of its `len` entries.
    pub fn flush(&self, slot: u32, len: u32, sequence: &mut Vec<T>) {
        let missing = sequence.len().to_u32()..len;
        let tile = &self.tiles[slot.to_usize() / BLOCK];
        sequence.extend(missing.map(|place| tile[cell(slot, place).to_usize() % TILE]));
    }
}

/// Where in the tiles the entry at a place of a slot's sequence is.
fn cell(slot: u32, place: u32) -> u32 {
    let (slots, rows) = (BLOCK.to_u32(), LENGTH.to_u32());
    let block = slot / slots;
    (block * rows + (place + block) % rows) * slots + slot % slots
}

/// Of what slots have, that of those whose sequences are flushed in `step`: each block's once in `LENGTH` steps.
pub(super) fn due<T: Copy>(step: i64, of_slots: &[T]) -> impl Iterator<Item = T> {
    let blocks = of_slots.chunks(BLOCK);
    blocks
        .skip(step.low_u32().to_usize() % LENGTH)
        .step_by(LENGTH)
        .flatten()
        .copied()
}
