//! Plan of a step's attention: segments of chunks and of the rows that share them.
//!
//! A segment is a run of chunks and the queries (tokens) that attend to it through one page table: a tile of a prompt's
//! tokens, one decode row, or many decode rows over their shared prefix. A segment with one KV head is a unit of work.
//! The segment with a query's first chunk merges chunks as it goes; if it also has the last one, it writes the result.
//! Otherwise its softmax state goes to a record, and every later chunk to a record of its own; a merge joins the
//! records from the left, by the same operations in the same order.
//!
//! Invariants: each (query, visible chunk) pair is in exactly one segment; building costs O(rows x pages) at worst.

use std::ops::Range;

use super::kernel::CHUNK;
use crate::error::{Error, Result};
use crate::lanes::Lines;

/// Query token of a segment: the positions `lo..hi` that it attends to, and the record for its partial result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Query {
    pub token: u32,
    pub position: u32,
    pub lo: u32,
    pub hi: u32,
    /// Index of the record for its softmax state, or for the segment's first chunk.
    pub record: u32,
}

impl Query {
    pub fn first_chunk(self) -> u32 {
        self.lo / CHUNK as u32
    }

    /// Returns true if the query's first chunk is at or after `first`: a segment starting there keeps its state.
    pub fn starts_from(self, first: u32) -> bool {
        self.first_chunk() >= first
    }

    /// Returns true if the query attends to nothing from chunk `end` on.
    pub fn ends_by(self, end: u32) -> bool {
        self.hi <= end * CHUNK as u32
    }
}

/// Queries that attend to the same chunks through the same pages.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    /// Indices of the queries, ascending in `lo` and in `hi`.
    pub queries: Range<u32>,
    /// Index of the row whose page table is used.
    pub row: u32,
    pub chunks: Range<u32>,
}

/// Merge of one token: `count` records from `first`, which are its softmax state, then one for each later chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Merge {
    pub token: u32,
    pub first: u32,
    pub count: u32,
}

/// Sizes of the model and the machine that a plan depends on.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    pub page_size: usize,
    pub pages: usize,
    pub kv_heads: usize,
    pub group: usize,
    /// Maximum number of queries in a segment.
    pub tile: usize,
    pub threads: usize,
    /// Elements in a record.
    pub record: usize,
    /// Sliding window of each layer in positions; `None`: full attention.
    pub windows: Vec<Option<usize>>,
}

/// Segments and merges for all layers with the same window.
#[derive(Debug, Default)]
pub(super) struct Variant {
    pub window: Option<usize>,
    /// True if the window is a chunk of the sequence (chunked attention), not a sliding window.
    pub chunked: bool,
    /// True if tokens attend to later tokens, too (bidirectional attention).
    pub both_ways: bool,
    pub segments: Vec<Segment>,
    pub queries: Vec<Query>,
    pub merges: Vec<Merge>,
    records: u32,
}

/// Units and merges of a step's attention. Made once and rebuilt for each step without new allocations.
#[derive(Debug)]
pub struct Plan {
    sizes: Sizes,
    variants: Vec<Variant>,
    /// Index into `variants` of each layer.
    of_layer: Vec<u8>,
    finder: PrefixFinder,
    spans: Vec<(u32, u32)>,
    pub(super) records: Lines,
    sharing: bool,
}

impl Plan {
    pub(super) fn new(sizes: Sizes) -> Self {
        let mut variants: Vec<Variant> = Vec::new();
        let mut of_layer = Vec::new();
        for window in &sizes.windows {
            let existing = variants.iter().position(|v| v.window == *window);
            of_layer.push(existing.unwrap_or(variants.len()) as u8);
            if existing.is_none() {
                variants.push(Variant {
                    window: *window,
                    ..Variant::default()
                });
            }
        }
        Self {
            sizes,
            variants,
            of_layer,
            finder: PrefixFinder::default(),
            spans: Vec::new(),
            records: Lines::default(),
            sharing: true,
        }
    }

    /// Makes windows chunked: a token attends to the earlier tokens of its own chunk instead of a sliding window.
    #[must_use]
    pub fn in_chunks(mut self) -> Self {
        self.variants.iter_mut().for_each(|variant| variant.chunked = true);
        self
    }

    /// Makes attention bidirectional: tokens attend to all of their row, or with a window to `window - 1` tokens on
    /// either side. The step must contain all tokens of each row.
    #[must_use]
    pub fn both_ways(mut self) -> Self {
        self.variants.iter_mut().for_each(|variant| variant.both_ways = true);
        self
    }

