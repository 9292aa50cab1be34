//! Chunked prefill and admission: prompt tokens of a row in a step, and whether a waiting request may start.
//!
//! Sizing has no side effects, so a failed admission leaves no trace; integers only, so that two implementations agree.
//!
//! At admission a request allocates only the pages of its first chunk. An estimate decides whether it may start: its
//! own prompt and a share (the reserve ratio) of its possible output, and the same for all started requests, must fit
//! into the free and evictable pages. The ratio falls while there are no retractions and jumps after one.

use std::collections::BTreeSet;

use crate::api::{Result, argument};
use crate::decode_set::Row;
use crate::numbers::{MAX_U32, ToI64, ToU32, ToUsize};
use crate::page_pool::PageSize;
use crate::radix::{Match, NodeId, ROOT, RadixTree, Slot};
use crate::request::{Index, Request, Requests};

const MAX_OUTPUT_ESTIMATE: u32 = 4096;
const RATIO_BITS: u32 = 10;
const RATIO_START: usize = 716;
pub(crate) const RATIO_MIN: usize = 102;
pub(crate) const RATIO_MAX: usize = 1024;
const RATIO_UP: usize = 256;
const RATIO_DOWN: usize = 1;
const LOADED_TOKENS: usize = 256; // loaded tokens that cost as much budget as one computed token

/// Next chunk of a prefill row: the cached pages of `matched`, then `num_loads` loaded pages, then `num_tokens` to
/// compute in `num_new_pages` new pages; `cost` counts against the step's token budget. No chunk if `num_tokens` is 0;
/// `lacks_pages` is true if more pages would allow a larger one.
pub(crate) struct Chunk {
    pub matched: Match,
    pub num_tokens: usize,
    pub num_new_pages: usize,
    pub lacks_pages: bool,
    pub num_found: usize,   // cached pages: those of `matched`, and those after the last checkpoint
    pub num_covered: usize, // cached pages after the checkpoint that are recomputed for the state alone
    pub num_loads: usize,
    pub begins_stored: bool, // the row begins with the state stored after the loaded pages
    pub cost: usize,
}

impl Chunk {
    pub fn num_page_changes(&self) -> usize {
        self.matched.pages.len() + self.num_covered + self.num_loads + self.num_new_pages
    }
}

/// Sizes the next chunk of a synchronized request that prefills or waits. Has no side effects.
///
/// First the match continues from the request's own node, leaving at least one token to compute. Then min(`budget`,
/// remaining) tokens, rounded down to a page boundary unless they reach the end, and shrunk to the free and evictable
/// pages (matched pages are about to be locked). No chunk if it has more than `max_page_changes` page-table entries.
///
/// Between the two come pages that can be loaded, as many as the budget allows (see `LOADED_TOKENS`), leaving a page to
/// compute. If the budget allows fewer than there are, one page is computed and the next chunk loads more.
///
/// For a model with states the match ends at a checkpoint. Later tokens whose pages are cached are computed for the
/// state alone: the row has those pages and writes nothing to them. If a stored state covers more tokens, the row
/// begins with that instead, and all pages up to it are loaded at once.
pub(crate) fn size_chunk(
    requests: &Requests,
    index: Index,
    tree: &RadixTree,
    budget: i64,
    max_page_changes: usize,
    step: i64,
) -> Chunk {
    let size = tree.page_size();
    let (request, cold) = (requests.get(index), requests.cold(index));
    let length = match cold.handle {
        Some(_) => request.prefill_len.to_usize(),
        None => request.len.to_usize(),
    };
    let ReusablePrefix {
        matched,
        num_found,
        num_loadable,
        has_state,
    } = find(requests, index, length, tree, step);
    let row = Candidate {
        length,
        num_pages: requests.pages(index).len(),
        num_matched: matched.pages.len(),
        num_unlocked: matched.num_unlocked,
        num_found,
        num_loadable,
        has_state,
        num_unscheduled: 0,
    };
    let chunk = plan_chunk(&row, budget, tree.num_available(), size, max_page_changes);
    Chunk {
        matched,
        num_tokens: chunk.num_tokens,
        num_new_pages: chunk.num_new_pages,
        lacks_pages: chunk.lacks_pages,
        num_found,
        num_covered: chunk.num_covered,
        num_loads: chunk.num_loads,
        begins_stored: has_state && chunk.num_tokens > 0,
        cost: chunk.cost,
    }
}

/// A row that needs a chunk of its prompt of `length` tokens. It has `num_pages` pages; of the following ones
/// `num_matched` are cached and usable (`num_unlocked` unlocked), `num_found` cached at all, and `num_loadable` more
/// can be loaded, with a state if `has_state`. It may yet generate `num_unscheduled` tokens.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Candidate {
    pub length: usize,
    pub num_pages: usize,
    pub num_matched: usize,
    pub num_unlocked: usize,
    pub num_found: usize,
    pub num_loadable: usize,
    pub has_state: bool,
    pub num_unscheduled: u32,
}

