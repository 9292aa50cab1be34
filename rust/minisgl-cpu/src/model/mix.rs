//! What keeps a state in a layer: the frame that all kinds have in a forward.
//!
//! Invariants: a state goes through its tokens one by one, in one order of sums, whatever else is in the step and
//! however a prompt was cut; one piece has all tokens of a row for its part of the state.

#![allow(unsafe_code)]

use std::ops::Range;

use minisgl_kernels::Mode;

use crate::model::buffers::Phase;
use crate::model::weights::{Layer, Mixer, Mixing};
use crate::model::worker::Worker;

impl Worker<'_, '_> {
    pub(super) fn mix(&mut self, index: usize, layer: &Layer, mixer: &Mixer) {
        let shared = self.shared;
        let (config, buffers) = (shared.config, shared.buffers);
        let norm = layer.attention_norm.as_ref();
        // one preparation serves all: integers where matrices are, beside numbers as they are
        let mode = shared.mode.with_all(mixer.into.iter().map(|(_, matrix)| matrix));
        let integers = mixer
            .into
            .iter()
            .any(|(_, matrix)| shared.mode.int8_with(matrix.kind()));
        let mode = if integers && !mode.has_int8() { Mode::Both } else { mode };
        let acts = self.prepare(index, Phase::PrepareMix, &buffers.x, norm, config.hidden_size, mode);
        self.project_all(index, (Phase::MixIn, None), &mixer.into, acts, &buffers.qkv);
        self.barrier.wait();
        self.lap(1);
        match &mixer.kind {
            Mixing::Convolving(conv) => self.convolve(index, conv),
            Mixing::Delta(delta) => self.delta(index, delta),
            Mixing::Mamba(mamba) => self.mamba(index, mamba),
        }
        self.barrier.wait();
        self.lap(3);
        let (width, mode) = (mixer.out.weight.k(), shared.mode.with(&mixer.out.weight));
        let acts = self.prepare(index, Phase::PrepareMixOut, &buffers.attended, None, width, mode);
        self.add_product(index, (Phase::MixOut, None), &mixer.out, acts, self.way_out(layer));
        if layer.attention.is_some() {
            self.add_aside(index, Phase::AddOut, None, 1.0); // what attention gave
        }
        self.lap(4);
    }

    /// Deal out the rows of the step, each in as many parts: `work` gets the row, its tokens and the part.
    pub(super) fn each_row(
        &self,
        index: usize,
        phase: Phase,
        parts: usize,
        mut work: impl FnMut(usize, Range<usize>, usize),
    ) {
        let rows = &self.shared.rows;
        while let Some(piece) = self.shared.counter(index, phase).take(rows.slots.len() * parts) {
            let (row, part) = (piece / parts, piece % parts);
            let [from, to] = [row, row + 1].map(|at| rows.qo_indptr[at] as usize);
            work(row, from..to, part);
        }
    }
}
