//! Index of the pages that the engines' prefix caches are expected to hold: one index for all engines.
//!
//! A page is identified by a hash of all tokens from the start of the sequence to its end, so a path through the radix
//! tree is a list of hashes, and no token is stored. A hash collision of two prompts costs only a worse placement.
//!
//! Invariants: an engine holds at most its `max_pages`, the most recently used ones, and with a page all pages before
//! it, so fewer engines hold a deeper page of a path. A lookup is O(pages of the path), whatever the number of engines.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use minisgl_gateway::live::IdHasher;

const NONE: u32 = u32::MAX;

/// An engine that holds a page, and the page's slot in that engine's list.
#[derive(Clone, Copy)]
struct Holder {
    engine: u32,
    slot: u32,
}

struct Page {
    hash: u64,
    /// Engines that hold this page, sorted by engine.
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

/// LRU list of the pages that one engine holds. Of pages used together, the deepest is the oldest.
struct PageList {
    slots: Vec<Slot>,
    free: Vec<u32>,
    oldest: u32,
    youngest: u32,
    len: usize,
    max_pages: usize,
}

impl PageList {
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

    fn allocate_slot(&mut self, page: u32) -> u32 {
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

    /// Removes the least recently used page from the list and returns it.
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
    engines: Vec<PageList>,
    /// Pages that the last `find` matched, from the start of the sequence.
    path: Vec<u32>,
}

impl Prefixes {
    pub fn new(num_engines: usize, page_size: usize) -> Self {
        Self {
            page_size,
            pages: Vec::new(),
            free: Vec::new(),
            by_hash: HashMap::default(),
            engines: (0..num_engines).map(|_| PageList::new(0)).collect(),
            path: Vec::new(),
        }
    }

    /// Returns a hash for each full page of `tokens`. No first token can cancel the difference of two namespaces.
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

    /// Looks up the leading pages of `hashes` that any engine holds, as the path that `insert` and `deepest` use.
    pub fn find(&mut self, hashes: &[u64]) {
        self.path.clear();
        let matched = hashes.iter().map_while(|hash| self.by_hash.get(hash).copied());
        self.path.extend(matched);
    }

    /// Returns the largest depth, of at most `max_pages`, at which `suits(engine, depth)` is true for an engine that
    /// holds so many pages of the path, and all engines that hold that depth. Depth 0 if there is none. An engine that
    /// does not suit a depth must not suit a smaller one.
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
            // the same number of holders as one page deeper: the same engines
            num_holders != std::mem::replace(&mut seen, num_holders)
                && holders(path[depth - 1]).any(|engine| suits(engine, depth))
        });
        let last = depth.map(|depth| path[depth - 1]);
        (depth.unwrap_or(0), last.into_iter().flat_map(holders))
    }

    /// Records that `engine` computes a prompt with the page hashes `hashes`, which must be those of the last `find`.
    pub fn insert(&mut self, engine: usize, hashes: &[u64]) {
        let max_pages = self.engines[engine].max_pages;
        let num_pages = hashes.len().min(max_pages);
        let index = engine as u32;
        let mut slots = Vec::new();
        for &page in &self.path[..self.path.len().min(num_pages)] {
            let page = &self.pages[page as usize];
            let Ok(at) = page.find(index) else { break };
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
            if let Err(at) = self.pages[page as usize].find(index) {
                let slot = self.engines[engine].allocate_slot(page);
                self.pages[page as usize]
                    .holders
                    .insert(at, Holder { engine: index, slot });
                self.engines[engine].push(slot);
            }
        }
        for &slot in slots.iter().rev() {
            self.engines[engine].push(slot);
        }
    }

    /// Forgets all pages of `engine` and limits it to `max_pages` from now on.
    pub fn resize(&mut self, engine: usize, max_pages: usize) {
        self.clear(engine);
        self.engines[engine].max_pages = max_pages;
    }

    /// Forgets all pages of `engine`.
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
        if let Ok(at) = page.find(engine as u32) {
            page.holders.remove(at);
        }
        if page.holders.is_empty() {
            self.by_hash.remove(&page.hash);
            self.free.push(at);
        }
    }
}