/// Planned chunk of a row: `num_tokens` to compute in `num_new_pages` new pages and `num_covered` pages cached without
/// a state, after `num_loads` loaded pages; `cost` in tokens of the budget. `lacks_pages`: more pages would allow more.
/// `num_missing`: pages by which the row's estimate exceeds the available ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PlannedChunk {
    pub num_tokens: usize,
    pub num_new_pages: usize,
    pub lacks_pages: bool,
    pub num_covered: usize,
    pub num_loads: usize,
    pub cost: usize,
    pub num_missing: usize,
}

fn plan_chunk(row: &Candidate, budget: i64, available: usize, size: usize, max_page_changes: usize) -> PlannedChunk {
    let mut available = available - row.num_unlocked;
    let at = row.num_pages + row.num_matched;
    let budget = usize::try_from(budget).unwrap_or(0);
    let num_loads = match row.has_state {
        true => row.num_loadable,
        false => row.num_loadable.min(budget.saturating_mul(LOADED_TOKENS) / size),
    };
    let remaining = row.length - (at + num_loads) * size;
    let all_loaded = num_loads == row.num_loadable;
    let mut num_tokens = budget.min(if all_loaded { remaining } else { size });
    if num_tokens < remaining {
        num_tokens -= num_tokens % size;
    }
    if num_tokens == 0 {
        return PlannedChunk::default();
    }
    available -= num_loads;
    let num_covered = (row.num_found - row.num_matched).min(num_tokens / size);
    let mut num_new_pages = num_tokens.div_ceil(size) - num_covered;
    let lacks_pages = num_new_pages > available;
    if lacks_pages {
        (num_new_pages, num_tokens) = (available, (num_covered + available) * size);
    }
    if row.num_matched + num_covered + num_loads + num_new_pages > max_page_changes {
        return PlannedChunk::default();
    }
    PlannedChunk {
        num_tokens,
        num_new_pages,
        lacks_pages,
        num_covered,
        num_loads,
        cost: num_tokens + num_loads * size / LOADED_TOKENS,
        num_missing: 0,
    }
}

/// Capacity of a step for prefill rows: token budget, pages that are free or evictable, and page-table entries.
/// `needed`: pages that started requests will yet take, estimated; `reserve_ratio` in 1/1024.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct ChunkLimits {
    pub budget: i64,
    pub available: usize,
    pub page_size: usize,
    pub max_page_changes: usize,
    pub reserve_ratio: usize,
    pub needed: usize,
}

/// Plans the chunks of `candidates` in order, up to and including the first that gets none or exceeds the estimate.
/// Each is sized as in the scheduler, for prompts that share only what is matched.
///
/// # Errors
/// `Error::Argument` for a page size of 0, a ratio above 1024, or a candidate with contradicting counts.
pub fn prefill_admission_plan(candidates: &[Candidate], mut left: ChunkLimits) -> Result<Vec<PlannedChunk>> {
    let size = left.page_size;
    if size == 0 || size > MAX_U32 / 2 {
        return argument("page_size", format!("{size}: must be between 1 and 2^31 - 1"));
    }
    if left.reserve_ratio > RATIO_MAX {
        return argument(
            "reserve_ratio",
            format!("{}: must be at most {RATIO_MAX}", left.reserve_ratio),
        );
    }
    let ratio = ReserveRatio {
        value: left.reserve_ratio,
    };
    let mut plan = Vec::with_capacity(candidates.len());
    for (index, row) in candidates.iter().enumerate() {
        let in_cache = row
            .num_pages
            .saturating_add(row.num_found)
            .saturating_add(row.num_loadable);
        let is_possible = in_cache.saturating_mul(size) < row.length
            && row.num_matched <= row.num_found
            && row.num_unlocked <= row.num_found
            && row.length <= MAX_U32;
        if !is_possible {
            return argument("candidates", format!("{index}: contradicting counts: {row:?}"));
        }
        let wanted = row.num_unlocked.saturating_add(row.num_loadable);
        let mut chunk = match left.available >= wanted {
            true => plan_chunk(row, left.budget, left.available, size, left.max_page_changes),
            false => PlannedChunk::default(), // an earlier candidate took the pages that it matched
        };
        let reserve = ratio.reserve_pages(row.num_unscheduled, PageSize::new(size));
        let rest = row.length.div_ceil(size) - row.num_matched;
        let estimate = (rest + reserve).saturating_add(left.needed);
        chunk.num_missing = estimate.saturating_sub(left.available.saturating_sub(row.num_unlocked));
        plan.push(chunk);
        if chunk.num_tokens == 0 || chunk.num_missing > 0 {
            break;
        }
        let num_added = chunk.num_covered + chunk.num_loads + chunk.num_new_pages;
        let ends = (row.num_pages + row.num_matched + chunk.num_loads) * size + chunk.num_tokens == row.length;
        let unscheduled = row.num_unscheduled.saturating_sub(u32::from(ends)); // its first token is scheduled
        left.budget -= chunk.cost.to_i64();
        left.available -= row.num_unlocked + chunk.num_loads + chunk.num_new_pages;
        left.max_page_changes -= row.num_matched + num_added;
        left.needed =
            left.needed.saturating_add(rest - num_added) + ratio.reserve_pages(unscheduled, PageSize::new(size));
    }
    Ok(plan)
}