    /// Enables or disables the search for rows that share pages (for benchmarks). The results are the same.
    pub fn share(&mut self, sharing: bool) {
        self.sharing = sharing;
    }

    /// Plans a step. Fails if the rows do not fit the pool's page size, page count or table.
    pub fn build(&mut self, rows: &Rows<'_>) -> Result<()> {
        rows.check(self.sizes.page_size, self.sizes.pages)?;
        let mut records = 0;
        for variant in &mut self.variants {
            variant.clear();
            self.finder.clear();
            for row in 0..rows.seq_lens.len() {
                match rows.qo_indptr[row + 1] - rows.qo_indptr[row] {
                    0 => {}
                    1 => self.finder.add(row as u32),
                    _ => variant.add_prompt(rows, row, self.sizes.tile),
                }
            }
            variant.add_decodes(rows, &self.sizes, &mut self.finder, self.sharing);
            variant.assign_records(rows, &self.sizes, &mut self.spans);
            records = records.max(variant.records as usize * self.sizes.record);
        }
        self.records.grow(records);
        Ok(())
    }

    pub(super) fn threads(&self) -> usize {
        self.sizes.threads
    }

    pub(super) fn variant(&self, layer: usize) -> &Variant {
        &self.variants[usize::from(self.of_layer[layer])]
    }

    /// Returns the number of units of a layer's first phase. Units are ordered longest first.
    pub fn units(&self, layer: usize) -> usize {
        self.variant(layer).segments.len() * self.sizes.kv_heads
    }

    /// Returns the number of merges of a layer, which run after its units.
    pub fn merges(&self, layer: usize) -> usize {
        self.variant(layer).merges.len() * self.sizes.kv_heads
    }
}

impl Variant {
    fn clear(&mut self) {
        self.segments.clear();
        self.queries.clear();
        self.merges.clear();
        self.records = 0;
    }

    /// Returns the query of a token at `position` in row `row`, with the range of positions it attends to.
    fn query(&self, rows: &Rows<'_>, row: usize, token: u32, position: u32) -> Query {
        let len = rows.seq_lens[row];
        let hi = position + 1;
        let lo = self.window.map_or(0, |window| {
            let window = window.clamp(1, u32::MAX as usize) as u32;
            if self.chunked {
                position / window * window
            } else {
                hi.saturating_sub(window)
            }
        });
        let hi = match self.window {
            _ if !self.both_ways => rows.ends.get(token as usize).copied().unwrap_or(hi),
            Some(window) => position.saturating_add(window.min(u32::MAX as usize) as u32).min(len),
            None => len,
        };
        Query {
            token,
            position,
            lo,
            hi,
            record: 0,
        }
    }

    /// Adds one segment for each tile of `tile` tokens of a row with several tokens (prefill).
    fn add_prompt(&mut self, rows: &Rows<'_>, row: usize, tile: usize) {
        let (from, to) = (rows.qo_indptr[row], rows.qo_indptr[row + 1]);
        let start = rows.seq_lens[row] - (to - from);
        for first in (from..to).step_by(tile) {
            let begin = self.queries.len();
            for token in first..to.min(first + tile as u32) {
                let position = start + token - from;
                self.queries.push(self.query(rows, row, token, position));
            }
            let chunks = self.visible_chunks(begin);
            self.push_segment(begin, row as u32, chunks);
        }
    }

    /// Returns the chunks that the queries from index `begin` on attend to.
    fn visible_chunks(&self, begin: usize) -> Range<u32> {
        let seen = &self.queries[begin..];
        let hi = seen.last().map_or(0, |q| q.hi);
        seen.first().map_or(0, |q| q.first_chunk())..hi.div_ceil(CHUNK as u32)
    }

    /// Adds a segment of the queries from index `begin` on, unless it has no chunks or no queries.
    fn push_segment(&mut self, begin: usize, row: u32, chunks: Range<u32>) {
        if !chunks.is_empty() && begin < self.queries.len() {
            self.segments.push(Segment {
                queries: begin as u32..self.queries.len() as u32,
                row,
                chunks,
            });
        }
    }

