//! Step arrays: writes a decided step into its ring entry, which the engine reads.
//!
//! Invariants: every live region is written in full at each step; the cost of a decoding row is independent of its
//! length.

use crate::drafts::DraftRow;
use crate::numbers::{ToI32, ToU32, ToUsize};
use crate::page_pool::{Page, PageSize};
use crate::radix::Slot;
use crate::request::{Index, Requests};
use crate::step::{Limits, Plan, RingEntry};

/// Prefill row of a step: it computes `num_tokens`, and its page-table columns from `first_column` on are new.
#[derive(Clone, Copy)]
pub(crate) struct PrefillRow {
    pub index: Index,
    pub num_tokens: usize,
    pub first_column: usize,
    pub samples: bool,
    pub num_covered: usize, // leading tokens whose KV is cached, so that the row writes none for them
    pub begins: Option<i32>, // initial state, as in `state_begins`; `None`: the request continues with its own state
    pub saves: (usize, usize), // range in `DecidedStep::saves`
    pub num_loads: usize,   // pages loaded before the computed tokens
}

/// Decisions of the pass, in request order. Freed and assigned slots take effect before the page-table updates.
#[derive(Default)]
pub(crate) struct DecidedStep {
    pub step: i64,
    pub decode_rows: Vec<Index>,
    pub draft_rows: Vec<DraftRow>, // decode rows of drafts, after the others
    pub prefill_rows: Vec<PrefillRow>,
    pub assigned: Vec<(Index, usize)>, // request and cached length in tokens
    pub freed: Vec<u32>,               // freed slots
    pub num_retracted: usize,
    pub num_gave_way: usize, // those of the retracted that are in the background
    pub num_prefill_page_changes: usize,
    pub background: bool,               // whether background rows are being decided
    pub num_background: usize,          // tokens of background rows
    pub saves: Vec<(usize, Slot)>,      // (tokens into a prefill row, slot for its state)
    pub tail_saves: Vec<(usize, Slot)>, // (decode row, slot for the state after its token)
}

impl DecidedStep {
    pub fn num_decode_rows(&self) -> usize {
        self.decode_rows.len() + self.draft_rows.len()
    }

    pub fn num_rows(&self) -> usize {
        self.num_decode_rows() + self.prefill_rows.len()
    }

    pub fn num_tokens(&self) -> usize {
        self.num_decode_rows() + self.prefill_rows.iter().map(|row| row.num_tokens).sum::<usize>()
    }

    pub fn begin(&mut self, step: i64) {
        self.step = step;
        self.decode_rows.clear();
        self.draft_rows.clear();
        self.prefill_rows.clear();
        self.assigned.clear();
        self.freed.clear();
        self.num_retracted = 0;
        self.num_gave_way = 0;
        self.background = false;
        self.num_background = 0;
        self.num_prefill_page_changes = 0;
        self.saves.clear();
        self.tail_saves.clear();
    }
}

/// Writes all live regions of `entry` but the columns that `DecodeSet::schedule` wrote. Returns the plan without ring
/// index and page counts. Sets `rows` to the request index of each row, and `samples` to the sampling rows.
pub(crate) fn write_step(
    decided: &DecidedStep,
    requests: &Requests,
    entry: &mut RingEntry,
    limits: &Limits,
    graph_sizes: &[usize],
    rows: &mut Vec<Index>,
    samples: &mut Vec<u32>,
) -> Plan {
    let mut writer = Writer {
        entry,
        size: PageSize::new(limits.page_size),
        plan: Plan {
            step: decided.step,
            num_rows: decided.num_rows(),
            num_decode_rows: decided.num_decode_rows(),
            num_assigned: decided.assigned.len(),
            num_freed: decided.freed.len(),
            num_retracted: decided.num_retracted,
            num_background: decided.num_background,
            ..Plan::default()
        },
        tokens: 0,
        pages: 0,
        scratch: limits.num_pages * limits.page_size,
    };
    rows.clear();
    samples.clear();
    writer.entry.qo_indptr[0] = 0;
    writer.entry.kv_indptr[0] = 0;
    writer.draft_columns(decided, requests);
    writer.decode_rows(decided.num_decode_rows());
    rows.extend_from_slice(&decided.decode_rows);
    rows.extend(decided.draft_rows.iter().map(|row| row.index));
    samples.extend(0..decided.num_decode_rows().to_u32());
    for row in &decided.prefill_rows {
        if row.samples {
            samples.push(rows.len().to_u32());
        }
        writer.prefill_row(rows.len(), row, requests);
        writer.loads(row, requests);
        rows.push(row.index);
    }
    for (at, &row) in samples.iter().enumerate() {
        writer.entry.sample_rows[at] = row.to_i32();
    }
    writer.plan.num_samples = samples.len();
    writer.plan.num_tokens = writer.tokens;
    writer.padding(decided, limits, graph_sizes);
    writer.slots(decided, requests);
    writer.states(decided, requests);
    writer.plan
}

