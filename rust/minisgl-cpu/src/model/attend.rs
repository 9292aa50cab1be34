//! The first half of a layer: projections, rotation, keys and values into their pages, attention, and the way out.
//!
//! Invariants: keys and values of a step are in their pages before any of its rows reads them.

#![allow(unsafe_code)]

use std::ops::Range;

use minisgl_kernels::attention::Call;
use minisgl_kernels::panels::Matrix;
use minisgl_kernels::{Kernels, plain};

use crate::model::adapter::Site;
use crate::model::buffers::Phase;
use crate::model::config::{HeadNorms, Norms};
use crate::model::grid::Grid;
use crate::model::products::To;
use crate::model::weights::{Attending, Latent, Layer, Norm};
use crate::model::worker::{FEW, Worker, each};

impl Worker<'_, '_> {
    pub(super) fn attend(&mut self, index: usize, layer: &Layer, attending: &Attending) {
        let shared = self.shared;
        let (config, buffers) = (shared.config, shared.buffers);
        // one preparation serves all parts
        let mode = shared.mode.with_all(attending.qkv.iter().map(|(_, part)| part));
        self.lower(
            index,
            (Phase::LowerQkv, Site::Qkv),
            &buffers.x,
            layer.attention_norm.as_ref(),
            config.hidden_size,
        );
        let acts = self.prepare(
            index,
            Phase::Prepare,
            &buffers.x,
            layer.attention_norm.as_ref(),
            config.hidden_size,
            mode,
        );
        self.project_all(index, (Phase::Qkv, Some(Site::Qkv)), &attending.qkv, acts, &buffers.qkv);
        self.barrier.wait();
        self.lap(1);
        let (queries, attended) = match &attending.latent {
            None => (&buffers.qkv, &buffers.attended),
            Some(_) => (&buffers.latents[1], &buffers.latents[2]),
        };
        if let Some(latent) = &attending.latent {
            self.fit_queries(index, latent);
        } else {
            let counter = shared.counter(index, Phase::Rotate);
            each(counter, shared.count(), shared.stored_together(), |token| {
                self.rotate_and_store(index, attending, token);
            });
        }
        self.barrier.wait();
        self.lap(2);
        let gates = config.gates(index);
        let call = Call {
            rows: shared.rows,
            kv: shared.kv,
            layer: index,
            kv_layer: shared.attention.kv_layers[index],
            queries: queries.at(0, gates),
            query_stride: queries.stride(),
            out: attended.at(0, 0),
            out_stride: attended.stride(),
            sinks: attending.sinks.as_deref(),
            distances: shared.weights.distances.as_ref(),
        };
        let (attention, plan) = shared.attention.of(index);
        while let Some(unit) = shared.counter(index, Phase::Attend).take(plan.units(index)) {
            // SAFETY: its piece; keys and values of this layer are written before the barrier.
            unsafe { attention.run_unit(plan, unit, &call, self.scratch) };
        }
        self.barrier.wait();
        if plan.merges(index) > 0 {
            while let Some(unit) = shared.counter(index, Phase::Merge).take(plan.merges(index)) {
                // SAFETY: its piece; what units left is written before the barrier.
                unsafe { attention.merge(plan, unit, &call) };
            }
            self.barrier.wait();
        }
        if let Some(latent) = &attending.latent {
            self.each_head(index, Phase::OfLatents, |worker, head, rows, kernels| {
                let matrix = &latent.values[head];
                let from = (&buffers.latents[2], head * matrix.k());
                let to = (&buffers.attended, head * matrix.n());
                // SAFETY: its piece: this head of these rows; what attention gave was written before a barrier.
                unsafe { worker.of_head((matrix, kernels), rows, from, to) };
            });
            self.barrier.wait();
        }
        if gates > 0 {
            each(
                shared.counter(index, Phase::GateAttended),
                shared.count(),
                FEW,
                |token| {
                    let [from, to] = [&buffers.qkv, &buffers.attended].map(|grid| grid.at(token, 0));
                    // SAFETY: its piece: this token's numbers, written before a barrier.
                    unsafe {
                        let attended = std::slice::from_raw_parts_mut(to, gates);
                        plain::open(attended, std::slice::from_raw_parts(from, gates));
                    }
                },
            );
            self.barrier.wait();
        }
        self.lap(3);
        let width = config.attended(index);
        self.lower(index, (Phase::LowerOut, Site::Out), &buffers.attended, None, width);
        let acts = self.prepare(
            index,
            Phase::PrepareOut,
            &buffers.attended,
            None,
            width,
            shared.mode.with(&attending.out.weight),
        );
        let to = if layer.mixer.is_some() {
            To::Aside // that is to see the hidden numbers as they are
        } else {
            self.way_out(layer)
        };
        self.add_product(index, (Phase::Out, Some(Site::Out)), &attending.out, acts, to);
        self.lap(4);
    }