    /// Adds the segments of the decode rows (one token each): one for each shared prefix, one for each row's own rest.
    fn add_decodes(&mut self, rows: &Rows<'_>, sizes: &Sizes, finder: &mut PrefixFinder, sharing: bool) {
        finder.find(rows, sizes.page_size, self.window, sharing);
        for shared in &finder.shared {
            let members = &finder.members[shared.members.start..shared.members.end];
            let parts = members.len().div_ceil(sizes.tile);
            for part in members.chunks(members.len().div_ceil(parts)) {
                let begin = self.queries.len();
                for row in part {
                    let row = *row as usize;
                    let query = self.query(rows, row, rows.qo_indptr[row], rows.seq_lens[row] - 1);
                    if query.first_chunk() < shared.chunks.end {
                        self.queries.push(query);
                    }
                }
                self.queries[begin..].sort_unstable_by_key(|q| q.hi);
                let first = self.visible_chunks(begin).start.max(shared.chunks.start);
                self.push_segment(begin, part[0], first..shared.chunks.end);
            }
        }
        for own in &finder.own {
            let row = own.row as usize;
            let begin = self.queries.len();
            self.queries
                .push(self.query(rows, row, rows.qo_indptr[row], rows.seq_lens[row] - 1));
            let visible = self.visible_chunks(begin);
            self.push_segment(begin, own.row, visible.start.max(own.from)..visible.end);
        }
    }

    /// Splits long segments, gives every query its records, adds the merges and sorts the segments longest first.
    fn assign_records(&mut self, rows: &Rows<'_>, sizes: &Sizes, spans: &mut Vec<(u32, u32)>) {
        self.split(sizes);
        let tokens = rows.qo_indptr.last().map_or(0, |n| *n as usize);
        spans.clear();
        spans.resize(tokens, (0, 0));
        for segment in &self.segments {
            let end = segment.chunks.end;
            for query in &self.queries[segment.queries.start as usize..segment.queries.end as usize] {
                if query.starts_from(segment.chunks.start) && query.first_chunk() < end && !query.ends_by(end) {
                    let count = 1 + query.hi.div_ceil(CHUNK as u32) - end;
                    spans[query.token as usize] = (self.records, end);
                    self.merges.push(Merge {
                        token: query.token,
                        first: self.records,
                        count,
                    });
                    self.records += count;
                }
            }
        }
        for segment in &self.segments {
            let first = segment.chunks.start;
            let range = segment.queries.start as usize..segment.queries.end as usize;
            for query in &mut self.queries[range] {
                let (record, end) = spans[query.token as usize];
                query.record = if query.starts_from(first) {
                    record
                } else {
                    record + 1 + first - end
                };
            }
        }
        let group = sizes.group as u32;
        self.segments.sort_by_cached_key(|s| std::cmp::Reverse(cost(s, group)));
    }
}

/// Chunks that several rows read through the same pages.
#[derive(Clone, Debug)]
pub(super) struct SharedChunks {
    /// Range of indices into [`PrefixFinder::members`].
    pub members: Range<usize>,
    pub chunks: Range<u32>,
}

/// Row that reads its chunks from index `from` on alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnChunks {
    pub row: u32,
    pub from: u32,
}

/// Rows that agree in their first pages.
#[derive(Debug)]
struct Branch {
    members: Range<usize>,
    /// Pages that all members are known to share.
    depth: usize,
    /// First chunk that is in no segment yet.
    from: u32,
}

/// Finder of page prefixes that decode rows share. Reuses its allocations from step to step.
#[derive(Debug, Default)]
pub(super) struct PrefixFinder {
    pub members: Vec<u32>,
    pub shared: Vec<SharedChunks>,
    pub own: Vec<OwnChunks>,
    branches: Vec<Branch>,
}

impl PrefixFinder {
    pub fn clear(&mut self) {
        self.members.clear();
        self.shared.clear();
        self.own.clear();
        self.branches.clear();
    }

    /// Adds a row of one token.
    pub fn add(&mut self, row: u32) {
        self.members.push(row);
    }

    /// Divides the chunks of the rows added since `clear` into shared and own ones.
    pub fn find(&mut self, rows: &Rows<'_>, page_size: usize, window: Option<usize>, sharing: bool) {
        if !sharing || self.members.len() < 2 {
            let own = self.members.iter().map(|row| OwnChunks { row: *row, from: 0 });
            self.own.extend(own);
            return;
        }
        self.branches.push(Branch {
            members: 0..self.members.len(),
            depth: 0,
            from: 0,
        });
        while let Some(branch) = self.branches.pop() {
            self.divide(branch, rows, page_size, window);
        }
    }

