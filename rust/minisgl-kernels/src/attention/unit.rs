//! Computation of one attention unit: one segment of queries, one KV head, all query heads of its group.
//!
//! Invariants: a thread's scratch has the size of a unit's tile, whatever the step; only the unit's own elements of the
//! output and of the plan's records are written, so the units of a layer may run at once in any order.

use super::kernel::{
    CHUNK, F16Vectors, MAX_TILE_ROWS, Matmul, Softmax, Strided, merge_chunk, normalize, ragged, softmax_weights, span,
};
use super::load::{self, Ahead, Source};
use super::plan::{Plan, Query, Rows, Segment, Sizes};
use crate::error::{Error, Result};
use crate::kernels::{Isa, plain};
use crate::kv::{KvDtype, KvPool, MAX_HEAD_DIM};
use crate::lanes::{LANES, Lanes, Lines, exp2_one};

/// Maximum number of query heads that one unit computes over a KV head; a larger group is split into several units.
pub const MAX_GROUP: usize = 16;

/// Maximum number of query rows (tokens times heads of a group) in a unit.
pub(super) const ROWS: usize = 64;

/// Attention of one model: its head counts and sizes, and the instruction set that its kernels use.
#[derive(Clone, Debug)]
pub struct Attention {
    pub(super) isa: Isa,
    /// Groups of query heads, each over one KV head (KV heads times `split`).
    pub(super) kv_heads: usize,
    /// Groups that read the same KV head.
    pub(super) split: usize,
    pub(super) group: usize,
    pub(super) head_dim: usize,
    /// Elements in a value; with `shared` they are the first elements of the key.
    pub(super) value_dim: usize,
    pub(super) shared: bool,
    /// Scale of the queries, including log2(e): scores are logarithms to base 2.
    pub(super) scale: f32,
    /// Soft cap of the scores, as a logarithm to base 2; 0: no cap.
    pub(super) cap: f32,
}

/// Inputs and output of one layer's attention in a step.
///
/// Token t's query begins at `queries.add(t * query_stride)`: `kv_heads * group` heads of `head_dim` elements, the
/// heads of a group adjacent. Its result goes to `out.add(t * out_stride)`: as many heads of `value_dim` elements.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// Rows that the plan was built for.
    pub rows: Rows<'a>,
    /// Pool of keys and values.
    pub kv: &'a KvPool,
    /// Index of the layer, which selects the window.
    pub layer: usize,
    /// Index of the layer in `kv` whose keys and values are read.
    pub kv_layer: usize,
    /// Queries with RoPE applied, not scaled.
    pub queries: *const f32,
    /// Elements from one token's queries to the next.
    pub query_stride: usize,
    /// Output of the attention.
    pub out: *mut f32,
    /// Elements from one token's output to the next.
    pub out_stride: usize,
    /// Attention sink of each query head: a score (logarithm to base 2) in the softmax that has no value.
    pub sinks: Option<&'a [f32]>,
    /// Position bias that is added to scores.
    pub distances: Option<&'a Distances>,
}

/// Relative position bias by query head and distance, added to scores as logarithms to base 2.
#[derive(Clone, Debug, Default)]
pub struct Distances {
    /// Biases `[heads][2 * most - 1]`: from keys `most - 1` before the query to keys `most - 1` after it.
    pub numbers: Vec<f32>,
    /// Maximum length of a sequence in positions.
    pub most: usize,
}

impl Distances {
    /// Returns the biases of a head for keys from position `first` on and the query at `position`.
    #[inline(always)]
    fn of(&self, head: usize, position: usize, first: usize) -> &[f32] {
        let whole = 2 * self.most - 1;
        &self.numbers[head * whole..(head + 1) * whole][self.most - 1 + first - position..]
    }
}

// SAFETY: only addresses, which are dereferenced in unsafe functions whose callers guarantee them.
unsafe impl Send for Call<'_> {}
// SAFETY: as above.
unsafe impl Sync for Call<'_> {}

