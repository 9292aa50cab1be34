//! Single arrays of a step as functions over slices, for tests, replay scripts and people who build on them. The
//! scheduler writes all of them at once, in place.

use super::write_places;
use crate::api::{Result, argument};
use crate::numbers::{ToI32, ToU32, ToUsize};
use crate::page_pool::{Page, PageSize};

/// The positions of the tokens of all rows: row i computes `extend_lens[i]` tokens from position `starts[i]` on.
///
/// # Errors
/// `Error::Argument`: arrays of different lengths, negative numbers, or more tokens than an int32 counts.
pub fn make_positions(starts: &[i32], extend_lens: &[i32]) -> Result<Vec<i32>> {
    check_rows("starts", starts, extend_lens)?;
    let rows = starts.iter().zip(extend_lens);
    Ok(rows.flat_map(|(&start, &len)| (start..).take(len.to_usize())).collect())
}

/// The request slot of each token.
///
/// # Errors
/// As `make_positions`.
pub fn make_input_mapping(req_slots: &[i32], extend_lens: &[i32]) -> Result<Vec<i32>> {
    check_rows("req_slots", req_slots, extend_lens)?;
    let rows = req_slots.iter().zip(extend_lens);
    Ok(rows
        .flat_map(|(&slot, &len)| std::iter::repeat_n(slot, len.to_usize()))
        .collect())
}

/// The position of the token that each row samples; None for a row that samples none.
///
/// # Errors
/// `Error::Argument`: arrays of different lengths.
pub fn make_write_mapping(seq_lens: &[i32], samples: &[i32]) -> Result<Vec<Option<i32>>> {
    same_len("samples", samples.len(), seq_lens.len())?;
    let rows = seq_lens.iter().zip(samples);
    Ok(rows.map(|(&len, &samples)| (samples != 0).then_some(len)).collect())
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
        let end = start.to_u32() + len.to_u32();
        if len < 1 || end.to_usize() > columns * page_size {
            let reason = format!("row {row}: {len} tokens from {start} on do not fit");
            return argument("extend_lens", reason);
        }
        let table = &page_tables[row * columns..(row + 1) * columns];
        let (first, offset) = size.split(start.to_u32());
        let pages: Vec<Page> = table[first.to_usize()..]
            .iter()
            .map(|&page| page.cast_unsigned())
            .collect();
        made.out_loc.resize(made.out_loc.len() + len.to_usize(), 0);
        let from = made.out_loc.len() - len.to_usize();
        write_places(&mut made.out_loc[from..], &pages, offset, size.size());
        tokens += len;
        num_pages += size.count(end).to_i32();
        made.seq_lens.push(end.to_i32());
        made.qo_indptr.push(tokens);
        made.kv_indptr.push(num_pages);
        made.last_page_len.push(size.split(end - 1).1.to_i32() + 1);
    }
    Ok(made)
}