struct Writer<'a, 'b> {
    entry: &'a mut RingEntry<'b>,
    size: PageSize,
    plan: Plan,
    tokens: usize,
    pages: i32,     // sum of the rows' pages so far
    scratch: usize, // first KV slot of the scratch page
}

impl Writer<'_, '_> {
    /// Writes the columns of draft rows; `DecodeSet::schedule` wrote those of other decode rows.
    fn draft_columns(&mut self, decided: &DecidedStep, requests: &Requests) {
        let entry = &mut *self.entry;
        for (row, draft) in (decided.decode_rows.len()..).zip(&decided.draft_rows) {
            let (column, _) = self.size.split(draft.position);
            entry.input_ids[row] = draft.token;
            entry.req_slots[row] = requests.get(draft.index).slot.to_i32();
            entry.seq_lens[row] = draft.position.to_i32() + 1;
            entry.out_loc[row] = requests.pages(draft.index)[column.to_usize()].to_i32();
        }
    }

    /// Derives the other columns of decode rows from those that `DecodeSet::schedule` wrote, in vectorised loops.
    fn decode_rows(&mut self, n: usize) {
        let entry = &mut *self.entry;
        let (lens, out_loc) = (&entry.seq_lens[..n], &mut entry.out_loc[..n]);
        entry.extend_lens[..n].fill(1);
        for (to, row) in entry.qo_indptr[1..=n].iter_mut().zip(1..) {
            *to = row;
        }
        let (positions, last) = (&mut entry.positions[..n], &mut entry.last_page_len[..n]);
        let columns = &mut entry.kv_indptr[1..=n];
        let size = self.size;
        if size.size() == 1 {
            for ((&len, to), column) in lens.iter().zip(positions).zip(columns) {
                *to = len - 1;
                *column = len - 1;
            }
            last.fill(1);
        } else {
            let rows = lens.iter().zip(positions).zip(columns);
            for ((((&len, to), column), last), out) in rows.zip(last).zip(&mut *out_loc) {
                let (at, offset) = size.split(len.to_u32() - 1);
                *to = len - 1;
                *column = at.to_i32();
                *last = offset.to_i32() + 1;
                *out = *out * size.size().to_i32() + offset.to_i32();
            }
        }
        self.decode_updates(n);
        for column in &mut self.entry.kv_indptr[1..=n] {
            self.pages += *column + 1;
            *column = self.pages;
        }
        self.tokens = n;
    }

    /// Writes the page-table updates of decode rows that begin a page. `kv_indptr` still holds their last column.
    fn decode_updates(&mut self, n: usize) {
        let entry = &mut *self.entry;
        if self.size.size() == 1 {
            let page_table_updates = entry.page_table_updates[..3 * n].chunks_exact_mut(3);
            let rows = entry.req_slots[..n].iter().zip(&entry.kv_indptr[1..=n]);
            for (update, (&slot, &column)) in page_table_updates.zip(rows) {
                update.copy_from_slice(&[slot, column, 1]);
            }
            entry.page_ids[..n].copy_from_slice(&entry.out_loc[..n]);
            self.plan.num_page_table_updates = n;
            self.plan.num_page_ids = n;
            return;
        }
        let mut count = 0;
        let rows = entry.last_page_len[..n].iter().zip(&entry.req_slots[..n]);
        let rows = rows.zip(&entry.kv_indptr[1..=n]).zip(&entry.out_loc[..n]);
        for (((&last, &slot), &column), &out) in rows {
            if last == 1 {
                entry.page_table_updates[3 * count..3 * count + 3].copy_from_slice(&[slot, column, 1]);
                entry.page_ids[count] = out;
                count += 1;
            }
        }
        for page in &mut entry.page_ids[..count] {
            *page = self.size.split(page.to_u32()).0.to_i32();
        }
        self.plan.num_page_table_updates = count;
        self.plan.num_page_ids = count;
    }

    fn prefill_row(&mut self, row: usize, prefill: &PrefillRow, requests: &Requests) {
        let request = requests.get(prefill.index);
        let (tokens, pages) = (requests.tokens(prefill.index), requests.pages(prefill.index));
        let end = request.kv_len.to_usize();
        let start = end - prefill.num_tokens;
        let size = self.size;
        let to = self.tokens + prefill.num_tokens;
        let entry = &mut *self.entry;
        entry.input_ids[self.tokens..to].copy_from_slice(&tokens[start..end]);
        for (position, at) in entry.positions[self.tokens..to].iter_mut().zip(start.to_i32()..) {
            *position = at;
        }
        let (first, offset) = size.split(start.to_u32());
        let (scratch, places) = entry.out_loc[self.tokens..to].split_at_mut(prefill.num_covered);
        for (place, at) in scratch.iter_mut().zip(0u32..) {
            *place = self.scratch.to_i32() + size.split(at).1.to_i32();
        }
        let first = first.to_usize() + size.count(prefill.num_covered.to_u32()).to_usize();
        write_places(places, &pages[first..], offset, size.size());
        self.tokens = to;
        let (column, offset) = size.split(end.to_u32() - 1);
        self.pages += column.to_i32() + 1;
        entry.req_slots[row] = request.slot.to_i32();
        entry.seq_lens[row] = end.to_i32();
        entry.extend_lens[row] = prefill.num_tokens.to_i32();
        entry.qo_indptr[row + 1] = to.to_i32();
        entry.kv_indptr[row + 1] = self.pages;
        entry.last_page_len[row] = offset.to_i32() + 1;

        let new_pages = &pages[prefill.first_column..];
        let at = self.plan.num_page_table_updates;
        entry.page_table_updates[3 * at] = request.slot.to_i32();
        entry.page_table_updates[3 * at + 1] = prefill.first_column.to_i32();
        entry.page_table_updates[3 * at + 2] = new_pages.len().to_i32();
        let first = self.plan.num_page_ids;
        for (to, &page) in entry.page_ids[first..first + new_pages.len()].iter_mut().zip(new_pages) {
            *to = page.to_i32();
        }
        self.plan.num_page_table_updates += 1;
        self.plan.num_page_ids += new_pages.len();
    }

