//! Pages that an engine's rows fill, and states that it saves: the sequence and the page keys of each request slot.
//!
//! Invariants: a page is written to the store once all its tokens are computed and part of the sequence: the row that
//! verifies a draft counts, the draft's own tokens do not.

use std::sync::Arc;
use std::time::Duration;

use crate::folder::Kind;
use crate::key::{Key, first_key_in, next_key};
use crate::store::{Staged, Store};

const LEAST_PAGES: usize = 4; // minimum size, in pages, of a step that is timed

#[derive(Default)]
struct Slot {
    tokens: Vec<i32>,
    first: Key, // root key
    keys: Vec<Key>,
    has_gap: bool, // a part of the sequence is unknown
    staged: Option<Arc<Staged>>,
    state: Option<usize>, // tokens before which it began, or after which a state was saved last
}

/// Tracks the sequences of an engine's slots, and writes their full pages and saved states to a store.
pub struct Keeper {
    store: Arc<Store>,
    slots: Vec<Slot>,
}

impl Keeper {
    /// Creates a keeper for slots 0 .. `num_slots`.
    #[must_use]
    pub fn new(store: Arc<Store>, num_slots: usize) -> Self {
        let slots = std::iter::repeat_with(Slot::default).take(num_slots).collect();
        Self { store, slots }
    }

    /// Assigns a slot: its sequence so far, the namespace in which its pages are shared, and its staged pages.
    pub fn bind(&mut self, slot: usize, tokens: &[i32], space: &[u8], staged: Option<Arc<Staged>>) {
        self.slots[slot] = Slot {
            tokens: tokens.to_vec(),
            first: first_key_in(self.store.first_key(), space),
            keys: Vec::new(),
            has_gap: false,
            staged,
            state: None,
        };
    }

    /// Releases `slot` and drops its staged pages.
    pub fn free(&mut self, slot: usize) {
        self.slots[slot] = Slot::default();
    }

    /// Returns the staged KV bytes of page index `column` of the slot's sequence; `None` if that page is not staged.
    #[must_use]
    pub fn staged(&self, slot: usize, column: usize) -> Option<&[u8]> {
        self.slots[slot].staged.as_ref()?.page(column)
    }

    /// Returns the staged state after the slot's last staged page; `None` if there is none.
    #[must_use]
    pub fn staged_state(&self, slot: usize) -> Option<&[u8]> {
        self.slots[slot].staged.as_ref()?.state()
    }

    /// Records that a step took `time` for `tokens` tokens. Short steps are ignored.
    pub fn took(&self, tokens: usize, time: Duration) {
        if tokens >= LEAST_PAGES * self.store.page_size() {
            self.store.record_speed(tokens, time);
        }
    }

    /// Records that the first row of a slot in a step has computed `ids` from position `first` on, and writes the pages
    /// that are now full to the store. `page` copies the KV of a page index.
    pub fn computed(&mut self, slot: usize, first: usize, ids: &[u32], page: impl Fn(usize) -> Vec<u8>) {
        let size = self.store.page_size();
        let slot = &mut self.slots[slot];
        let end = first + ids.len();
        slot.state.get_or_insert(first);
        if slot
            .staged
            .as_ref()
            .is_some_and(|staged| end >= staged.columns().1 * size)
        {
            slot.staged = None; // nothing of it is needed any more
        }
        if slot.has_gap {
            return;
        }
        if slot.tokens.len() < first {
            slot.has_gap = true;
            return;
        }
        for (at, &id) in (first..).zip(ids) {
            let id = i32::try_from(id).unwrap_or(i32::MAX);
            match slot.tokens.get_mut(at) {
                Some(token) => *token = id,
                None => slot.tokens.push(id),
            }
        }
        for column in first / size..end / size {
            while slot.keys.len() <= column {
                let at = slot.keys.len() * size;
                let before = slot.keys.last().unwrap_or(&slot.first);
                slot.keys.push(next_key(before, &slot.tokens[at..at + size]));
            }
            self.store.enqueue(Kind::Page, slot.keys[column], || page(column));
        }
    }

    /// Records that the step of the last `computed` has saved the slot's state after `num_tokens` tokens. At the end of
    /// a page the state is stored, and supersedes the one with which the slot got there. `state` copies it.
    pub fn saved(&mut self, slot: usize, num_tokens: usize, state: impl FnOnce() -> Vec<u8>) {
        let (slot, size) = (&mut self.slots[slot], self.store.page_size());
        let keys = &slot.keys;
        let key_at = |tokens: usize| {
            let last = (tokens / size).checked_sub(1).filter(|_| tokens.is_multiple_of(size));
            last.and_then(|last| keys.get(last).copied())
        };
        if let Some(key) = key_at(num_tokens).filter(|_| !slot.has_gap) {
            let before = slot.state.filter(|before| *before < num_tokens).and_then(key_at);
            self.store.enqueue_after(before, (Kind::State, key), state);
            slot.state = Some(num_tokens);
        }
    }
}