/// Buffers of one thread for one unit.
#[derive(Debug)]
pub struct Scratch {
    pub(super) queries: Lines,
    pub(super) scores: Lines,
    pub(super) keys: Lines,
    pub(super) values: Lines,
    /// Weighted values of one chunk.
    pub(super) chunk: Lines,
    /// Weighted values of all chunks so far, and a vector for each row's softmax state.
    pub(super) whole: Lines,
    pub(super) sums: [Softmax; ROWS],
}

impl Attention {
    /// Creates attention with `heads` query heads over `kv_heads` KV heads of `head_dim` elements. Scores are
    /// multiplied by `scale` (1 / sqrt(head_dim) in most models) and soft-capped at `cap` (0: not).
    pub fn new(isa: Isa, heads: usize, kv_heads: usize, head_dim: usize, scale: f32, cap: f32) -> Result<Self> {
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::unsupported(format!(
                "{heads} attention heads are not a multiple of {kv_heads} KV heads"
            )));
        }
        if head_dim == 0 || head_dim > MAX_HEAD_DIM {
            return Err(Error::unsupported(format!(
                "head_dim is {head_dim}; it must be from 1 to {MAX_HEAD_DIM}"
            )));
        }
        let all = heads / kv_heads;
        let fits = |split: &usize| all.is_multiple_of(*split) && all / split <= MAX_GROUP;
        let split = (1..=all).find(fits).unwrap_or(all);
        Ok(Self {
            isa,
            kv_heads: kv_heads * split,
            split,
            group: all / split,
            head_dim,
            value_dim: head_dim,
            shared: false,
            scale: scale * std::f32::consts::LOG2_E,
            cap: cap * std::f32::consts::LOG2_E,
        })
    }

    /// Makes the values the first `value_dim` elements of the keys (MLA).
    ///
    /// # Panics
    /// If `value_dim` is not a multiple of 16 or is larger than a key.
    pub fn with_values_of_keys(self, value_dim: usize) -> Self {
        assert!(
            value_dim.is_multiple_of(LANES) && value_dim <= self.head_dim,
            "values within keys"
        );
        Self {
            value_dim,
            shared: true,
            ..self
        }
    }

    /// Adds the position bias to the scores `from..to` of a row of the chunk at `first`, then applies the soft cap.
    ///
    /// # Safety
    /// `scores` has the elements of a chunk.
    #[inline(always)]
    unsafe fn bias_and_cap(
        &self,
        scores: *mut f32,
        (from, to): (usize, usize),
        (call, head): (&Call<'_>, usize),
        (position, first): (u32, usize),
    ) {
        if let Some(distances) = call.distances {
            // SAFETY: upheld by the caller.
            let scores = unsafe { std::slice::from_raw_parts_mut(scores.add(from), to - from) };
            let added = distances.of(head, position as usize, first + from);
            scores.iter_mut().zip(added).for_each(|(score, added)| *score += added);
        }
        if self.cap != 0.0 {
            // SAFETY: upheld by the caller.
            let scores = unsafe { std::slice::from_raw_parts_mut(scores.add(from), to - from) };
            plain::soft_cap(scores, self.cap);
        }
    }

    /// Creates a plan for steps over `kv` on `threads` threads. `windows` has, for each layer, the number of positions
    /// that a token attends to, itself included, or `None` for all.
    pub fn plan(&self, kv: &KvPool, threads: usize, windows: &[Option<usize>]) -> Plan {
        Plan::new(Sizes {
            page_size: kv.shape().page_size,
            pages: kv.shape().pages,
            kv_heads: self.kv_heads,
            group: self.group,
            tile: ROWS / self.group,
            threads,
            record: self.record(),
            windows: windows.to_vec(),
        })
    }

    /// Returns the elements in a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Allocates the buffers of one thread. They also serve attention with smaller heads.
    pub fn scratch(&self) -> Scratch {
        let (dim, width) = (self.head_dim, self.width());
        Scratch {
            queries: Lines::new(ROWS * dim),
            scores: Lines::new(ROWS * CHUNK),
            keys: Lines::new(dim * CHUNK),
            values: Lines::new(CHUNK * width),
            chunk: Lines::new(ROWS * width),
            whole: Lines::new(ROWS * (width + LANES)),
            sums: [Softmax { most: 0.0, sum: 0.0 }; ROWS],
        }
    }

    /// Returns `value_dim` rounded up to whole vectors.
    pub(super) fn width(&self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }

    /// Returns the elements of one head in a record: a vector for the softmax state, then the values.
    pub(super) fn part(&self) -> usize {
        LANES + self.width()
    }

    pub(super) fn record(&self) -> usize {
        self.kv_heads * self.group * self.part()
    }
}