    /// Pads a step of one-token rows to the smallest graph size that holds it, with tokens of the scratch slot.
    fn padding(&mut self, decided: &DecidedStep, limits: &Limits, graph_sizes: &[usize]) {
        let n = self.plan.num_rows;
        self.plan.padded_rows = n;
        if n == 0 || decided.prefill_rows.iter().any(|row| row.num_tokens != 1) {
            return;
        }
        let Some(&end) = graph_sizes.iter().find(|&&size| size >= n) else {
            return;
        };
        self.plan.padded_rows = end;
        let entry = &mut *self.entry;
        for row in n..end {
            self.pages += 1;
            entry.req_slots[row] = limits.max_rows.to_i32();
            entry.seq_lens[row] = 1;
            entry.extend_lens[row] = 1;
            entry.qo_indptr[row + 1] = row.to_i32() + 1;
            entry.kv_indptr[row + 1] = self.pages;
            entry.last_page_len[row] = 1;
            entry.input_ids[row] = 0;
            entry.positions[row] = 0;
            entry.out_loc[row] = (limits.num_pages * limits.page_size).to_i32();
        }
    }

    fn loads(&mut self, row: &PrefillRow, requests: &Requests) {
        if row.num_loads == 0 {
            return;
        }
        let request = requests.get(row.index);
        let end = (request.kv_len.to_usize() - row.num_tokens) / self.size.size().to_usize();
        let load = [
            request.slot.to_i32(),
            (end - row.num_loads).to_i32(),
            row.num_loads.to_i32(),
        ];
        let at = 3 * self.plan.num_page_loads;
        self.entry.page_loads[at..at + 3].copy_from_slice(&load);
        self.plan.num_page_loads += 1;
    }

    fn slots(&mut self, decided: &DecidedStep, requests: &Requests) {
        for (at, &(index, cached_len)) in decided.assigned.iter().enumerate() {
            let request = requests.get(index);
            self.entry.assigned[2 * at] = request.slot.to_i32();
            self.entry.assigned[2 * at + 1] = cached_len.to_i32();
            self.entry.assigned_ids[at] = request.req_id;
        }
        for (to, &slot) in self.entry.freed.iter_mut().zip(&decided.freed) {
            *to = slot.to_i32();
        }
    }
}

impl Writer<'_, '_> {
    fn states(&mut self, decided: &DecidedStep, requests: &Requests) {
        let first_row = decided.num_decode_rows();
        let begins = decided
            .prefill_rows
            .iter()
            .filter_map(|row| row.begins.map(|from| (row.index, from)));
        for (to, (index, from)) in self.entry.state_begins.chunks_exact_mut(2).zip(begins) {
            to.copy_from_slice(&[requests.get(index).slot.to_i32(), from]);
            self.plan.num_state_begins += 1;
        }
        let tails = decided.tail_saves.iter().map(|&(row, slot)| (row, 1, slot));
        let rows = decided.prefill_rows.iter().zip(first_row..);
        let of_rows = rows.flat_map(|(row, at)| {
            let saves = &decided.saves[row.saves.0..row.saves.1];
            saves.iter().map(move |&(tokens, slot)| (at, tokens, slot))
        });
        for (to, (row, tokens, slot)) in self.entry.state_saves.chunks_exact_mut(3).zip(tails.chain(of_rows)) {
            to.copy_from_slice(&[row.to_i32(), tokens.to_i32(), slot.to_i32()]);
            self.plan.num_state_saves += 1;
        }
    }
}

/// Writes the KV slots (`out_loc`) of tokens that fill `pages` from position `offset` of the first page on.
pub(crate) fn write_places(places: &mut [i32], pages: &[Page], mut offset: u32, size: u32) {
    if size == 1 {
        for (place, &page) in places.iter_mut().zip(pages) {
            *place = page.to_i32();
        }
        return;
    }
    let mut places = places.iter_mut();
    for &page in pages {
        let from = page * size + offset;
        let count = (size - offset).to_usize();
        for (place, at) in places.by_ref().take(count).zip(from.to_i32()..) {
            *place = at;
        }
        offset = 0;
    }
}