    fn divide(&mut self, branch: Branch, rows: &Rows<'_>, page_size: usize, window: Option<usize>) {
        let Branch {
            members,
            depth,
            mut from,
        } = branch;
        let full = |row: u32| {
            let row = row as usize;
            &rows.pages(row)[..rows.seq_lens[row] as usize / page_size]
        };
        let group = &mut self.members[members.clone()];
        if let [row] = *group {
            self.own.push(OwnChunks { row, from });
            return;
        }
        let model = full(group[0]);
        let mut common = model.len();
        for row in &group[1..] {
            common = depth + common_prefix(&model[depth..common], &full(*row)[depth..]);
        }
        let end = (common * page_size / CHUNK) as u32;
        if is_worth_sharing(group, from..end, rows, window) {
            self.shared.push(SharedChunks {
                members: members.clone(),
                chunks: from..end,
            });
            from = end;
        }
        // Rows that end here become branches of their own: their key is that of no page.
        let key = |row: u32| {
            full(row)
                .get(common)
                .map_or(u64::MAX - u64::from(row), |p| u64::from(*p))
        };
        group.sort_unstable_by_key(|row| (key(*row), *row));
        let mut start = members.start;
        for part in group.chunk_by(|a, b| key(*a) == key(*b)) {
            self.branches.push(Branch {
                members: start..start + part.len(),
                depth: common,
                from,
            });
            start += part.len();
        }
    }
}

/// Returns the number of leading pages that two page tables have in common.
fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    const STEP: usize = 32;
    let n = a.len().min(b.len());
    let mut same = 0;
    while same + STEP <= n && a[same..same + STEP] == b[same..same + STEP] {
        same += STEP;
    }
    let rest = a[same..n].iter().zip(&b[same..n]);
    same + rest.take_while(|(x, y)| x == y).count()
}

/// Returns true if reading these chunks once for all rows of the group saves more time than merging costs.
fn is_worth_sharing(group: &[u32], chunks: Range<u32>, rows: &Rows<'_>, window: Option<usize>) -> bool {
    let (mut seeing, mut longest, mut alone) = (0u64, 0u64, 0u64);
    for row in group {
        let len = rows.seq_lens[*row as usize];
        let lo = window.map_or(0, |w| (len as usize).saturating_sub(w.max(1)) / CHUNK) as u32;
        let seen = u64::from(chunks.end.saturating_sub(chunks.start.max(lo)));
        seeing += seen;
        longest = longest.max(seen);
        alone += u64::from(len.div_ceil(CHUNK as u32) - chunks.end);
    }
    (seeing - longest) * 8 > alone + 16
}

/// Rows of a step. Row i has the tokens `qo_indptr[i]..qo_indptr[i + 1]`, which are the last ones of its `seq_lens[i]`
/// positions, and the page table `table[slots[i] * columns ..]`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Length of each row in positions, the step's tokens included.
    pub seq_lens: &'a [u32],
    /// Prefix sums of the rows' token counts in this step; one entry more than rows.
    pub qo_indptr: &'a [u32],
    /// All page tables, `columns` entries each.
    pub table: &'a [u32],
    /// Entries in one page table.
    pub columns: usize,
    /// Index of each row's page table.
    pub slots: &'a [u32],
    /// End of the positions that each token attends to: one after its own, or later, and ascending within a row; empty
    /// if no token attends to later ones. Does not apply to bidirectional attention.
    pub ends: &'a [u32],
}

impl<'a> Rows<'a> {
    /// Returns the page table of a row; entries past the row's length are meaningless.
    pub fn pages(&self, row: usize) -> &'a [u32] {
        let from = self.slots[row] as usize * self.columns;
        &self.table[from..from + self.columns]
    }

    pub(super) fn check(&self, page_size: usize, pages: usize) -> Result<()> {
        let n = self.seq_lens.len();
        if self.qo_indptr.len() != n + 1 || self.slots.len() != n {
            return Err(Error::step(format!(
                "{n} rows have {} prefix sums and {} slots",
                self.qo_indptr.len(),
                self.slots.len()
            )));
        }
        if !self.ends.is_empty() && self.qo_indptr[n] as usize != self.ends.len() {
            return Err(Error::step(format!(
                "{} ends of {} tokens",
                self.ends.len(),
                self.qo_indptr[n]
            )));
        }
        for row in 0..n {
            let (from, to) = (self.qo_indptr[row], self.qo_indptr[row + 1]);
            let len = self.seq_lens[row] as usize;
            let end = (self.slots[row] as usize + 1).saturating_mul(self.columns);
            let needs = len.div_ceil(page_size);
            if to < from || (to - from) as usize > len || needs > self.columns || end > self.table.len() {
                return Err(Error::step(format!(
                    "row {row} of length {len}: tokens {from}..{to} and {needs} pages do not fit a page table of {}",
                    self.columns
                )));
            }
            let ends = self.ends.get(from as usize..to as usize).unwrap_or_default();
            let own = |at: usize| len + 1 + at - (to - from) as usize;
            let late = ends
                .iter()
                .enumerate()
                .all(|(at, end)| (own(at)..=len).contains(&(*end as usize)));
            if !(late && ends.is_sorted()) {
                return Err(Error::step(format!(
                    "row {row} of length {len}: its tokens attend up to {ends:?}"
                )));
            }
            if let Some(page) = self.pages(row)[..needs].iter().find(|p| **p as usize >= pages) {
                return Err(Error::step(format!("row {row}: page {page} is not below {pages}")));
            }
        }
        Ok(())
    }
}

