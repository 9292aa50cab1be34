//! Matmuls on all threads: preparing activations, and dividing the work.
//!
//! Invariants: a work item is some panels by some tokens, and belongs to one thread.

#![allow(unsafe_code)]

use std::ops::Range;

use minisgl_kernels::panels::{Matrix, PANEL};
use minisgl_kernels::{ActsPtr, Kernels, Mode};

use crate::model::adapter::Site;
use crate::model::grid::Grid;
use crate::model::held::Norm;
use crate::model::operation::{Add, Project};
use crate::model::worker::{Forward, ITEM_TOKENS, LINE_TOKENS, Worker, each};

/// Maximum panels per work item.
const PANELS: usize = 32;

impl Worker<'_, '_> {
    /// Prepares the rows of `from`, after an optional norm, as matmul input. Each thread prepares a single row itself.
    pub(super) fn prepare(&mut self, from: &Grid, norm: Option<&Norm>, width: usize, mode: Mode) -> ActsPtr {
        let shared = self.shared;
        let alone = shared.count() == 1;
        let acts = if alone {
            self.own.acts.writer_as(1, width, mode)
        } else {
            shared.buffers.acts.writer_as(shared.count(), width, mode)
        };
        let normed = self.own.row.at(0, 0);
        let some = |tokens: Range<usize>| {
            let kernels = shared.kernels_of(tokens.start);
            // SAFETY: this thread's work item: rows of `acts` (alone: of this thread's own); `from` was written before
            // a barrier.
            unsafe {
                let Some(norm) = norm else {
                    return kernels.prepare_rows(from.at(tokens.start, 0), from.stride(), acts, tokens);
                };
                for token in tokens {
                    norm.apply(&shared.kernels, from.at(token, 0), (0, width), normed);
                    kernels.prepare(normed, acts, token);
                }
            }
        };
        if alone {
            some(0..1);
        } else {
            let size = if mode.mixes_rows() { LINE_TOKENS } else { ITEM_TOKENS };
            let (counter, count, decode) = (self.counter(), shared.count(), shared.tokens.decode);
            while let Some(item) = counter.claim(count.div_ceil(size)) {
                let (start, end) = (item * size, ((item + 1) * size).min(count));
                let middle = decode.clamp(start, end);
                [start..middle, middle..end]
                    .into_iter()
                    .filter(|tokens| !tokens.is_empty())
                    .for_each(some);
            }
            self.barrier.wait();
        }
        self.lap(0);
        acts
    }

    /// Multiplies the same activations by several matrices side by side.
    pub(super) fn project(&mut self, project: &Project) {
        let shared = self.shared;
        let (from, out) = (shared.buffers.grid(project.from), shared.buffers.grid(project.to));
        let (norm, Some((_, first))) = (project.norm.as_deref(), project.matrices.first()) else {
            return;
        };
        if let Some(at) = project.adapted {
            self.lora_shrink(at, from, norm, first.k());
        }
        // the activations are prepared once for all matrices
        let mode = shared.mode.with_all(project.matrices());
        let in_int8 = |matrix: &Matrix| shared.mode.int8_with(matrix.kind());
        let mode = if project.as_held && !mode.has_int8() && project.matrices().any(in_int8) {
            Mode::Both
        } else {
            mode
        };
        let acts = self.prepare(from, norm, first.k(), mode);
        let blocks = shared.blocks();
        let groups = |matrix: &Matrix| Groups::new(matrix, shared.threads);
        let all: usize = project.matrices().map(|matrix| groups(matrix).count).sum();
        let counter = self.counter();
        while let Some(piece) = counter.claim(blocks * all) {
            let (block, mut group) = (piece / all, piece % all);
            let mut parts = project.matrices.iter().map(|part| (part, groups(&part.1)));
            let part = parts.find(|(_, groups)| {
                let is_in = group < groups.count;
                group -= if is_in { 0 } else { groups.count };
                is_in
            });
            if let Some(((column, matrix), groups)) = part {
                let (rows, kernels) = shared.block(block);
                // SAFETY: this thread's work item: these columns of these rows; `acts` was written before a barrier.
                unsafe {
                    shared.piece(
                        project,
                        (*column, matrix),
                        kernels,
                        groups.panels(group),
                        rows,
                        (acts, out),
                    )
                };
            }
        }
        self.barrier.wait();
    }

    /// Normalizes the hidden states of all tokens in place.
    pub(super) fn normalise(&mut self, norm: &Norm) {
        let shared = self.shared;
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            let row = shared.buffers.x.at(token, 0);
            // SAFETY: this thread's work item: the row of this token, written before a barrier.
            unsafe { norm.apply(&shared.kernels, row, (0, shared.hidden), row) };
        });
        self.barrier.wait();
    }

    /// Adds the rows of the side buffer to the hidden states.
    pub(super) fn add(&mut self, add: &Add) {
        let (shared, size) = (self.shared, self.shared.hidden);
        let (from, to) = (&shared.buffers.side, &shared.buffers.x);
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            let row = from.at(token, 0);
            // SAFETY: this thread's work item: the rows of this token; `side` was written before a barrier.
            unsafe {
                if let Some(norm) = &add.norm {
                    norm.apply(&shared.kernels, row, (0, size), row);
                }
                if add.scale != 1.0 {
                    let row = std::slice::from_raw_parts_mut(row, size);
                    row.iter_mut().for_each(|number| *number *= add.scale);
                }
                shared.kernels.add(to.at(token, 0), row, size);
                if add.last != 1.0 {
                    let sums = std::slice::from_raw_parts_mut(to.at(token, 0), size);
                    sums.iter_mut().for_each(|number| *number *= add.last);
                }
            }
        });
        self.barrier.wait();
    }
}