/// Returns how many tokens of a waiting request are cached or can be loaded, so that `step` need not compute them.
pub(crate) fn cached_len(requests: &Requests, index: Index, tree: &RadixTree, step: i64) -> usize {
    let prefix = find(requests, index, requests.get(index).len.to_usize(), tree, step);
    (prefix.matched.pages.len() + prefix.num_loadable) * tree.page_size()
}

/// Reusable part of a row's prompt: the match, the number of cached pages with and without a checkpoint, the pages that
/// can be loaded after it, and whether the row then begins with the stored state.
struct ReusablePrefix {
    matched: Match,
    num_found: usize,
    num_loadable: usize,
    has_state: bool,
}

/// Looks up the reusable part of a request's first `length` tokens, for a row of `step`.
fn find(requests: &Requests, index: Index, length: usize, tree: &RadixTree, step: i64) -> ReusablePrefix {
    let (request, cold) = (requests.get(index), requests.cold(index));
    let num_pages = requests.pages(index).len();
    let max_match = match request.uses_cache {
        true => (length - 1) / tree.page_size(),
        false => 0,
    };
    let start = cold.handle.unwrap_or(ROOT);
    let tokens = requests.tokens(index);
    let whole = tree.find(start, cold.namespace, tokens, num_pages, max_match);
    let (num_found, num_unlocked) = (whole.pages.len(), whole.num_unlocked);
    let available = tree.num_available() - num_unlocked;
    let ((first, end), at) = (cold.stored, num_pages + num_found);
    let is_at_hand = first <= at;
    if tree.checkpoints.is_none() {
        let num_loadable = if is_at_hand {
            end.min(max_match).saturating_sub(at)
        } else {
            0
        };
        return ReusablePrefix {
            matched: whole,
            num_found,
            num_loadable: if num_loadable < available { num_loadable } else { 0 },
            has_state: false,
        };
    }
    let saved = tree.beginning(start, whole, step);
    let (num_loadable, deeper) = (end.saturating_sub(at), num_pages + saved.pages.len() < end);
    let has_state = deeper && end <= max_match && is_at_hand && num_loadable < available;
    let mut matched = saved;
    if has_state {
        matched = tree.find(start, cold.namespace, tokens, num_pages, end);
        matched.num_unlocked = num_unlocked;
    }
    ReusablePrefix {
        matched,
        num_found,
        num_loadable: if has_state { num_loadable } else { 0 },
        has_state,
    }
}

/// Applies a sized chunk: locks matched pages, allocates new ones, and inserts full pages into the tree, locked.
///
/// Pages enter before they are computed or loaded. That is sound because forward passes run in order, and each stores
/// the KV of all its rows, layer by layer, before any row attends. A page that the tree has already (a full hit stopped
/// before it) stays with the request, as does a partial one.
///
/// Returns where the chunk begins: the node that ends there, and the number of pages before.
pub(crate) fn apply_chunk(
    requests: &mut Requests,
    index: Index,
    chunk: &Chunk,
    tree: &mut RadixTree,
) -> Result<(NodeId, usize)> {
    let size = tree.page_size();
    let uses_cache = requests.get(index).uses_cache;
    let (sequence, cold) = requests.parts_mut(index);
    let mut handle = cold.handle.unwrap_or(ROOT);
    if uses_cache {
        handle = tree.descend(handle, &chunk.matched)?;
    }
    sequence.pages.extend_from_slice(&chunk.matched.pages);
    let (first, begin) = (sequence.pages.len(), handle);
    if chunk.num_covered > 0 {
        let to = first + chunk.num_covered;
        let covered = tree.find(handle, cold.namespace, &sequence.tokens, first, to);
        handle = tree.descend(handle, &covered)?;
        sequence.pages.extend_from_slice(&covered.pages);
    }
    let at = sequence.pages.len();
    let kv_len = (first + chunk.num_loads) * size + chunk.num_tokens;
    tree.take(chunk.num_loads + chunk.num_new_pages, &mut sequence.pages)?;
    if uses_cache {
        cold.num_tree_pages = at;
        let full = kv_len / size;
        if full > at && !tree.has_page(handle, cold.namespace, &sequence.tokens, at) {
            let tokens = &sequence.tokens[at * size..full * size];
            handle = tree.append(handle, cold.namespace, tokens, &sequence.pages[at..full])?;
            cold.num_tree_pages = full;
        }
    }
    cold.handle = Some(handle);
    requests.get_mut(index).kv_len = kv_len.to_u32();
    Ok((begin, first))
}