/// Maximum size of all records of split segments, in f32 elements (32 MiB).
const MAX_RECORD_ELEMENTS: usize = 8 << 20;

/// Minimum number of chunks in a split segment: fewer are not worth a merge.
const MIN_CHUNKS: usize = 4;

impl Variant {
    /// Splits long segments if the threads would otherwise finish at very different times.
    pub(super) fn split(&mut self, sizes: &Sizes) {
        let group = sizes.group as u32;
        let whole: u64 = self.segments.iter().map(|s| u64::from(cost(s, group))).sum();
        let share = whole * sizes.kv_heads as u64 / sizes.threads.max(1) as u64;
        if self.is_balanced(sizes, share) {
            return;
        }
        let mut room = MAX_RECORD_ELEMENTS / sizes.record;
        for i in 0..self.segments.len() {
            let segment = self.segments[i].clone();
            let pieces = u64::from(cost(&segment, group)) * 4 / share.max(1) + 1;
            let pieces = (pieces as usize).min(segment.chunks.len() / MIN_CHUNKS);
            let needs = segment.queries.len() * (segment.chunks.len() + 1);
            if pieces > 1 && needs <= room {
                room -= needs;
                self.split_segment(i, pieces as u32);
            }
        }
    }

    /// Returns true if the units, run longest first, finish at about the same time on all threads (1/8 of `share`).
    fn is_balanced(&self, sizes: &Sizes, share: u64) -> bool {
        const MANY: usize = 16;
        let group = sizes.group as u32;
        let costs = self.segments.iter().map(|s| u64::from(cost(s, group)));
        if sizes.threads < 2 || self.segments.is_empty() {
            return true;
        }
        if self.segments.len() * sizes.kv_heads > MANY * sizes.threads {
            return costs.max().unwrap_or(0) * 4 <= share;
        }
        let mut costs: Vec<_> = costs.flat_map(|c| std::iter::repeat_n(c, sizes.kv_heads)).collect();
        costs.sort_unstable_by(|a, b| b.cmp(a));
        let mut ends = vec![0; sizes.threads];
        for cost in costs {
            if let Some(first) = ends.iter_mut().min() {
                *first += cost;
            }
        }
        ends.into_iter().max().unwrap_or(0) * 8 <= share * 9
    }

    /// Splits segment `at` into `pieces` runs of chunks, each with the queries that attend to any of it.
    fn split_segment(&mut self, at: usize, pieces: u32) {
        let whole = self.segments[at].clone();
        let count = whole.chunks.len() as u32;
        for piece in 0..pieces {
            let start = whole.chunks.start + count * piece / pieces;
            let end = whole.chunks.start + count * (piece + 1) / pieces;
            let begin = self.queries.len();
            for i in whole.queries.start as usize..whole.queries.end as usize {
                let query = self.queries[i];
                if query.first_chunk() < end && !query.ends_by(start) {
                    self.queries.push(query);
                }
            }
            let segment = Segment {
                queries: begin as u32..self.queries.len() as u32,
                row: whole.row,
                chunks: start..end,
            };
            if piece == 0 {
                self.segments[at] = segment;
            } else if !segment.queries.is_empty() {
                self.segments.push(segment);
            }
        }
    }
}

/// Returns the estimated time of a segment in relative units: (query rows + 4 for loading) times chunks.
pub(super) fn cost(segment: &Segment, group: u32) -> u32 {
    (segment.queries.len() as u32 * group + 4) * segment.chunks.len() as u32
}
