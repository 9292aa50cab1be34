//! Matrix products on all threads: preparing what they read, dealing out their pieces.
//!
//! Invariants: a piece is some panels by some tokens, and has one thread.

#![allow(unsafe_code)]

use std::ops::Range;

use minisgl_kernels::panels::{Matrix, PANEL};
use minisgl_kernels::{ActsPtr, Mode};

use crate::model::adapter::Site;
use crate::model::buffers::Phase;
use crate::model::grid::Grid;
use crate::model::weights::{Linear, Norm};
use crate::model::worker::{FEW, Forward, LINE, Worker, each};

/// Most panels of a piece of a product.
const PANELS: usize = 32;

impl Worker<'_, '_> {
    /// What a product reads: the rows of `from`, perhaps normalised. One row each thread prepares for itself, more rows
    /// are dealt out.
    pub(super) fn prepare(
        &mut self,
        index: usize,
        phase: Phase,
        from: &Grid,
        norm: Option<&Norm>,
        width: usize,
        mode: Mode,
    ) -> ActsPtr {
        let shared = self.shared;
        let alone = shared.count() == 1;
        let acts = if alone {
            self.own.acts.writer_as(1, width, mode)
        } else {
            shared.buffers.acts.writer_as(shared.count(), width, mode)
        };
        let normed = self.own.row.at(0, 0);
        let mut one = |token: usize| {
            let mut at = from.at(token, 0);
            // SAFETY: its piece: a row of `acts` (alone: of this thread's own); `from` was written before a barrier.
            unsafe {
                if let Some(norm) = norm {
                    norm.apply((&shared.kernels, shared.config), at, (0, width), normed);
                    at = normed;
                }
                shared.kernels_of(token).prepare(at, acts, token);
            }
        };
        if alone {
            one(0);
        } else {
            let size = if mode.mixes_rows() { LINE } else { FEW };
            each(shared.counter(index, phase), shared.count(), size, &mut one);
            self.barrier.wait();
        }
        self.lap(0);
        acts
    }

    /// Such as queries, keys and values: the products of several matrices with the same activations, side by side in `out`.
    pub(super) fn project_all(
        &mut self,
        index: usize,
        (phase, site): (Phase, Option<Site>),
        parts: &[(usize, Matrix)],
        acts: ActsPtr,
        out: &Grid,
    ) {
        let shared = self.shared;
        let blocks = shared.blocks();
        let groups: Vec<Groups> = parts
            .iter()
            .map(|(_, matrix)| Groups::of(matrix, shared.threads))
            .collect();
        let all: usize = groups.iter().map(|group| group.count).sum();
        while let Some(piece) = shared.counter(index, phase).take(blocks * all) {
            let (block, mut group) = (piece / all, piece % all);
            let (rows, kernels) = shared.block(block);
            for ((column, matrix), groups) in parts.iter().zip(&groups) {
                if group < groups.count {
                    let panels = groups.panels(group);
                    let to = out.at(rows.start, column + panels.start * PANEL);
                    // SAFETY: its piece: these columns of these rows; `acts` was written before a barrier.
                    unsafe {
                        let (from, stride) = (column / PANEL, out.stride());
                        let its = from + panels.start..from + panels.end;
                        kernels.matmul(matrix, panels, acts, rows.clone(), to, stride, false);
                        if let Some(site) = site {
                            shared.raise((index, site), its, rows, to, stride);
                        }
                    }
                    break;
                }
                group -= groups.count;
            }
        }
    }

    /// Add a product to the hidden numbers, or do with it what `to` says. Then no thread is still at it.
    pub(super) fn add_product(
        &mut self,
        index: usize,
        (phase, site): (Phase, Option<Site>),
        linear: &Linear,
        acts: ActsPtr,
        to: To<'_>,
    ) {
        let shared = self.shared;
        let (x, add) = match to {
            To::Hidden | To::Under(..) => (&shared.buffers.x, true),
            To::Aside | To::Behind(..) => (&shared.buffers.behind, false),
        };
        let groups = Groups::of(&linear.weight, shared.threads);
        let blocks = shared.blocks();
        while let Some(piece) = shared.counter(index, phase).take(blocks * groups.count) {
            let (block, group) = (piece / groups.count, piece % groups.count);
            let (rows, kernels) = shared.block(block);
            let panels = groups.panels(group);
            let (column, width) = (panels.start * PANEL, panels.len() * PANEL);
            let out = x.at(rows.start, column);
            // SAFETY: its piece: these columns of these rows; `acts` was written before a barrier.
            unsafe {
                kernels.matmul(&linear.weight, panels.clone(), acts, rows.clone(), out, x.stride(), add);
                if let Some(site) = site {
                    shared.raise((index, site), panels, rows.clone(), out, x.stride());
                }
                if let Some(bias) = &linear.bias {
                    for row in rows {
                        shared.kernels.add(x.at(row, column), bias[column..].as_ptr(), width);
                    }
                }
            }
        }
        self.barrier.wait();
        match to {
            To::Behind(norm, phase, scale) => self.add_aside(index, phase, norm, scale),
            To::Under(norm, phase) => self.normalise(index, phase, norm),
            To::Hidden | To::Aside => {}
        }
    }

