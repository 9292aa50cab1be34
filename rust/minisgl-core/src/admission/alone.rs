//! Admission over numbers alone, for tests, replay scripts and people who build on it: the scheduler's own loop,
//! without requests and a cache.

use super::{RATIO_MAX, ReserveRatio, Share, Waiting, admit, share};
use crate::api::{Result, argument};
use crate::numbers::{MAX_I32, ToI64, ToU64, ToUsize};
use crate::page_pool::PageSize;

/// A waiting request: the tokens of its sequence, how many of its first pages are cached, and the tokens it may yet
/// make.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Candidate {
    pub num_tokens: u32,
    pub num_matched_pages: u32,
    pub max_output: u32,
}

/// What there is for waiting requests.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Tokens of this step that are left.
    pub budget: i64,
    /// Free request slots.
    pub num_slots: usize,
    /// Pages that are free or may be evicted, those that the candidates matched not counted.
    pub num_pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// The share of their output that requests are expected to make, in 1/1024.
    pub reserve_ratio: usize,
    /// Pages that started requests are expected to take yet.
    pub needed_by_started: usize,
    /// Whether any request has started. If none has, the first candidate may start whatever is expected.
    pub any_started: bool,
}

/// How many of `candidates` start, in order, and the tokens that each computes in its first chunk and the pages it
/// takes: what the scheduler decides for prompts that have nothing in common but what is matched.
///
/// # Errors
/// `Error::Argument`: no page size, a ratio above 1, a candidate without tokens to compute or without output.
pub fn prefill_admission_plan(candidates: &[Candidate], room: &Room) -> Result<Vec<(usize, usize)>> {
    if room.page_size == 0 || room.page_size > MAX_I32 {
        return argument("page_size", "must be at least 1");
    }
    if room.reserve_ratio > RATIO_MAX {
        return argument("reserve_ratio", format!("must be at most {RATIO_MAX}"));
    }
    for (at, one) in candidates.iter().enumerate() {
        let matched = u64::from(one.num_matched_pages) * room.page_size.to_u64();
        if matched >= u64::from(one.num_tokens) || one.max_output == 0 {
            return argument("candidates", format!("{at}: {one:?}"));
        }
    }
    let mut waiting = Candidates {
        candidates,
        room,
        size: PageSize::new(room.page_size),
        ratio: ReserveRatio {
            value: room.reserve_ratio,
        },
        num_pages: room.num_pages,
        plan: Vec::new(),
    };
    admit(&mut waiting, room.budget)?;
    Ok(waiting.plan)
}

struct Candidates<'a> {
    candidates: &'a [Candidate],
    room: &'a Room,
    size: PageSize,
    ratio: ReserveRatio,
    num_pages: usize, // that are left
    plan: Vec<(usize, usize)>,
}

impl Candidates<'_> {
    /// Pages of a candidate's prompt that are not matched.
    fn prompt_pages(&self, one: &Candidate) -> usize {
        self.size.count(one.num_tokens).to_usize() - one.num_matched_pages.to_usize()
    }
}

impl Waiting for Candidates<'_> {
    type Chunk = (Candidate, usize, Share); // with the tokens that are left of it

    fn has_next(&self) -> bool {
        self.plan.len() < self.candidates.len()
    }

    fn num_free_slots(&self) -> usize {
        self.room.num_slots - self.plan.len()
    }

    fn any_started(&self) -> bool {
        self.room.any_started || self.any_prefills()
    }

    fn any_prefills(&self) -> bool {
        !self.plan.is_empty()
    }

    fn size_first(&self, budget: i64) -> Option<(Self::Chunk, usize, bool)> {
        let one = *self.candidates.get(self.plan.len())?;
        let page_size = self.room.page_size;
        let least = if self.any_prefills() { 0 } else { page_size.to_i64() };
        let rest = one.num_tokens.to_usize() - one.num_matched_pages.to_usize() * page_size;
        let share = share(budget.max(least), rest, self.num_pages, page_size);
        let (num_tokens, lacks_pages) = (share.num_tokens, share.lacks_pages);
        Some(((one, rest, share), num_tokens, lacks_pages))
    }

    fn needed_by_started(&self) -> usize {
        self.room.needed_by_started
    }

    fn fits(&self, (one, ..): &Self::Chunk, needed_by_started: usize) -> bool {
        let reserve = self.ratio.reserve_pages(one.max_output, self.size);
        self.prompt_pages(one) + reserve + needed_by_started <= self.num_pages
    }

    fn start_first(&mut self, (one, rest, share): Self::Chunk) -> Result<usize> {
        let samples = u32::from(share.num_tokens == rest);
        let reserve = self.ratio.reserve_pages(one.max_output - samples, self.size);
        self.num_pages -= share.num_new_pages;
        self.plan.push((share.num_tokens, share.num_new_pages));
        Ok(self.prompt_pages(&one) - share.num_new_pages + reserve)
    }
}
