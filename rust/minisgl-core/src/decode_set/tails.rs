//! The ends of the sequences and page tables of decoding requests: what was added since they were last brought together
//! with the rest.
//!
//! Keeps true: an end holds at most `LENGTH` entries, as whoever fills it is told to settle it.
//! Doesn't know: where a sequence begins, who holds a slot.
//!
//! Entry t of a slot's sequence stands in plane (t + slot / BLOCK) mod LENGTH, so rows that decode in lockstep write next to
//! each other, and no step settles all of them at once.

use crate::page_pool::Page;

const LENGTH: usize = 16;
const BLOCK: usize = 16; // slots in a cache line

pub(crate) struct Tails {
    num_slots: usize,
    tokens: Vec<i32>, // LENGTH planes of num_slots
    pages: Vec<Page>, // the same
}

impl Tails {
    pub fn new(num_slots: usize) -> Self {
        Self {
            num_slots,
            tokens: vec![0; LENGTH * num_slots],
            pages: vec![0; LENGTH * num_slots],
        }
    }

    /// Token `at` of the sequence. True if it must be settled now.
    pub fn push_token(&mut self, slot: u32, at: u32, token: i32) -> bool {
        let (plane, place) = self.locate(slot, at);
        self.tokens[place] = token;
        plane == LENGTH - 1
    }

    /// The page of `column`. True if it must be settled now.
    pub fn push_page(&mut self, slot: u32, column: u32, page: Page) -> bool {
        let (plane, place) = self.locate(slot, column);
        self.pages[place] = page;
        plane == LENGTH - 1
    }

    /// Complete `tokens` to `len`.
    pub fn settle_tokens(&self, slot: u32, len: u32, tokens: &mut Vec<i32>) {
        let missing = tokens.len() as u32..len;
        tokens.extend(missing.map(|at| self.tokens[self.locate(slot, at).1]));
    }

    /// Complete `pages` to `len` columns.
    pub fn settle_pages(&self, slot: u32, len: u32, pages: &mut Vec<Page>) {
        let missing = pages.len() as u32..len;
        pages.extend(missing.map(|column| self.pages[self.locate(slot, column).1]));
    }

    fn locate(&self, slot: u32, at: u32) -> (usize, usize) {
        let plane = (at as usize + slot as usize / BLOCK) % LENGTH;
        (plane, plane * self.num_slots + slot as usize)
    }
}
