//! Single pieces of a step as functions over slices, for tests, replay scripts and people who build on them. The scheduler
//! writes all of it at once, in place (`metadata`); it does not go through this.
//!
//! Keeps true: the same formulas as the scheduler's own.
//! Doesn't know: requests.

use crate::admission::{self, RATIO_MAX, ReserveRatio};
use crate::config::PageSize;
use crate::error::{Result, argument};
use crate::metadata::write_places;
use crate::page_pool::Page;

/// A waiting request: the tokens of its sequence, how many of its first pages are cached, and the tokens it may yet make.
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

/// How many of `candidates` start, in order, and the tokens that each computes in its first chunk and the pages it takes:
/// what the scheduler decides for prompts that have nothing in common but what is matched.
///
/// # Errors
/// `Error::Argument`: no page size, a ratio above 1, a candidate without tokens to compute or without output.
pub fn prefill_admission_plan(
    candidates: &[Candidate],
    room: &Room,
) -> Result<Vec<(usize, usize)>> {
    if room.page_size == 0 || room.page_size > i32::MAX as usize {
        return argument("page_size", "must be at least 1");
    }
    if room.reserve_ratio > RATIO_MAX {
        return argument("reserve_ratio", format!("must be at most {RATIO_MAX}"));
    }
    for (at, one) in candidates.iter().enumerate() {
        let matched = u64::from(one.num_matched_pages) * room.page_size as u64;
        if matched >= u64::from(one.num_tokens) || one.max_output == 0 {
            return argument("candidates", format!("{at}: {one:?}"));
        }
    }
    let size = PageSize::new(room.page_size);
    let ratio = ReserveRatio {
        value: room.reserve_ratio,
    };
    let mut plan: Vec<(usize, usize)> = Vec::new();
    let (mut budget, mut available) = (room.budget, room.num_pages);
    let mut needed = room.needed_by_started;
    for one in candidates {
        if plan.len() == room.num_slots || (budget <= 0 && !plan.is_empty()) {
            break;
        }
        let first = if plan.is_empty() {
            room.page_size as i64
        } else {
            0
        };
        let matched = one.num_matched_pages as usize;
        let rest = one.num_tokens as usize - matched * room.page_size;
        let share = admission::share(budget.max(first), rest, available, room.page_size);
        if share.num_tokens == 0 {
            break;
        }
        let prompt_pages = size.count(one.num_tokens) as usize;
        let expected = prompt_pages - matched + ratio.reserve_pages(one.max_output, size);
        if (room.any_started || !plan.is_empty()) && expected + needed > available {
            break;
        }
        let samples = u32::from(share.num_tokens == rest);
        let reserve = ratio.reserve_pages(one.max_output - samples, size);
        needed += prompt_pages - matched - share.num_new_pages + reserve;
        budget -= share.num_tokens as i64;
        available -= share.num_new_pages;
        plan.push((share.num_tokens, share.num_new_pages));
    }
    Ok(plan)
}

/// The positions of the tokens of all rows: row i computes `extend_lens[i]` tokens from position `starts[i]` on.
///
/// # Errors
/// `Error::Argument`: arrays of different lengths, negative numbers, or more tokens than an int32 counts.
pub fn make_positions(starts: &[i32], extend_lens: &[i32]) -> Result<Vec<i32>> {
    check_rows("starts", starts, extend_lens)?;
    let rows = starts.iter().zip(extend_lens);
    Ok(rows
        .flat_map(|(&start, &len)| (start..).take(len as usize))
        .collect())
}

/// The request slot of each token.
///
/// # Errors
/// As `make_positions`.
pub fn make_input_mapping(req_slots: &[i32], extend_lens: &[i32]) -> Result<Vec<i32>> {
    check_rows("req_slots", req_slots, extend_lens)?;
    let rows = req_slots.iter().zip(extend_lens);
    Ok(rows
        .flat_map(|(&slot, &len)| std::iter::repeat_n(slot, len as usize))
        .collect())
}

/// The position of the token that each row samples: -1 for a row that samples none.
///
/// # Errors
/// `Error::Argument`: arrays of different lengths.
pub fn make_write_mapping(seq_lens: &[i32], samples: &[i32]) -> Result<Vec<i32>> {
    same_len("samples", samples.len(), seq_lens.len())?;
    let rows = seq_lens.iter().zip(samples);
    Ok(rows
        .map(|(&len, &samples)| if samples == 0 { -1 } else { len })
        .collect())
}

fn same_len(name: &'static str, len: usize, expected: usize) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    argument(name, format!("{len} rows, not {expected}"))
}

/// `first` holds what is not negative, and the tokens of all rows can be counted.
fn check_rows(name: &'static str, first: &[i32], extend_lens: &[i32]) -> Result<()> {
    same_len("extend_lens", extend_lens.len(), first.len())?;
    let mut total = 0_i64;
    for (row, (&one, &len)) in first.iter().zip(extend_lens).enumerate() {
        total += i64::from(len);
        if one < 0 || one.checked_add(len).is_none() {
            return argument(name, format!("row {row}: {one} with {len} tokens"));
        }
        if len < 0 || total > i64::from(i32::MAX) {
            return argument("extend_lens", format!("row {row}: {len} tokens"));
        }
    }
    Ok(())
}

/// The arrays of a step that follow from its rows; the names are those of `RingEntry`.
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Metadata {
    pub positions: Vec<i32>,
    pub out_loc: Vec<i32>,
    pub seq_lens: Vec<i32>,
    pub qo_indptr: Vec<i32>,
    pub kv_indptr: Vec<i32>,
    pub last_page_len: Vec<i32>,
}

/// Row i computes `extend_lens[i]` tokens from position `starts[i]` on, with the page table
/// `page_tables[i * columns ..][.. columns]`.
///
/// # Errors
/// `Error::Argument`: as `make_positions`; a row without tokens, or with more than its page table holds.
pub fn make_metadata_buffers(
    page_tables: &[i32],
    columns: usize,
    starts: &[i32],
    extend_lens: &[i32],
    page_size: usize,
) -> Result<Metadata> {
    if page_size == 0 {
        return argument("page_size", "must be at least 1");
    }
    same_len("page_tables", page_tables.len(), columns * starts.len())?;
    let size = PageSize::new(page_size);
    let mut made = Metadata {
        positions: make_positions(starts, extend_lens)?,
        qo_indptr: vec![0],
        kv_indptr: vec![0],
        ..Metadata::default()
    };
    let (mut tokens, mut num_pages) = (0, 0);
    for (row, (&start, &len)) in starts.iter().zip(extend_lens).enumerate() {
        let end = start as u32 + len as u32;
        if len < 1 || end as usize > columns * page_size {
            let reason = format!("row {row}: {len} tokens from {start} on do not fit");
            return argument("extend_lens", reason);
        }
        let table = &page_tables[row * columns..(row + 1) * columns];
        let (first, offset) = size.split(start as u32);
        let pages: Vec<Page> = table[first as usize..]
            .iter()
            .map(|&page| page as Page)
            .collect();
        made.out_loc.resize(made.out_loc.len() + len as usize, 0);
        let from = made.out_loc.len() - len as usize;
        write_places(&mut made.out_loc[from..], &pages, offset, size.size());
        tokens += len;
        num_pages += size.count(end) as i32;
        made.seq_lens.push(end as i32);
        made.qo_indptr.push(tokens);
        made.kv_indptr.push(num_pages);
        made.last_page_len.push(size.split(end - 1).1 as i32 + 1);
    }
    Ok(made)
}