    /// The hidden numbers of all tokens, in place.
    fn normalise(&mut self, index: usize, phase: Phase, norm: &Norm) {
        let (shared, size) = (self.shared, self.shared.config.hidden_size);
        each(shared.counter(index, phase), shared.count(), FEW, |token| {
            let row = shared.buffers.x.at(token, 0);
            // SAFETY: its piece: the row of this token, written before a barrier.
            unsafe { norm.apply((&shared.kernels, shared.config), row, (0, size), row) };
        });
        self.barrier.wait();
    }

    /// Add the rows that lie aside to the hidden numbers, normalised and scaled; the sums are multiplied by `last`.
    pub(super) fn add_aside(&mut self, index: usize, phase: Phase, norm: Option<&Norm>, last: f32) {
        let shared = self.shared;
        let (size, scale) = (shared.config.hidden_size, shared.config.residual_scale);
        let (from, to) = (&shared.buffers.behind, &shared.buffers.x);
        each(shared.counter(index, phase), shared.count(), FEW, |token| {
            let row = from.at(token, 0);
            // SAFETY: its piece: the rows of this token; `behind` was written before a barrier.
            unsafe {
                if let Some(norm) = norm {
                    norm.apply((&shared.kernels, shared.config), row, (0, size), row);
                }
                if scale != 1.0 {
                    let row = std::slice::from_raw_parts_mut(row, size);
                    row.iter_mut().for_each(|number| *number *= scale);
                }
                shared.kernels.add(to.at(token, 0), row, size);
                if last != 1.0 {
                    let sums = std::slice::from_raw_parts_mut(to.at(token, 0), size);
                    sums.iter_mut().for_each(|number| *number *= last);
                }
            }
        });
        self.barrier.wait();
    }
}

/// Where a product goes.
#[derive(Clone, Copy)]
pub(super) enum To<'a> {
    /// Added to the hidden numbers.
    Hidden,
    /// Added to the hidden numbers, which are normalised then, in a phase of its own.
    Under(&'a Norm, Phase),
    /// It stays aside.
    Aside,
    /// Normalised and scaled, then added to the hidden numbers in a phase of its own; the sums are multiplied in the end.
    Behind(Option<&'a Norm>, Phase, f32),
}

/// The panels of a matrix in pieces for `threads`: small enough to share evenly, large enough to be worth a call.
pub(crate) struct Groups {
    size: usize,
    panels: usize,
    /// How many.
    pub count: usize,
}

impl Groups {
    /// Pieces of panels, which kernels take two at a time.
    pub fn of(matrix: &Matrix, threads: usize) -> Self {
        Self::sized(matrix.panels(), threads, 2)
    }

    /// Pieces of pairs of so many panels.
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

    /// The panels of piece `group`.
    pub fn panels(&self, group: usize) -> Range<usize> {
        group * self.size..((group + 1) * self.size).min(self.panels)
    }
}

impl Worker<'_, '_> {
    /// A x of the tokens that have an adapter here; x are the rows of `from`, perhaps normalised. Before the `prepare`
    /// of the same numbers, whose barrier serves both.
    pub(super) fn lower(
        &mut self,
        index: usize,
        (phase, site): (Phase, Site),
        from: &Grid,
        norm: Option<&Norm>,
        width: usize,
    ) {
        let shared = self.shared;
        let runs = shared.tokens.runs;
        if runs.is_empty() {
            return;
        }
        while let Some(piece) = shared.counter(index, phase).take(runs.len()) {
            let run = &runs[piece];
            let Some(factors) = run.adapter.at(index, site) else {
                continue;
            };
            let (kernels, count) = (shared.kernels_of(run.tokens.start), run.tokens.len());
            let (normed, low) = (self.own.row.at(0, 0), &self.own.between.low);
            let acts = self.own.between.from.writer_as(count, width, Mode::Exact);
            let to = shared.buffers.between.runs[piece].writer_as(count, factors.a.n(), Mode::Exact);
            // SAFETY: `acts`, `low` and `normed` are this thread's, `to` its piece; `from` was written before a
            // barrier.
            unsafe {
                for (row, token) in run.tokens.clone().enumerate() {
                    let mut at = from.at(token, 0);
                    if let Some(norm) = norm {
                        norm.apply((&shared.kernels, shared.config), at, (0, width), normed);
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
            self.barrier.wait(); // `prepare` has none then
        }
    }
}

impl Forward<'_> {
    /// Add B of what `lower` made to the `panels` of the site's output of the tokens `rows`, which begin at `out`.
    ///
    /// # Safety
    /// They are the caller's piece; `lower` was called for this layer and site before a barrier.
    pub(super) unsafe fn raise(
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
            // SAFETY: the caller's.
            unsafe {
                let to = out.add((start - rows.start) * stride);
                kernels.matmul(&factors.b, panels.clone(), acts, own, to, stride, true);
            }
        }
    }
}