/// Division of a matrix's panels into work items: small enough to balance threads, large enough to be worth a call.
pub(crate) struct Groups {
    size: usize,
    panels: usize,
    /// Number of work items of the matmul.
    pub count: usize,
}

impl Groups {
    /// Divides the panels of `matrix`, always in pairs, since kernels process two at a time.
    pub fn new(matrix: &Matrix, threads: usize) -> Self {
        Self::sized(matrix.panels(), threads, 2)
    }

    /// Divides `panels` interleaved gate/up panels, keeping pairs together.
    pub fn pairs(panels: usize, threads: usize) -> Self {
        Self::sized(panels, threads, 2)
    }

    fn sized(panels: usize, threads: usize, unit: usize) -> Self {
        let size = (panels / (4 * threads)).clamp(2, PANELS).next_multiple_of(unit);
        Self {
            size,
            panels,
            count: panels.div_ceil(size),
        }
    }

    /// Returns the panels of work item `group`.
    pub fn panels(&self, group: usize) -> Range<usize> {
        group * self.size..((group + 1) * self.size).min(self.panels)
    }
}

impl Worker<'_, '_> {
    /// LoRA shrink: A x for tokens with an adapter here, x being the rows of `from` after an optional norm. Must
    /// precede `prepare` of the same input, whose barrier serves both.
    pub(super) fn lora_shrink(&mut self, (index, site): (usize, Site), from: &Grid, norm: Option<&Norm>, width: usize) {
        let shared = self.shared;
        let runs = shared.tokens.runs;
        if runs.is_empty() {
            return;
        }
        let counter = self.counter();
        while let Some(piece) = counter.claim(runs.len()) {
            let run = &runs[piece];
            let Some(factors) = run.adapter.at(index, site) else {
                continue;
            };
            let (kernels, count) = (shared.kernels_of(run.tokens.start), run.tokens.len());
            let (normed, low) = (self.own.row.at(0, 0), &self.own.between.low);
            let acts = self.own.between.from.writer_as(count, width, Mode::Exact);
            let to = shared.buffers.between.runs[piece].writer_as(count, factors.a.n(), Mode::Exact);
            // SAFETY: `acts`, `low` and `normed` are this thread's, `to` its work item; `from` was written before a
            // barrier.
            unsafe {
                for (row, token) in run.tokens.clone().enumerate() {
                    let mut at = from.at(token, 0);
                    if let Some(norm) = norm {
                        norm.apply(&shared.kernels, at, (0, width), normed);
                        at = normed;
                    }
                    kernels.prepare(at, acts, row);
                }
                let (out, stride) = (low.at(0, 0), low.stride());
                kernels.matmul(&factors.a, 0..factors.a.panels(), acts, 0..count, out, stride, false);
                for row in 0..count {
                    kernels.prepare(low.at(row, 0), to, row);
                }
            }
        }
        if shared.count() == 1 {
            self.barrier.wait(); // for one token `prepare` has no barrier
        }
    }
}

impl Forward<'_> {
    /// Computes one work item of a matmul: `panels` of a matrix whose output begins at `column`, by `rows`.
    ///
    /// # Safety
    /// No other thread may use these outputs meanwhile; `acts` was written before a barrier.
    unsafe fn piece(
        &self,
        project: &Project,
        (column, matrix): (usize, &Matrix),
        kernels: Kernels,
        panels: Range<usize>,
        rows: Range<usize>,
        (acts, out): (ActsPtr, &Grid),
    ) {
        let (stride, first) = (out.stride(), column / PANEL);
        let its = first + panels.start..first + panels.end;
        let (at, width) = (column + panels.start * PANEL, panels.len() * PANEL);
        let to = out.at(rows.start, at);
        // SAFETY: guaranteed by the caller.
        unsafe {
            kernels.matmul(matrix, panels, acts, rows.clone(), to, stride, project.adds);
            if let Some(of) = project.adapted {
                self.lora_expand(of, its, rows.clone(), to, stride);
            }
            if let Some(bias) = &project.bias {
                for row in rows {
                    self.kernels.add(out.at(row, at), bias[at..].as_ptr(), width);
                }
            }
        }
    }

    /// LoRA expand: adds B (A x) to the `panels` of the site's output for the tokens `rows`, which begin at `out`.
    ///
    /// # Safety
    /// No other thread may use these outputs meanwhile; the shrink of this layer and site ran before a barrier.
    pub(super) unsafe fn lora_expand(
        &self,
        (index, site): (usize, Site),
        panels: Range<usize>,
        rows: Range<usize>,
        out: *mut f32,
        stride: usize,
    ) {
        let runs = self.tokens.runs;
        let begin = runs.partition_point(|run| run.tokens.end <= rows.start);
        for (piece, run) in runs.iter().enumerate().skip(begin) {
            if run.tokens.start >= rows.end {
                return;
            }
            let Some(factors) = run.adapter.at(index, site) else {
                continue;
            };
            let (start, end) = (run.tokens.start.max(rows.start), run.tokens.end.min(rows.end));
            let own = start - run.tokens.start..end - run.tokens.start;
            let kernels = self.kernels_of(start);
            let acts = self.buffers.between.runs[piece].writer_as(run.tokens.len(), factors.a.n(), Mode::Exact);
            // SAFETY: guaranteed by the caller.
            unsafe {
                let to = out.add((start - rows.start) * stride);
                kernels.matmul(&factors.b, panels.clone(), acts, own, to, stride, true);
            }
        }
    }
}