impl Attention {
    #[inline(always)]
    pub(super) unsafe fn attend<V: Lanes>(&self, plan: &Plan, unit: usize, call: &Call<'_>, scratch: &mut Scratch) {
        let variant = plan.variant(call.layer);
        let segment = &variant.segments[unit / self.kv_heads];
        let queries = &variant.queries[segment.queries.start as usize..segment.queries.end as usize];
        assert!(queries.len() * self.group <= ROWS, "a tile too large");
        let head = unit % self.kv_heads;
        let source = Source {
            kv: call.kv,
            layer: call.kv_layer,
            head: head / self.split,
            pages: call.rows.pages(segment.row as usize),
        };
        let layout = call.kv.layout(call.kv_layer);
        assert!(layout.shared == self.shared, "a pool of another kind");
        let direct = !self.shared
            && queries.len() == 1
            && self.group <= MAX_TILE_ROWS
            && layout.dtype == KvDtype::F16
            && layout.group == LANES;
        // SAFETY: upheld by the caller; scratch has room for a tile of rows and a chunk.
        unsafe {
            self.load_queries(queries, head, call, scratch);
            for chunk in segment.chunks.clone() {
                let first = chunk as usize * CHUNK;
                let active = visible_queries(queries, first);
                if active.is_empty() {
                    continue;
                }
                let (_, to) = visible(queries[active.end - 1], first);
                let (from, _) = visible(queries[active.start], first);
                let ahead = self.next_chunk(plan, (unit, chunk), segment, call);
                if direct {
                    let which = (call, head, queries[0].position);
                    self.attend_row::<V>(source, first, (from, to), which, ahead, scratch);
                    self.accumulate::<V>(plan, segment, queries, (active, chunk), head, scratch);
                    continue;
                }
                load::keys::<V>(source, first, (from, to), ahead, scratch.keys.as_mut_ptr());
                let values = scratch.values.as_mut_ptr();
                if self.shared {
                    load::transpose_values(scratch.keys.as_ptr(), (from, to), self.width(), values);
                } else {
                    load::values::<V>(source, first, (from, to), ahead, values);
                }
                self.attend_chunk::<V>(&queries[active.clone()], active.start, first, (call, head), scratch);
                self.accumulate::<V>(plan, segment, queries, (active, chunk), head, scratch);
            }
            for (i, query) in queries.iter().enumerate() {
                self.write_result::<V>(plan, segment, (i, *query), head, call, scratch);
            }
        }
    }

