//! The rows of the decode set, one array a field, so that a step's loops over a field are loops over a plain array.
//!
//! Invariants: all columns have the same length.

use crate::numbers::{ToU32, ToUsize};
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