/// Appends the state saves of an applied chunk to `saves`, as (tokens into the row, slot): one at each border of
/// `borders`, if a slot is available. Slots may be evicted from unlocked nodes, so the chunk must be locked before.
pub(crate) fn save_states(
    requests: &Requests,
    index: Index,
    chunk: &Chunk,
    tree: &mut RadixTree,
    (begin, first): (NodeId, usize),
    (interval, step): (usize, i64),
    saves: &mut Vec<(usize, Slot)>,
) -> Result<()> {
    if tree.checkpoints.is_none() || !requests.get(index).uses_cache {
        return Ok(());
    }
    let (tokens, namespace, size) = (requests.tokens(index), requests.cold(index).namespace, tree.page_size());
    let last = requests.cold(index).num_tree_pages; // unlocked pages may be evicted before the save
    let computed = first + chunk.num_loads;
    for border in borders(requests.get(index), chunk, (computed, last), size, interval) {
        let matched = tree.find(begin, namespace, tokens, first, border);
        if let Some(slot) = tree.save(&matched, step)? {
            saves.push(((border - computed) * size, slot));
        }
    }
    Ok(())
}

/// Returns the page indices after which a chunk saves its state: every `interval` tokens, after the last full page
/// before the prompt's end, and where the match ended in pages without a checkpoint. Only pages after `first` that the
/// request locks; a chunk that begins with a stored state saves that too.
fn borders(
    request: &Request,
    chunk: &Chunk,
    (first, last): (usize, usize),
    size: usize,
    interval: usize,
) -> BTreeSet<usize> {
    let every = interval / size;
    let mut borders: BTreeSet<usize> = (first / every * every + every..=last).step_by(every).collect();
    borders.insert((request.prefill_len.to_usize() - 1) / size);
    if chunk.num_found > chunk.matched.pages.len() {
        borders.insert(first - chunk.matched.pages.len() + chunk.num_found);
    }
    borders.retain(|&border| first < border && border <= last);
    if chunk.begins_stored {
        borders.insert(first);
    }
    borders
}

/// Share of their possible output that requests are expected to generate, in 1/1024.
pub(crate) struct ReserveRatio {
    pub value: usize,
}

impl ReserveRatio {
    pub fn new() -> Self {
        Self { value: RATIO_START }
    }

    /// Updates the ratio: up after a retraction, else down. Call at the end of every step's pass, even without rows.
    pub fn after_step(&mut self, num_retracted: usize) {
        self.value = if num_retracted > 0 {
            (self.value + RATIO_UP).min(RATIO_MAX)
        } else {
            self.value.saturating_sub(RATIO_DOWN).max(RATIO_MIN)
        };
    }

    /// Returns the pages reserved for at most `num_unscheduled` output tokens, rounded up.
    pub fn reserve_pages(&self, num_unscheduled: u32, page_size: PageSize) -> usize {
        let max_output = num_unscheduled.min(MAX_OUTPUT_ESTIMATE);
        let output = (max_output * self.value.to_u32()) >> RATIO_BITS;
        page_size.count(output).to_usize()
    }
}

/// Returns after how many steps `missing` pages are free, if all requests run to their limits; 0 if never. `started`:
/// for each request the steps left, and its pages including reserved ones.
pub(crate) fn steps_until_free(missing: usize, mut started: Vec<(u32, usize)>) -> u32 {
    started.sort_unstable();
    let mut num_free = 0;
    for (steps, pages) in started {
        num_free += pages;
        if num_free >= missing {
            return steps;
        }
    }
    0
}

/// Estimates the pages that a started request will yet take: for the rest of its prompt, and its reserve.
pub(crate) fn needed_pages(requests: &Requests, row: &Row, ratio: &ReserveRatio, page_size: PageSize) -> usize {
    let reserve = ratio.reserve_pages(row.left, page_size);
    if !row.kind.prefills {
        return reserve; // its prompt is scheduled
    }
    let prompt_pages = page_size.count(requests.get(row.index).prefill_len).to_usize();
    prompt_pages - requests.pages(row.index).len() + reserve
}
