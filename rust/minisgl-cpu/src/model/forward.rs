//! One forward on all threads: from token ids to hidden numbers, layer by layer.
//!
//! Each phase deals out pieces through a counter of its own, so each piece has one thread; what a phase writes is read
//! after the next barrier only. This is the reason behind every `unsafe` block here that says "its piece".
//!
//! Invariants: what a token's numbers become depends on the tokens that it may attend to only, not on how pieces fall to
//! threads nor on what else is in the step.

#![allow(unsafe_code)]

use std::time::Instant;

use minisgl_kernels::attention::Scratch;

use crate::model::buffers::{Own, Phase};
use crate::model::config::PerLayer;
use crate::model::weights::{FeedForward, PerLayerTables};
use crate::model::worker::{FEW, Forward, Times, Worker, each};
use crate::threads::Barrier;

impl Forward<'_> {
    /// What each thread does. `own`, `scratch`, `times` are this thread's.
    pub fn run(
        &self,
        thread: usize,
        barrier: &Barrier,
        own: &mut Own,
        scratch: &mut Scratch,
        times: Option<&mut Times>,
    ) {
        let mut unused = Times::default();
        let clock = (times.is_some() && thread == 0).then(Instant::now);
        let mut worker = Worker {
            shared: self,
            barrier,
            thread,
            own,
            scratch,
            clock,
            times: times.unwrap_or(&mut unused),
        };
        worker.embed();
        if let Some(tables) = &self.weights.per_layer {
            worker.embed_per_layer(tables);
        }
        if let Some(tables) = &self.weights.streams {
            worker.begin_streams(tables);
        }
        for (index, layer) in self.weights.layers.iter().enumerate() {
            if let Some(part) = &layer.streams {
                worker.predict(index, part);
                worker.laurel(index, layer, part);
            }
            if let Some(attending) = &layer.attention {
                worker.attend(index, layer, attending);
            }
            if layer.streams.is_some() {
                worker.add_laurel(index);
            }
            if let Some(mixer) = &layer.mixer {
                worker.mix(index, layer, mixer);
            }
            match &layer.feed_forward {
                FeedForward::None => {}
                FeedForward::Dense(mlp) => worker.dense(index, layer, mlp),
                FeedForward::Experts(experts) => worker.experts(index, layer, experts),
            }
            if let Some(part) = &layer.streams {
                worker.correct(index, part);
            }
            if let Some(part) = &layer.per_layer {
                worker.per_layer(index, part, layer.scale);
            }
        }
        if let Some(tables) = &self.weights.streams {
            worker.end_streams(tables);
        }
        worker.check();
    }
}

impl Worker<'_, '_> {
    /// Numbers of each token, and the angles of its position.
    fn embed(&mut self) {
        let shared = self.shared;
        let table = shared.weights.embedding.as_ref().unwrap_or(&shared.weights.head);
        let buffers = shared.buffers;
        let counter = shared.counter(shared.config.num_layers, Phase::Embed);
        each(counter, shared.count(), FEW, |token| {
            let width = buffers.x.stride();
            // SAFETY: its piece: the rows of its tokens.
            let row = unsafe { std::slice::from_raw_parts_mut(buffers.x.at(token, 0), width) };
            let id = (shared.tokens.ids[token] as usize).min(table.n() - 1);
            table.row(id, row);
            if shared.config.embedding_scale != 1.0 {
                row.iter_mut()
                    .for_each(|number| *number *= shared.config.embedding_scale);
            }
            let position = shared.tokens.positions[token];
            let weights = shared.weights;
            let kind = shared.tokens.types.get(token).copied().unwrap_or_default();
            let added = [
                (&weights.token_types, kind as usize),
                (&weights.positions, position as usize + shared.config.first_position),
            ];
            for (table, at) in added {
                let Some(table) = table else { continue };
                let learned = self.own.row.at(0, 0);
                // SAFETY: this thread's own row, as wide as the hidden numbers at least.
                let learned = unsafe { std::slice::from_raw_parts_mut(learned, width) };
                table.row(at, learned);
                row.iter_mut()
                    .zip(learned)
                    .for_each(|(number, learned)| *number += *learned);
            }
            if let Some(norm) = &weights.embedding_norm {
                let (at, size) = (row.as_mut_ptr(), shared.config.hidden_size);
                // SAFETY: the row has as many numbers.
                unsafe { norm.apply((&shared.kernels, shared.config), at, (0, size), at) };
            }
            let position = position as f32;
            for (table, frequencies) in shared.config.inverse_frequencies.iter().enumerate() {
                let scale = shared.config.rope_scales[table];
                let (first, half) = (shared.config.angles_at(table), frequencies.len());
                for (i, frequency) in frequencies.iter().enumerate() {
                    let (sin, cos) = (position * frequency).sin_cos();
                    let at = first + i;
                    // SAFETY: as above; `angles` has room for both halves of each table.
                    unsafe {
                        *buffers.angles.at(token, at) = cos * scale;
                        *buffers.angles.at(token, half + at) = sin * scale;
                    }
                }
            }
        });
        self.barrier.wait();
        self.lap(7);
    }

    /// The numbers of each token that each layer adds: of its embedding and of its id, both alike.
    fn embed_per_layer(&mut self, tables: &PerLayerTables) {
        let shared = self.shared;
        let (config, buffers, layers) = (shared.config, shared.buffers, shared.config.num_layers);
        let Some(PerLayer { size, .. }) = config.per_layer else {
            return;
        };
        let mode = shared.mode.with(&tables.model.1);
        let acts = self.prepare(layers, Phase::PrepareGate, &buffers.x, None, config.hidden_size, mode);
        let model = std::slice::from_ref(&tables.model);
        self.project_all(layers, (Phase::PerLayerGate, None), model, acts, &buffers.per_layer);
        self.barrier.wait();
        let (of_model, of_id) = ((config.hidden_size as f32).sqrt().recip(), (size as f32).sqrt());
        each(shared.counter(layers, Phase::PerLayer), shared.count(), FEW, |token| {
            let mut known = vec![0.0_f32; buffers.per_layer.stride()];
            // as transformers has it, an id beyond the table is the first
            let id = Some(shared.tokens.ids[token] as usize).filter(|id| *id < tables.embedding.n());
            tables.embedding.row(id.unwrap_or(0), &mut known);
            // SAFETY: its piece: the row of this token, written before a barrier.
            let row = unsafe { std::slice::from_raw_parts_mut(buffers.per_layer.at(token, 0), layers * size) };
            row.iter_mut().for_each(|number| *number *= of_model);
            for (part, known) in row.chunks_mut(size).zip(known.chunks(size)) {
                let at = part.as_mut_ptr();
                // SAFETY: as many numbers as the norm has.
                unsafe { tables.norm.apply((&shared.kernels, config), at, (0, size), at) };
                for (number, known) in part.iter_mut().zip(known) {
                    *number = (*number + known * of_id) * std::f32::consts::FRAC_1_SQRT_2;
                }
            }
        });
        self.barrier.wait();
        self.lap(7);
    }

    /// Whether what came out is made of numbers.
    fn check(&mut self) {
        let shared = self.shared;
        let x = &shared.buffers.x;
        let counter = shared.counter(shared.config.num_layers, Phase::Check);
        each(counter, shared.count(), FEW, |token| {
            // SAFETY: written before a barrier; nobody writes now.
            if !unsafe { shared.kernels.finite(x.at(token, 0), shared.config.hidden_size) } {
                let mut found = shared.not_finite.lock().unwrap_or_else(|e| e.into_inner());
                found.push(token);
            }
        });
        self.lap(7);
    }
}
