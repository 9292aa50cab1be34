//! What a step's attention is cut into: segments of chunks by rows that share them.
//!
//! A segment is a run of chunks and the queries (tokens) that look at it through one page table: a tile of a prompt's
//! tokens, one decoding row, or many decoding rows over the prefix that they share. With each key/value head it is a unit.
//! The segment that holds a query's first chunk joins chunks as it goes; if it holds the last one, too, it writes the
//! result. Otherwise its state goes to a record, every later chunk to one of its own, and a merge joins them from the left:
//! the same operations in the same order.
//!
//! Invariants: each (query, chunk within its sight) is in exactly one segment; building costs O(rows x pages) at worst.

use std::ops::Range;

use super::kernel::CHUNK;
use super::lines::Lines;
use super::prefix::Finder;
use super::rows::Rows;
use super::split::cost;
use crate::error::Result;

/// A token with the positions it sees and the place of what it leaves for the merge.
#[derive(Clone, Copy, Debug)]
pub(super) struct Query {
    pub token: u32,
    pub lo: u32,
    pub hi: u32,
    /// The record of its state, or of the segment's first chunk.
    pub record: u32,
}

impl Query {
    pub fn first_chunk(self) -> u32 {
        self.lo / CHUNK as u32
    }

    /// Whether it begins in a segment that begins at this chunk (or began before).
    pub fn folds(self, first: u32) -> bool {
        self.first_chunk() >= first
    }

    /// Whether it ends before this chunk.
    pub fn ends(self, end: u32) -> bool {
        self.hi <= end * CHUNK as u32
    }
}

/// Queries that look at the same chunks through the same pages.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    /// Ascending in `lo` and in `hi`.
    pub queries: Range<u32>,
    /// The row whose page table is used.
    pub row: u32,
    pub chunks: Range<u32>,
}

/// Records that one token's merge joins: its state, then one for each later chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Merge {
    pub token: u32,
    pub first: u32,
    pub count: u32,
}

/// What a plan must know of model and machine.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    pub page_size: usize,
    pub pages: usize,
    pub kv_heads: usize,
    pub group: usize,
    /// Queries of a segment at most.
    pub tile: usize,
    pub threads: usize,
    /// Numbers of a record.
    pub record: usize,
    /// Window of each layer.
    pub windows: Vec<Option<usize>>,
}

/// The plan for all layers that have the same window.
#[derive(Debug, Default)]
pub(super) struct Variant {
    pub window: Option<usize>,
    pub segments: Vec<Segment>,
    pub queries: Vec<Query>,
    pub merges: Vec<Merge>,
    records: u32,
}

/// The units of a step. Made once, built anew for each step, keeping what it allocated.
#[derive(Debug)]
pub struct Plan {
    sizes: Sizes,
    variants: Vec<Variant>,
    /// The variant of each layer.
    of_layer: Vec<u8>,
    finder: Finder,
    spans: Vec<(u32, u32)>,
    pub(super) records: Lines,
    sharing: bool,
}

impl Plan {
    pub(super) fn new(sizes: Sizes) -> Self {
        let mut variants: Vec<Variant> = Vec::new();
        let mut of_layer = Vec::new();
        for window in &sizes.windows {
            let known = variants.iter().position(|v| v.window == *window);
            of_layer.push(known.unwrap_or(variants.len()) as u8);
            if known.is_none() {
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
            finder: Finder::default(),
            spans: Vec::new(),
            records: Lines::default(),
            sharing: true,
        }
    }

    /// Whether rows that share pages are looked for: for measurements. The results are the same.
    pub fn share(&mut self, sharing: bool) {
        self.sharing = sharing;
    }

    /// Plan a step.
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
                    _ => variant.prompt(rows, row, self.sizes.tile),
                }
            }
            variant.decodes(rows, &self.sizes, &mut self.finder, self.sharing);
            variant.place(rows, &self.sizes, &mut self.spans);
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

    /// Units of the first phase of a layer, the longest first.
    pub fn units(&self, layer: usize) -> usize {
        self.variant(layer).segments.len() * self.sizes.kv_heads
    }

    /// Units of the second phase of a layer.
    pub fn merges(&self, layer: usize) -> usize {
        self.variant(layer).merges.len() * self.sizes.kv_heads
    }

    /// Whether any layer has a second phase.
    pub fn needs_merge(&self) -> bool {
        self.variants.iter().any(|v| !v.merges.is_empty())
    }
}

