//! How much of a prompt a step takes in, and whether a waiting request may start.
//!
//! Sizing changes nothing, so what fails leaves no trace; integers only, so that two implementations agree.
//!
//! A request holds on admission only the pages of its first chunk. Whether it may start is decided by an estimate: its
//! own prompt and a share (the ratio) of the output it may still make, and the same for everyone started, must fit into
//! what is free or evictable. The ratio falls while that goes well and jumps after a retraction.

use crate::api::Result;
use crate::decode_set::Row;
use crate::numbers::{ToU32, ToUsize};
use crate::page_pool::PageSize;
use crate::radix::{Match, ROOT, RadixTree};
use crate::request::{Index, Requests};

const MAX_OUTPUT_ESTIMATE: u32 = 4096;
const RATIO_BITS: u32 = 10;
const RATIO_START: usize = 716;
pub(crate) const RATIO_MIN: usize = 102;
pub(crate) const RATIO_MAX: usize = 1024;
const RATIO_UP: usize = 256;
const RATIO_DOWN: usize = 1;

/// What a prefill row could get now: `found`, then `num_tokens` computed, for which it takes `num_new_pages`. With 0
/// tokens it gets nothing; `lacks_pages` says whether with more pages it would get more.
pub(crate) struct Chunk {
    pub found: Match,
    pub num_tokens: usize,
    pub num_new_pages: usize,
    pub lacks_pages: bool,
}

impl Chunk {
    pub fn num_page_changes(&self) -> usize {
        self.found.pages.len() + self.num_new_pages
    }
}

/// Size the next chunk of a synchronized request that prefills, or of a waiting one. Changes nothing.
///
/// First the match goes on from the request's own node, but leaves at least one token to compute. Then min(`budget`,
/// what is left) tokens, cut to a page border unless that reaches the end, shrunk to the pages that are free or
/// evictable (those matched are about to be protected). Nothing, if the page-table entries exceed `max_page_changes`.
pub(crate) fn size_chunk(
    requests: &Requests,
    index: Index,
    tree: &RadixTree,
    budget: i64,
    max_page_changes: usize,
) -> Chunk {
    let size = tree.page_size();
    let (request, cold) = (requests.get(index), requests.cold(index));
    let length = match cold.handle {
        Some(_) => request.prefill_len.to_usize(),
        None => request.len.to_usize(),
    };
    let num_pages = requests.pages(index).len();
    let max_match = if request.uses_cache { (length - 1) / size } else { 0 };
    let found = tree.find(
        cold.handle.unwrap_or(ROOT),
        cold.namespace,
        requests.tokens(index),
        num_pages,
        max_match,
    );
    let remaining = length - (num_pages + found.pages.len()) * size;
    let available = tree.num_available() - found.num_unlocked;
    let mut num_tokens = usize::try_from(budget).unwrap_or(0).min(remaining);
    if num_tokens < remaining {
        num_tokens -= num_tokens % size;
    }
    let mut num_new_pages = num_tokens.div_ceil(size);
    let lacks_pages = num_new_pages > available;
    if lacks_pages {
        (num_new_pages, num_tokens) = (available, available * size);
    }
    let mut chunk = Chunk {
        found,
        num_tokens,
        num_new_pages,
        lacks_pages,
    };
    if chunk.num_page_changes() > max_page_changes {
        (chunk.num_tokens, chunk.num_new_pages, chunk.lacks_pages) = (0, 0, false);
    }
    chunk
}

/// Lock what was matched, take the pages, and let the full ones enter the tree, locked by the request.
///
/// They enter before they are computed. That is sound because forwards run in order and a forward stores the KV of all
/// its rows, layer by layer, before any row attends. A page that the tree has already (a full hit stopped before it)
/// stays with the request, as does a partial one.
pub(crate) fn apply_chunk(requests: &mut Requests, index: Index, chunk: &Chunk, tree: &mut RadixTree) -> Result<()> {
    let size = tree.page_size();
    let uses_cache = requests.get(index).uses_cache;
    let (sequence, cold) = requests.parts_mut(index);
    let mut handle = cold.handle.unwrap_or(ROOT);
    if uses_cache {
        handle = tree.descend(handle, &chunk.found)?;
    }
    sequence.pages.extend_from_slice(&chunk.found.pages);
    let first = sequence.pages.len();
    tree.take(chunk.num_new_pages, &mut sequence.pages)?;
    if uses_cache {
        cold.num_tree_pages = first;
        let full = chunk.num_tokens / size;
        if full > 0 && !tree.has_page(handle, cold.namespace, &sequence.tokens, first) {
            let tokens = &sequence.tokens[first * size..(first + full) * size];
            handle = tree.append(handle, cold.namespace, tokens, &sequence.pages[first..first + full])?;
            cold.num_tree_pages = first + full;
        }
    }
    cold.handle = Some(handle);
    requests.get_mut(index).kv_len = (first * size + chunk.num_tokens).to_u32();
    Ok(())
}

/// Which share of the output they may still make requests are expected to make, in 1/1024.
pub(crate) struct ReserveRatio {
    pub value: usize,
}

impl ReserveRatio {
    pub fn new() -> Self {
        Self { value: RATIO_START }
    }

    /// Once at the end of every step's pass, one without rows too.
    pub fn after_step(&mut self, num_retracted: usize) {
        self.value = if num_retracted > 0 {
            (self.value + RATIO_UP).min(RATIO_MAX)
        } else {
            self.value.saturating_sub(RATIO_DOWN).max(RATIO_MIN)
        };
    }

    /// Pages set aside for the output of `num_unscheduled` tokens at most, rounded up.
    pub fn reserve_pages(&self, num_unscheduled: u32, page_size: PageSize) -> usize {
        let most = num_unscheduled.min(MAX_OUTPUT_ESTIMATE);
        let output = (most * self.value.to_u32()) >> RATIO_BITS;
        page_size.count(output).to_usize()
    }
}

/// Estimated pages that a started request will yet take: the rest of its prompt and its reserve.
pub(crate) fn needed_pages(requests: &Requests, row: &Row, ratio: &ReserveRatio, page_size: PageSize) -> usize {
    let reserve = ratio.reserve_pages(row.left, page_size);
    if !row.kind.prefills {
        return reserve; // its prompt has its pages
    }
    let prompt_pages = page_size.count(requests.get(row.index).prefill_len).to_usize();
    prompt_pages - requests.pages(row.index).len() + reserve
}
