//! What the engines' prefix caches are thought to hold: one index of pages for all engines.
//!
//! A page is known by a hash of all tokens from the start of the sequence to its end, so a path through the radix tree
//! is a row of hashes, and no token is kept. Two prompts that collide cost a placement that is worse than thought.
//!
//! Invariants: an engine holds at most its `max_pages`, those used last; with a page it holds all pages before it, so of a
//! path the engines that hold it get fewer with its depth. Finding a path is O(its pages), whatever the number of
//! engines.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use minisgl_gateway::live::IdHasher;

const NONE: u32 = u32::MAX;

/// An engine that holds a page, and the page's place in that engine's list.
#[derive(Clone, Copy)]
struct Holder {
    engine: u32,
    slot: u32,
}

struct Page {
    hash: u64,
    /// By engine.
    holders: Vec<Holder>,
}

impl Page {
    fn find(&self, engine: u32) -> Result<usize, usize> {
        self.holders.binary_search_by_key(&engine, |holder| holder.engine)
    }
}

#[derive(Clone, Copy)]
struct Slot {
    page: u32,
    older: u32,
    younger: u32,
}

/// The pages of one engine by age. Of those used at once the deepest counts as the oldest.
struct Held {
    slots: Vec<Slot>,
    free: Vec<u32>,
    oldest: u32,
    youngest: u32,
    len: usize,
    max_pages: usize,
}

impl Held {
    fn new(max_pages: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            oldest: NONE,
            youngest: NONE,
            len: 0,
            max_pages,
        }
    }

    fn take_slot(&mut self, page: u32) -> u32 {
        let slot = Slot {
            page,
            older: NONE,
            younger: NONE,
        };
        match self.free.pop() {
            Some(at) => {
                self.slots[at as usize] = slot;
                at
            }
            None => {
                self.slots.push(slot);
                (self.slots.len() - 1) as u32
            }
        }
    }

    fn push(&mut self, at: u32) {
        let older = std::mem::replace(&mut self.youngest, at);
        self.slots[at as usize].older = older;
        self.slots[at as usize].younger = NONE;
        match older {
            NONE => self.oldest = at,
            older => self.slots[older as usize].younger = at,
        }
        self.len += 1;
    }

    fn unlink(&mut self, at: u32) {
        let Slot { older, younger, .. } = self.slots[at as usize];
        match older {
            NONE => self.oldest = younger,
            older => self.slots[older as usize].younger = younger,
        }
        match younger {
            NONE => self.youngest = older,
            younger => self.slots[younger as usize].older = older,
        }
        self.len -= 1;
    }

    /// The page that goes first, out of the list.
    fn pop_oldest(&mut self) -> Option<u32> {
        let at = self.oldest;
        if at == NONE {
            return None;
        }
        self.unlink(at);
        self.free.push(at);
        Some(self.slots[at as usize].page)
    }
}

pub(super) struct Prefixes {
    page_size: usize,
    pages: Vec<Page>,
    free: Vec<u32>,
    by_hash: HashMap<u64, u32, BuildHasherDefault<IdHasher>>,
    engines: Vec<Held>,
    /// What `find` found last: known pages from the start on.
    path: Vec<u32>,
}

impl Prefixes {
    pub fn new(num_engines: usize, page_size: usize) -> Self {
        Self {
            page_size,
            pages: Vec::new(),
            free: Vec::new(),
            by_hash: HashMap::default(),
            engines: (0..num_engines).map(|_| Held::new(0)).collect(),
            path: Vec::new(),
        }
    }