impl Variant {
    fn clear(&mut self) {
        self.segments.clear();
        self.queries.clear();
        self.merges.clear();
        self.records = 0;
    }

    fn query(&self, token: u32, position: u32) -> Query {
        let hi = position + 1;
        let lo = self
            .window
            .map_or(0, |w| hi.saturating_sub(w.clamp(1, u32::MAX as usize) as u32));
        Query {
            token,
            lo,
            hi,
            record: 0,
        }
    }

    /// Tiles of a row of several tokens.
    fn prompt(&mut self, rows: &Rows<'_>, row: usize, tile: usize) {
        let (from, to) = (rows.qo_indptr[row], rows.qo_indptr[row + 1]);
        let start = rows.seq_lens[row] - (to - from);
        for first in (from..to).step_by(tile) {
            let begin = self.queries.len();
            for token in first..to.min(first + tile as u32) {
                self.queries.push(self.query(token, start + token - from));
            }
            let chunks = self.sight(begin);
            self.close(begin, row as u32, chunks);
        }
    }

    /// The chunks that the queries from `begin` on see.
    fn sight(&self, begin: usize) -> Range<u32> {
        let seen = &self.queries[begin..];
        let hi = seen.last().map_or(0, |q| q.hi);
        seen.first().map_or(0, |q| q.first_chunk())..hi.div_ceil(CHUNK as u32)
    }

    /// Make a segment of the queries from `begin` on.
    fn close(&mut self, begin: usize, row: u32, chunks: Range<u32>) {
        if !chunks.is_empty() && begin < self.queries.len() {
            self.segments.push(Segment {
                queries: begin as u32..self.queries.len() as u32,
                row,
                chunks,
            });
        }
    }

    /// Rows of one token: what they share together, what they do not alone.
    fn decodes(&mut self, rows: &Rows<'_>, sizes: &Sizes, finder: &mut Finder, sharing: bool) {
        finder.find(rows, sizes.page_size, self.window, sharing);
        for shared in &finder.shared {
            let members = &finder.members[shared.members.start..shared.members.end];
            let parts = members.len().div_ceil(sizes.tile);
            for part in members.chunks(members.len().div_ceil(parts)) {
                let begin = self.queries.len();
                for row in part {
                    let row = *row as usize;
                    let query = self.query(rows.qo_indptr[row], rows.seq_lens[row] - 1);
                    if query.first_chunk() < shared.chunks.end {
                        self.queries.push(query);
                    }
                }
                self.queries[begin..].sort_unstable_by_key(|q| q.hi);
                let first = self.sight(begin).start.max(shared.chunks.start);
                self.close(begin, part[0], first..shared.chunks.end);
            }
        }
        for own in &finder.own {
            let row = own.row as usize;
            let begin = self.queries.len();
            self.queries
                .push(self.query(rows.qo_indptr[row], rows.seq_lens[row] - 1));
            let sight = self.sight(begin);
            self.close(begin, own.row, sight.start.max(own.from)..sight.end);
        }
    }

    /// Give every query its records, make the merges, and put the longest segments first.
    fn place(&mut self, rows: &Rows<'_>, sizes: &Sizes, spans: &mut Vec<(u32, u32)>) {
        self.split(sizes);
        let tokens = rows.qo_indptr.last().map_or(0, |n| *n as usize);
        spans.clear();
        spans.resize(tokens, (0, 0));
        for segment in &self.segments {
            let end = segment.chunks.end;
            for query in &self.queries[segment.queries.start as usize..segment.queries.end as usize] {
                if query.folds(segment.chunks.start) && query.first_chunk() < end && !query.ends(end) {
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
                query.record = if query.folds(first) {
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