    /// Where goes what the first half of a layer gives.
    pub(super) fn way_out<'l>(&self, layer: &'l Layer) -> To<'l> {
        let config = self.shared.config;
        if let Some((norm, _)) = layer.norms_behind.as_ref().filter(|_| config.norms == Norms::Over) {
            To::Under(norm, Phase::AddOut)
        } else if config.is_parallel() {
            To::Aside // the MLP is to see the hidden numbers as they are
        } else if config.has_behind() {
            To::Behind(layer.norms_behind.as_ref().map(|(norm, _)| norm), Phase::AddOut, 1.0)
        } else {
            To::Hidden
        }
    }

    /// Queries made fit for latents, and each token's latent into its page.
    fn fit_queries(&mut self, index: usize, latent: &Latent) {
        let shared = self.shared;
        let (config, buffers) = (shared.config, shared.buffers);
        let mut from = &buffers.qkv;
        if let Some((norm, matrices)) = &latent.queries {
            let matrix = &matrices[0].1;
            let (size, mode) = (matrix.k(), shared.mode.with_all(matrices.iter().map(|(_, part)| part)));
            let acts = self.prepare(index, Phase::PrepareQueries, from, Some(norm), size, mode);
            from = &buffers.latents[0];
            self.project_all(index, (Phase::Queries, None), matrices, acts, from);
            self.barrier.wait();
        }
        let counter = shared.counter(index, Phase::Rotate);
        each(counter, shared.count(), shared.stored_together(), |token| {
            self.store_latent(index, latent, token);
        });
        let (size, key) = (config.query_dim(index), config.heads[index].head_dim);
        let half = config.rotary_dim(index) / 2;
        let to = &buffers.latents[1];
        self.each_head(index, Phase::ToLatents, |worker, head, rows, kernels| {
            let matrix = &latent.keys[head];
            // SAFETY: its piece: this head of these rows; queries were written before a barrier.
            unsafe {
                worker.of_head((matrix, kernels), rows.clone(), (from, head * size), (to, head * key));
                for token in rows {
                    let rotated = to.at(token, head * key + matrix.n());
                    rotated.copy_from_nonoverlapping(from.at(token, head * size + matrix.k()), 2 * half);
                    if let Some((cos, sin)) = worker.shared.angles(index, token) {
                        shared.kernels.rotate(rotated, cos, sin, half);
                    }
                }
            }
        });
    }

    /// The norm of a token's latent and the rotation of what stands beside it, then both go into their page.
    fn store_latent(&self, index: usize, latent: &Latent, token: usize) {
        let shared = self.shared;
        let (config, kernels) = (shared.config, &shared.kernels);
        let (size, half) = (config.heads[index].head_dim, config.rotary_dim(index) / 2);
        let rank = size - 2 * half;
        // SAFETY: its piece: these numbers of this token, which nobody else reads; `angles` was written before a barrier.
        unsafe {
            let row = shared.buffers.qkv.at(token, config.projected(index) - size);
            latent.norm.apply((kernels, config), row, (0, rank), row);
            if let Some((cos, sin)) = shared.angles(index, token) {
                kernels.rotate(row.add(rank), cos, sin, half);
            }
            let slot = std::slice::from_ref(&shared.tokens.slots[token]);
            shared.kv.store(shared.attention.kv_layers[index], slot, row, row, 0);
        }
    }

    /// Deal out heads and blocks of tokens.
    fn each_head(&mut self, index: usize, phase: Phase, mut work: impl FnMut(&Self, usize, Range<usize>, Kernels)) {
        let (shared, heads) = (self.shared, self.shared.config.num_heads);
        while let Some(piece) = shared.counter(index, phase).take(shared.blocks() * heads) {
            let (rows, kernels) = shared.block(piece / heads);
            work(self, piece % heads, rows, kernels);
        }
    }

    /// One head's product of the numbers of `rows` that begin at a column, to another one.
    ///
    /// # Safety
    /// Nobody writes to the ones meanwhile, and nobody else uses the others.
    unsafe fn of_head(
        &self,
        (matrix, kernels): (&Matrix, Kernels),
        rows: Range<usize>,
        (from, at): (&Grid, usize),
        (to, column): (&Grid, usize),
    ) {
        let (count, mode) = (rows.len(), self.shared.mode.with(matrix));
        let acts = self.own.of_head.writer_as(count, matrix.k(), mode);
        // SAFETY: the caller's; `acts` is this thread's.
        unsafe {
            for (row, token) in rows.clone().enumerate() {
                kernels.prepare(from.at(token, at), acts, row);
            }
            let out = to.at(rows.start, column);
            kernels.matmul(matrix, 0..matrix.panels(), acts, 0..count, out, to.stride(), false);
        }
    }

    /// Biases, head norms and rotation of one token, then its keys and values go into their page.
    fn rotate_and_store(&self, index: usize, layer: &Attending, token: usize) {
        let shared = self.shared;
        let (config, buffers, kernels) = (shared.config, shared.buffers, shared.kernels);
        let of_layer = config.heads[index];
        let (dim, half) = (of_layer.head_dim, config.rotary_dim(index) / 2);
        let widths @ [queries, keys, _] = config.widths(index);
        let row = buffers.qkv.at(token, config.gates(index));
        let angles = shared.angles(index, token);
        // SAFETY: its piece: the row of this token in `qkv`; `angles` was written before a barrier.
        unsafe {
            let (first_key, first_value) = (row.add(queries), row.add(queries + keys));
            if let Some(bias) = &layer.qkv_bias {
                kernels.add(row, bias.as_ptr(), widths.iter().sum());
            }
            if of_layer.values_are_keys {
                first_value.copy_from_nonoverlapping(first_key, keys);
            }
            let behind = matches!(config.qk_norm, HeadNorms::Rotated | HeadNorms::Plain);
            if !behind {
                self.head_norms(layer, row, (dim, queries, keys));
            }
            if let Some((cos, sin)) = angles {
                for head in 0..(queries + keys) / dim {
                    kernels.rotate(row.add(head * dim), cos, sin, half);
                }
            }
            if behind {
                self.head_norms(layer, row, (dim, queries, keys));
            }
            if let Some(norm) = &layer.head_norms[2] {
                for head in 0..keys / dim {
                    let at = first_value.add(head * dim);
                    norm.apply((&kernels, config), at, (0, dim), at);
                }
            }
            if config.value_scale != 1.0 && keys > 0 {
                let values = std::slice::from_raw_parts_mut(first_value, keys);
                values.iter_mut().for_each(|number| *number *= config.value_scale);
            }
            if let Some(growth) = config.query_growth
                && !(growth.unrotated && angles.is_some())
            {
                let turns = ((shared.tokens.positions[token] + growth.first) / growth.every) as f32;
                let by = growth.beta.mul_add(turns.ln_1p(), 1.0);
                let queries = std::slice::from_raw_parts_mut(row, queries);
                queries.iter_mut().for_each(|number| *number *= by);
            }
            if keys > 0 {
                let slot = std::slice::from_ref(&shared.tokens.slots[token]);
                let to = shared.attention.kv_layers[index];
                shared.kv.store(to, slot, first_key, first_value, 0);
            }
        }
    }

    /// The norms of a token's queries and keys, which begin at `row`.
    ///
    /// # Safety
    /// The row is this thread's.
    unsafe fn head_norms(&self, layer: &Attending, row: *mut f32, (dim, queries, keys): (usize, usize, usize)) {
        let (config, kernels) = (self.shared.config, &self.shared.kernels);
        let all = |norm: &Norm, at: *mut f32, heads: usize| {
            let (count, size, step) = match config.qk_norm {
                HeadNorms::Whole => (1, heads * dim, 0),
                HeadNorms::Heads => (heads, dim, dim),
                _ => (heads, dim, 0),
            };
            for head in 0..count {
                // SAFETY: the caller's: the heads of a row.
                unsafe {
                    let at = at.add(head * size);
                    norm.apply((kernels, config), at, (head * step, size), at);
                }
            }
        };
        if let Some(norm) = &layer.head_norms[0] {
            all(norm, row, queries / dim);
        }
        if let Some(norm) = &layer.head_norms[1] {
            // SAFETY: keys come behind queries.
            all(norm, unsafe { row.add(queries) }, keys / dim);
        }
    }
}
