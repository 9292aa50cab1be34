//! Which pages an engine's rows fill, and behind which it saves states: a request slot's text, and the keys of its
//! pages.
//!
//! Invariants: a page is given away once all its tokens are computed and part of the text: the row that a draft is
//! guessed from counts, those of the draft do not.

use std::sync::Arc;
use std::time::Duration;

use crate::folder::Kind;
use crate::key::{Key, first_key_in, next_key};
use crate::store::{Staged, Store};

const LEAST_PAGES: usize = 4; // of a step that says how fast prompts are computed

#[derive(Default)]
struct Slot {
    tokens: Vec<i32>,
    first: Key, // what stands before its pages
    keys: Vec<Key>,
    has_gap: bool, // its text is not known any more
    staged: Option<Arc<Staged>>,
    state: Option<usize>, // behind so many tokens it began, or a state was saved last
}

/// The slots of an engine, and where its pages go.
pub struct Keeper {
    store: Arc<Store>,
    slots: Vec<Slot>,
}

impl Keeper {
    /// For slots 0 .. `num_slots`.
    #[must_use]
    pub fn new(store: Arc<Store>, num_slots: usize) -> Self {
        let slots = std::iter::repeat_with(Slot::default).take(num_slots).collect();
        Self { store, slots }
    }

    /// A slot's text so far; the space that it shares pages in; what was read of them.
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

    /// Nobody has the slot.
    pub fn free(&mut self, slot: usize) {
        self.slots[slot] = Slot::default();
    }

    /// What is to be loaded as page `column` of the slot's text.
    #[must_use]
    pub fn staged(&self, slot: usize, column: usize) -> Option<&[u8]> {
        self.slots[slot].staged.as_ref()?.page(column)
    }

    /// The state with which the slot begins behind what is loaded.
    #[must_use]
    pub fn staged_state(&self, slot: usize) -> Option<&[u8]> {
        self.slots[slot].staged.as_ref()?.state()
    }

    /// A step has computed so many tokens in such a time.
    pub fn took(&self, tokens: usize, time: Duration) {
        if tokens >= LEAST_PAGES * self.store.page_size() {
            self.store.took(tokens, time);
        }
    }

    /// The first row of a slot in a step has computed `ids` from position `first` on: pages that are full now are given
    /// away. `page` copies that of a column.
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
            slot.staged = None; // nothing of it will be asked for
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
            self.store.give(Kind::Page, slot.keys[column], || page(column));
        }
    }

    /// The step of that `computed` heard has saved the state of a slot behind so many tokens: at the end of a page it is
    /// given away, and supersedes the one from which the slot came there. `state` copies it.
    pub fn saved(&mut self, slot: usize, num_tokens: usize, state: impl FnOnce() -> Vec<u8>) {
        let (slot, size) = (&mut self.slots[slot], self.store.page_size());
        let keys = &slot.keys;
        let key_at = |tokens: usize| {
            let last = (tokens / size).checked_sub(1).filter(|_| tokens.is_multiple_of(size));
            last.and_then(|last| keys.get(last).copied())
        };
        if let Some(key) = key_at(num_tokens).filter(|_| !slot.has_gap) {
            let before = slot.state.filter(|before| *before < num_tokens).and_then(key_at);
            self.store.give_after(before, (Kind::State, key), state);
            slot.state = Some(num_tokens);
        }
    }
}