    /// Returns the chunk that this thread most likely reads next: the next one, or the first of its next unit.
    #[inline(always)]
    fn next_chunk<'a>(
        &self,
        plan: &Plan,
        (unit, chunk): (usize, u32),
        segment: &Segment,
        call: &Call<'a>,
    ) -> Option<Ahead<'a>> {
        let variant = plan.variant(call.layer);
        let (segment, chunk) = if chunk + 1 < segment.chunks.end {
            (segment, chunk + 1)
        } else {
            let next = unit + plan.threads() * self.kv_heads;
            let next = variant.segments.get(next / self.kv_heads)?;
            (next, next.chunks.start)
        };
        let last = variant.queries[segment.queries.end as usize - 1];
        Some(Ahead {
            pages: call.rows.pages(segment.row as usize),
            first: chunk as usize * CHUNK,
            end: last.hi as usize,
        })
    }

    /// Copies the queries to scratch, scaled, and Hadamard-transformed if the pool's keys are.
    #[inline(always)]
    unsafe fn load_queries(&self, queries: &[Query], head: usize, call: &Call<'_>, scratch: &mut Scratch) {
        let count = self.group * self.head_dim;
        let hadamard = call.kv.layout(call.kv_layer).hadamard;
        for (i, query) in queries.iter().enumerate() {
            let from = query.token as usize * call.query_stride + head * count;
            // SAFETY: upheld by the caller for each token of the step; scratch has room for a tile of rows.
            unsafe {
                let (from, to) = (call.queries.add(from), scratch.queries.as_mut_ptr().add(i * count));
                for d in 0..count {
                    *to.add(d) = *from.add(d) * self.scale;
                }
                plain::hadamard_transform(std::slice::from_raw_parts_mut(to, count), hadamard);
            }
        }
    }

    /// Computes scores, weights and weighted values of one chunk for one query with few heads, directly from f16.
    #[inline(always)]
    unsafe fn attend_row<V: Lanes>(
        &self,
        source: Source<'_>,
        first: usize,
        (from, to): (usize, usize),
        (call, head, position): (&Call<'_>, usize, u32),
        ahead: Option<Ahead<'_>>,
        scratch: &mut Scratch,
    ) {
        let (dim, width, rows) = (self.head_dim, self.width(), self.group);
        // SAFETY: rows and columns are within the scratch's sizes.
        unsafe {
            let scores = scratch.scores.as_mut_ptr();
            let groups = load::F16Groups::new(source, first, (from, to), ahead);
            let a = Strided {
                at: scratch.queries.as_ptr(),
                ld: dim,
            };
            let c = Strided {
                at: scores.add(from / LANES * LANES),
                ld: CHUNK,
            };
            let (from_keys, after) = groups.keys();
            let keys = F16Vectors {
                from: from_keys,
                ahead: after,
                step: LANES,
            };
            V::run(Matmul {
                a,
                b: keys,
                k: dim,
                c,
                rows,
                vectors: from_keys.len(),
                more: false,
            });
            for r in 0..rows {
                let which = (call, head * self.group + r);
                self.bias_and_cap(scores.add(r * CHUNK), (from, to), which, (position, first));
                let (most, sum) = softmax_weights::<V>(scores.add(r * CHUNK), from, to);
                scratch.sums[r] = Softmax { most, sum };
            }
            let c = Strided {
                at: scratch.chunk.as_mut_ptr(),
                ld: width,
            };
            for group in from / LANES..to.div_ceil(LANES) {
                let (begin, end) = ((group * LANES).max(from), ((group + 1) * LANES).min(to));
                let (values, after) = groups.values(group - from / LANES);
                let vectors = |first: *const u16| -> [*const u16; MAX_HEAD_DIM / LANES] {
                    let first = first.wrapping_add(begin % LANES * dim);
                    std::array::from_fn(|n| first.wrapping_add(n * LANES))
                };
                let values = F16Vectors {
                    from: &vectors(values)[..width / LANES],
                    ahead: &vectors(after)[..width / LANES],
                    step: dim,
                };
                let a = Strided {
                    at: scores.add(begin).cast_const(),
                    ld: CHUNK,
                };
                V::run(Matmul {
                    a,
                    b: values,
                    k: end - begin,
                    c,
                    rows,
                    vectors: width / LANES,
                    more: begin > from,
                });
            }
        }
    }

    /// Computes scores, weights and weighted values of one chunk for the queries that see it; the first has index `at`.
    #[inline(always)]
    unsafe fn attend_chunk<V: Lanes>(
        &self,
        queries: &[Query],
        at: usize,
        first: usize,
        (call, head): (&Call<'_>, usize),
        scratch: &mut Scratch,
    ) {
        let (dim, width, group) = (self.head_dim, self.width(), self.group);
        let (from, to) = (
            visible(queries[0], first).0,
            visible(queries[queries.len() - 1], first).1,
        );
        let (left, right) = (from / LANES * LANES, to.next_multiple_of(LANES));
        let row = at * group;
        let rows = queries.len() * group;
        // SAFETY: rows and columns are within the scratch's sizes.
        unsafe {
            let scores = scratch.scores.as_mut_ptr().add(row * CHUNK);
            V::run(Matmul {
                a: Strided {
                    at: scratch.queries.as_ptr().add(row * dim),
                    ld: dim,
                },
                b: Strided {
                    at: scratch.keys.as_ptr().add(left),
                    ld: CHUNK,
                },
                k: dim,
                c: Strided {
                    at: scores.add(left),
                    ld: CHUNK,
                },
                rows,
                vectors: (right - left) / LANES,
                more: false,
            });
            for r in 0..rows {
                let (from, to) = visible(queries[r / group], first);
                let which = (call, head * group + r % group);
                let position = queries[r / group].position;
                self.bias_and_cap(scores.add(r * CHUNK), (from, to), which, (position, first));
                let (most, sum) = softmax_weights::<V>(scores.add(r * CHUNK), from, to);
                scratch.sums[row + r] = Softmax { most, sum };
            }
            let a = Strided {
                at: scores.cast_const(),
                ld: CHUNK,
            };
            let b = Strided {
                at: scratch.values.as_ptr(),
                ld: width,
            };
            let c = Strided {
                at: scratch.chunk.as_mut_ptr().add(row * width),
                ld: width,
            };
            if queries.iter().all(|q| visible(*q, first) == (from, to)) {
                span::<V>(a, b, (from, to), c, (rows, width / LANES), false);
            } else {
                let limits = |r: usize| visible(queries[r / group], first);
                ragged::<V>(a, b, c, (rows, width / LANES), limits);
            }
        }
    }

    /// Merges a computed chunk into the running softmax state of each query, or writes it to the query's record.
    #[inline(always)]
    unsafe fn accumulate<V: Lanes>(
        &self,
        plan: &Plan,
        segment: &Segment,
        queries: &[Query],
        (active, chunk): (std::ops::Range<usize>, u32),
        head: usize,
        scratch: &mut Scratch,
    ) {
        let width = self.width();
        for (i, query) in queries.iter().enumerate().take(active.end).skip(active.start) {
            let keeps_state = query.starts_from(segment.chunks.start);
            let begins = query.lo as usize / CHUNK == chunk as usize;
            for g in 0..self.group {
                let row = i * self.group + g;
                let sums = &mut scratch.sums[row];
                // SAFETY: a row of each; records of this query and head are this unit's own.
                unsafe {
                    let values = scratch.chunk.as_ptr().add(row * width);
                    if keeps_state {
                        let whole = scratch.whole.as_mut_ptr().add(row * (width + LANES));
                        let before = whole.add(width);
                        if begins {
                            copy::<V>(values, whole, width / LANES);
                        } else {
                            let so_far = Softmax {
                                most: *before,
                                sum: *before.add(1),
                            };
                            *sums = merge_chunk::<V>(so_far, whole, *sums, values, width / LANES);
                        }
                        *before = sums.most;
                        *before.add(1) = sums.sum;
                    } else {
                        let record = query.record + chunk - segment.chunks.start;
                        let to = self.record_ptr(plan, record, head * self.group + g);
                        *to = sums.most;
                        *to.add(1) = sums.sum;
                        copy::<V>(values, to.add(LANES), width / LANES);
                    }
                }
            }
        }
    }

    /// Writes a query's output, or its softmax state to a record if later chunks are still to be merged.
    #[inline(always)]
    unsafe fn write_result<V: Lanes>(
        &self,
        plan: &Plan,
        segment: &Segment,
        (i, query): (usize, Query),
        head: usize,
        call: &Call<'_>,
        scratch: &mut Scratch,
    ) {
        if !query.starts_from(segment.chunks.start) {
            return;
        }
        let width = self.width();
        for g in 0..self.group {
            // SAFETY: as in `accumulate`; the output of this token and head is this unit's own.
            unsafe {
                let values = scratch.whole.as_ptr().add((i * self.group + g) * (width + LANES));
                let sums = Softmax {
                    most: *values.add(width),
                    sum: *values.add(width + 1),
                };
                if query.ends_by(segment.chunks.end) {
                    self.write::<V>(call, query.token, head * self.group + g, sums, values);
                } else {
                    let to = self.record_ptr(plan, query.record, head * self.group + g);
                    *to = sums.most;
                    *to.add(1) = sums.sum;
                    copy::<V>(values, to.add(LANES), width / LANES);
                }
            }
        }
    }

    #[inline(always)]
    pub(super) unsafe fn merge_records<V: Lanes>(&self, plan: &Plan, unit: usize, call: &Call<'_>) {
        let merge = plan.variant(call.layer).merges[unit / self.kv_heads];
        let first = unit % self.kv_heads * self.group;
        let width = self.width();
        for head in first..first + self.group {
            // SAFETY: all units are done, and the records and the output of this token and head are this merge's own.
            unsafe {
                let state = self.record_ptr(plan, merge.first, head);
                let mut sums = Softmax {
                    most: *state,
                    sum: *state.add(1),
                };
                for record in merge.first + 1..merge.first + merge.count {
                    let next = self.record_ptr(plan, record, head);
                    let to_come = Softmax {
                        most: *next,
                        sum: *next.add(1),
                    };
                    sums = merge_chunk::<V>(sums, state.add(LANES), to_come, next.add(LANES), width / LANES);
                }
                self.write::<V>(call, merge.token, head, sums, state.add(LANES));
            }
        }
    }

    /// Returns the address of a head's part of a record.
    #[inline(always)]
    unsafe fn record_ptr(&self, plan: &Plan, record: u32, head: usize) -> *mut f32 {
        let at = record as usize * self.record() + head * self.part();
        debug_assert!(at + self.part() <= plan.records.len());
        // SAFETY: the plan has room for all records it gave out.
        unsafe { plan.records.shared().add(at) }
    }

    #[inline(always)]
    unsafe fn write<V: Lanes>(&self, call: &Call<'_>, token: u32, head: usize, mut sums: Softmax, values: *const f32) {
        if let Some(sinks) = call.sinks {
            let above = sinks[head] - sums.most;
            // a sink this far above all scores takes all of the weight
            sums.sum += exp2_one(if above > 126.0 { 126.0 } else { above });
        }
        // SAFETY: upheld by the caller for the output of each token.
        unsafe {
            let out = call.out.add(token as usize * call.out_stride + head * self.value_dim);
            normalize::<V>(sums, values, out, self.value_dim);
            let hadamard = call.kv.layout(call.kv_layer).hadamard;
            plain::hadamard_transform(std::slice::from_raw_parts_mut(out, self.value_dim), hadamard);
        }
    }
}

/// Returns the indices of the queries that attend to any position of the chunk at `first`.
#[inline(always)]
fn visible_queries(queries: &[Query], first: usize) -> std::ops::Range<usize> {
    let start = queries.partition_point(|q| q.hi as usize <= first);
    let end = queries.partition_point(|q| (q.lo as usize) < first + CHUNK);
    start..end.max(start)
}

/// Returns the positions, relative to `first`, that a query attends to in the chunk at `first`.
#[inline(always)]
fn visible(query: Query, first: usize) -> (usize, usize) {
    let from = (query.lo as usize).saturating_sub(first);
    (from, (query.hi as usize - first).min(CHUNK))
}

/// Copies `vectors` vectors, which both sides must have.
#[inline(always)]
unsafe fn copy<V: Lanes>(from: *const f32, to: *mut f32, vectors: usize) {
    for i in 0..vectors {
        // SAFETY: upheld by the caller.
        unsafe { V::load(from.add(i * LANES)).store(to.add(i * LANES)) };
    }
}
