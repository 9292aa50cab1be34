//! Step arrays as functions over slices, for Python. The scheduler writes its arrays in place (`metadata`).

use crate::api::{Result, argument, need_memory};
use crate::metadata::write_places;
use crate::numbers::{ToI32, ToU32, ToUsize};
use crate::page_pool::{Page, PageSize};

/// Returns the position of each token of a step: row i computes `extend_lens[i]` tokens from `starts[i]` on.
///
/// # Errors
/// `Error::Argument` for arrays of different lengths, a negative value, or more tokens than an int32 can count.
pub fn make_positions(starts: &[i32], extend_lens: &[i32]) -> Result<Vec<i32>> {
    check_rows("starts", starts, extend_lens)?;
    check_ends(starts, extend_lens)?;
    let rows = starts.iter().zip(extend_lens);
    Ok(rows.flat_map(|(&start, &len)| (start..).take(len.to_usize())).collect())
}

/// Returns the request slot of each token of a step, int32: `req_slots[i]` repeated `extend_lens[i]` times.
///
/// # Errors
/// `Error::Argument` for arrays of different lengths, a negative value, or more tokens than an int32 can count.
pub fn make_input_mapping(req_slots: &[i32], extend_lens: &[i32]) -> Result<Vec<i32>> {
    check_rows("req_slots", req_slots, extend_lens)?;
    let rows = req_slots.iter().zip(extend_lens);
    Ok(rows
        .flat_map(|(&slot, &len)| std::iter::repeat_n(slot, len.to_usize()))
        .collect())
}

/// Returns the position of the token that each row samples (its sequence length), or -1 for a row that samples none.
///
/// # Errors
/// `Error::Argument` for arrays of different lengths or a negative length.
pub fn make_write_mapping(seq_lens: &[i32], samples: &[i32]) -> Result<Vec<i32>> {
    same_len("samples", samples.len(), seq_lens.len())?;
    if let Some(row) = seq_lens.iter().position(|&len| len < 0) {
        return argument("seq_lens", format!("row {row}: {}: at least 0", seq_lens[row]));
    }
    let rows = seq_lens.iter().zip(samples);
    Ok(rows
        .map(|(&len, &samples)| if samples != 0 { len } else { -1 })
        .collect())
}

/// Step arrays that follow from the rows, concatenated in `packed` (int32): `positions` and `out_loc` [num_tokens],
/// `seq_lens` and `last_page_len` [num_rows], `qo_indptr` and `kv_indptr` [num_rows + 1].
#[derive(Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Metadata {
    pub packed: Vec<i32>,
    pub num_tokens: usize,
    pub num_rows: usize,
}

/// Returns the step arrays of rows where row i computes `extend_lens[i]` tokens from position `starts[i]` on. `pages`
/// holds, row after row, the pages in which those tokens are.
///
/// # Errors
/// `Error::Argument` as in `make_positions`; also for a row without tokens, or a wrong number of pages.
pub fn make_metadata_buffers(starts: &[i32], extend_lens: &[i32], pages: &[i32], page_size: usize) -> Result<Metadata> {
    if page_size == 0 || page_size > i32::MAX.to_usize() {
        return argument("page_size", format!("{page_size}: must be between 1 and 2^31 - 1"));
    }
    let num_tokens = check_rows("starts", starts, extend_lens)?;
    check_ends(starts, extend_lens)?;
    let (num_rows, size) = (starts.len(), PageSize::new(page_size));
    if let Some(row) = extend_lens.iter().position(|&len| len == 0) {
        return argument("extend_lens", format!("row {row}: 0 tokens, at least 1"));
    }
    let columns = |start: i32, len: i32| {
        let end = start.to_u32() + len.to_u32();
        let (first, offset) = size.split(start.to_u32());
        (first, offset, end, (size.count(end) - first).to_usize())
    };
    let wanted: usize = starts
        .iter()
        .zip(extend_lens)
        .map(|(&start, &len)| columns(start, len).3)
        .sum();
    same_len("pages", pages.len(), wanted)?;
    let limit = (1_u32 << 31) / size.size(); // pages whose token slots fit in an int32
    let Ok(pages) = pages
        .iter()
        .map(|&page| Page::try_from(page))
        .collect::<std::result::Result<Vec<_>, _>>()
    else {
        return argument("pages", "a page below 0");
    };
    if let Some(page) = pages.iter().find(|&&page| page >= limit) {
        return argument(
            "pages",
            format!("page {page} of {page_size} tokens: its slots exceed int32"),
        );
    }
    let mut packed = vec![0; 2 * num_tokens + 4 * num_rows + 2];
    let (positions, rest) = packed.split_at_mut(num_tokens);
    let (out_loc, rest) = rest.split_at_mut(num_tokens);
    let (seq_lens, rest) = rest.split_at_mut(num_rows);
    let (last_page_len, rest) = rest.split_at_mut(num_rows);
    let (qo_indptr, kv_indptr) = rest.split_at_mut(num_rows + 1);
    let (mut token, mut page) = (0, 0);
    for (row, (&start, &len)) in starts.iter().zip(extend_lens).enumerate() {
        let (_, offset, end, count) = columns(start, len);
        let to = token + len.to_usize();
        for (position, at) in positions[token..to].iter_mut().zip(start..) {
            *position = at;
        }
        write_places(&mut out_loc[token..to], &pages[page..page + count], offset, size.size());
        (token, page) = (to, page + count);
        seq_lens[row] = end.to_i32();
        last_page_len[row] = size.split(end - 1).1.to_i32() + 1;
        qo_indptr[row + 1] = to.to_i32();
        let Some(sum) = kv_indptr[row].checked_add(size.count(end).to_i32()) else {
            return argument(
                "starts",
                format!("row {row}: the number of pages of all rows exceeds int32"),
            );
        };
        kv_indptr[row + 1] = sum;
    }
    Ok(Metadata {
        packed,
        num_tokens,
        num_rows,
    })
}

fn same_len(name: &'static str, len: usize, expected: usize) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    argument(name, format!("{len} numbers, not {expected}"))
}

/// Returns the number of tokens of all rows. `Error::Argument` for arrays of different lengths or a negative value.
fn check_rows(name: &'static str, first: &[i32], extend_lens: &[i32]) -> Result<usize> {
    same_len("extend_lens", extend_lens.len(), first.len())?;
    if let Some(row) = first.iter().position(|&one| one < 0) {
        return argument(name, format!("row {row}: {}: at least 0", first[row]));
    }
    let mut total = 0_i32;
    for (row, &len) in extend_lens.iter().enumerate() {
        if len < 0 {
            return argument("extend_lens", format!("row {row}: {len}: at least 0"));
        }
        match total.checked_add(len) {
            Some(sum) => total = sum,
            None => return argument("extend_lens", format!("row {row}: the number of tokens exceeds int32")),
        }
    }
    need_memory("extend_lens", 12 * total.to_usize())?;
    Ok(total.to_usize())
}

/// Checks that every row's end fits in an int32.
fn check_ends(starts: &[i32], extend_lens: &[i32]) -> Result<()> {
    let mut rows = starts.iter().zip(extend_lens);
    match rows.position(|(&start, &len)| start.checked_add(len).is_none()) {
        Some(row) => argument(
            "starts",
            format!(
                "row {row}: position {} plus {} tokens exceeds int32",
                starts[row], extend_lens[row]
            ),
        ),
        None => Ok(()),
    }
}
