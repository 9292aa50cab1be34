//! Cutting long segments by chunks, when there are too few units for the threads.
//!
//! Invariants: the pieces of a segment see what it saw; the records of all cuts take a bounded amount of memory.

use super::plan::{Segment, Sizes, Variant};

/// Records that splitting may take at most, in numbers: 32 MiB.
const MOST_RECORDS: usize = 8 << 20;

/// Chunks of a piece at least: less is not worth a merge.
const LEAST_CHUNKS: usize = 4;

impl Variant {
    /// Cut long segments if the threads would end far apart.
    pub(super) fn split(&mut self, sizes: &Sizes) {
        let group = sizes.group as u32;
        let whole: u64 = self.segments.iter().map(|s| u64::from(cost(s, group))).sum();
        let share = whole * sizes.kv_heads as u64 / sizes.threads.max(1) as u64;
        if self.even(sizes, share) {
            return;
        }
        let mut room = MOST_RECORDS / sizes.record;
        for i in 0..self.segments.len() {
            let segment = self.segments[i].clone();
            let pieces = u64::from(cost(&segment, group)) * 4 / share.max(1) + 1;
            let pieces = (pieces as usize).min(segment.chunks.len() / LEAST_CHUNKS);
            let needs = segment.queries.len() * (segment.chunks.len() + 1);
            if pieces > 1 && needs <= room {
                room -= needs;
                self.cut(i, pieces as u32);
            }
        }
    }

    /// Whether the units, the longest first, end about together on all threads.
    fn even(&self, sizes: &Sizes, share: u64) -> bool {
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

    /// Cut a segment into pieces of chunks, each with those queries that see any of it.
    fn cut(&mut self, at: usize, pieces: u32) {
        let whole = self.segments[at].clone();
        let count = whole.chunks.len() as u32;
        for piece in 0..pieces {
            let start = whole.chunks.start + count * piece / pieces;
            let end = whole.chunks.start + count * (piece + 1) / pieces;
            let begin = self.queries.len();
            for i in whole.queries.start as usize..whole.queries.end as usize {
                let query = self.queries[i];
                if query.first_chunk() < end && !query.ends(start) {
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

/// Time of a segment in some unit: rows of queries and what loading takes, by chunks.
pub(super) fn cost(segment: &Segment, group: u32) -> u32 {
    (segment.queries.len() as u32 * group + 4) * segment.chunks.len() as u32
}