    /// One for each full page of `tokens`. A namespace is spread over all bits: no first token of another undoes it.
    pub fn hashes(&self, tokens: &[i32], namespace: u32) -> Vec<u64> {
        let mut chain = u64::from(namespace).wrapping_mul(0xA076_1D64_78BD_642F);
        let next = |page: &[i32]| {
            chain = page.iter().fold(chain, |hash: u64, &token| {
                let mixed = (hash ^ u64::from(token.cast_unsigned())).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                mixed ^ (mixed >> 29)
            });
            chain = (chain ^ (chain >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
            chain ^= chain >> 32;
            chain
        };
        tokens.chunks_exact(self.page_size).map(next).collect()
    }

    /// Look up as many pages as somebody holds: `insert` and `deepest` speak of them.
    pub fn find(&mut self, hashes: &[u64]) {
        self.path.clear();
        let known = hashes.iter().map_while(|hash| self.by_hash.get(hash).copied());
        self.path.extend(known);
    }

    /// It tells how many of the first `max_pages` pages an engine holds that suits this depth, and all that hold so many.
    /// Who does not suit a depth suits no smaller one.
    pub fn deepest(
        &self,
        max_pages: usize,
        suits: impl Fn(usize, usize) -> bool,
    ) -> (usize, impl Iterator<Item = usize> + '_) {
        let path = &self.path[..self.path.len().min(max_pages)];
        let holders = |page: u32| {
            self.pages[page as usize]
                .holders
                .iter()
                .map(|holder| holder.engine as usize)
        };
        let mut seen = 0;
        let depth = (1..=path.len()).rev().find(|&depth| {
            let num_holders = self.pages[path[depth - 1] as usize].holders.len();
            // as many as one page deeper: the same
            num_holders != std::mem::replace(&mut seen, num_holders)
                && holders(path[depth - 1]).any(|engine| suits(engine, depth))
        });
        let last = depth.map(|depth| path[depth - 1]);
        (depth.unwrap_or(0), last.into_iter().flat_map(holders))
    }

    /// `engine` computes the prompt with these hashes, that `find` was asked for last.
    pub fn insert(&mut self, engine: usize, hashes: &[u64]) {
        let max_pages = self.engines[engine].max_pages;
        let num_pages = hashes.len().min(max_pages);
        let number = engine as u32;
        let mut slots = Vec::new();
        for &page in &self.path[..self.path.len().min(num_pages)] {
            let page = &self.pages[page as usize];
            let Ok(at) = page.find(number) else { break };
            slots.push(page.holders[at].slot);
        }
        for &slot in &slots {
            self.engines[engine].unlink(slot);
        }
        while self.engines[engine].len + num_pages > max_pages {
            self.drop_oldest(engine);
        }
        for at in (slots.len()..num_pages).rev() {
            let page = match self.path.get(at) {
                Some(&page) => page,
                None => self.page_of(hashes[at]),
            };
            if let Err(place) = self.pages[page as usize].find(number) {
                let slot = self.engines[engine].take_slot(page);
                self.pages[page as usize]
                    .holders
                    .insert(place, Holder { engine: number, slot });
                self.engines[engine].push(slot);
            }
        }
        for &slot in slots.iter().rev() {
            self.engines[engine].push(slot);
        }
    }

    /// `engine` holds nothing any more; from now on at most `max_pages`.
    pub fn resize(&mut self, engine: usize, max_pages: usize) {
        self.clear(engine);
        self.engines[engine].max_pages = max_pages;
    }

    /// `engine` holds nothing any more.
    pub fn clear(&mut self, engine: usize) {
        while self.engines[engine].len > 0 {
            self.drop_oldest(engine);
        }
    }

    fn page_of(&mut self, hash: u64) -> u32 {
        let (pages, free) = (&mut self.pages, &mut self.free);
        *self.by_hash.entry(hash).or_insert_with(|| {
            if let Some(page) = free.pop() {
                pages[page as usize].hash = hash;
                return page;
            }
            pages.push(Page {
                hash,
                holders: Vec::with_capacity(1),
            });
            (pages.len() - 1) as u32
        })
    }

    fn drop_oldest(&mut self, engine: usize) {
        let Some(at) = self.engines[engine].pop_oldest() else {
            return;
        };
        let page = &mut self.pages[at as usize];
        if let Ok(place) = page.find(engine as u32) {
            page.holders.remove(place);
        }
        if page.holders.is_empty() {
            self.by_hash.remove(&page.hash);
            self.free.push(at);
        }
    }
}
