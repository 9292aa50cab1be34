//! The second half of a layer where all tokens go through one MLP.
//!
//! Invariants: gate and up of a column are there at once, so that only their product is kept.

#![allow(unsafe_code)]

use std::ops::Range;

use crate::kernels::{ActsPtr, Kernels};
use crate::model::adapter::Site;
use crate::model::buffers::Phase;
use crate::model::config::Activation;
use crate::model::grid::Grid;
use crate::model::products::Groups;
use crate::model::weights::{Layer, Mlp};
use crate::model::worker::Worker;
use crate::weights::PANEL;

impl Worker<'_, '_> {
    pub(super) fn dense(&mut self, index: usize, layer: &Layer, mlp: &Mlp) {
        let shared = self.shared;
        let buffers = shared.buffers;
        self.lower(
            index,
            (Phase::LowerMlp, Site::GateUp),
            &buffers.x,
            Some(&layer.mlp_norm),
            shared.config.hidden_size,
        );
        let acts = self.prepare(
            index,
            Phase::PrepareMlp,
            &buffers.x,
            Some(&layer.mlp_norm),
            shared.config.hidden_size,
            mlp.gate_up_mode(shared.mode),
        );
        let counter = shared.counter(index, Phase::GateUp);
        let groups = Groups::pairs(mlp.gate_up_panels(), shared.threads);
        let blocks = shared.blocks();
        while let Some(piece) = counter.take(blocks * groups.count) {
            let (block, group) = (piece / groups.count, piece % groups.count);
            let (rows, kernels) = shared.block(block);
            self.gate_and_up(
                kernels,
                mlp,
                acts,
                groups.panels(group),
                rows.clone(),
                &buffers.inner,
                rows.start,
                Some(index),
            );
        }
        self.barrier.wait();
        self.lap(5);
        self.lower(index, (Phase::LowerDown, Site::Down), &buffers.inner, None, mlp.inner);
        let acts = self.prepare(
            index,
            Phase::PrepareDown,
            &buffers.inner,
            None,
            mlp.inner,
            shared.mode.with(&mlp.down.weight),
        );
        let behind = layer
            .norms_behind
            .as_ref()
            .map(|(_, norm)| (norm.as_slice(), Phase::AddDown));
        self.add_product(index, (Phase::Down, Site::Down), &mlp.down, acts, behind);
        self.lap(6);
    }

    /// activation(gate) * up of the rows `rows` of `acts`, into rows of `out` from `first` on, columns of the panel pairs.
    /// `layer`: where these are the tokens of the step, with adapters.
    #[allow(clippy::too_many_arguments)] // a product has as many
    pub(super) fn gate_and_up(
        &mut self,
        kernels: Kernels,
        mlp: &Mlp,
        acts: ActsPtr,
        panels: Range<usize>,
        rows: Range<usize>,
        out: &Grid,
        first: usize,
        layer: Option<usize>,
    ) {
        let (shared, width) = (self.shared, panels.len() * PANEL);
        self.own.both.reserve(rows.len());
        let both = self.own.both.at(0, 0);
        // SAFETY: `both` is this thread's; `acts` was written before a barrier.
        unsafe {
            match &mlp.up {
                None => {
                    let whole = &mlp.gate_up.weight;
                    kernels.matmul(whole, panels.clone(), acts, rows.clone(), both, width, false);
                }
                Some(up) => {
                    for panel in panels.clone() {
                        let part = if panel % 2 == 0 { &mlp.gate_up.weight } else { up };
                        let (its, at) = (panel / 2..panel / 2 + 1, (panel - panels.start) * PANEL);
                        kernels.matmul(part, its, acts, rows.clone(), both.add(at), width, false);
                    }
                }
            }
            if let Some(index) = layer {
                shared.raise((index, Site::GateUp), panels.clone(), rows.clone(), both, width);
            }
            for row in 0..rows.len() {
                let at = both.add(row * width);
                if let Some(bias) = &mlp.gate_up.bias {
                    kernels.add(at, bias[panels.start * PANEL..].as_ptr(), width);
                }
                for pair in 0..panels.len() / 2 {
                    let column = (panels.start / 2 + pair) * PANEL;
                    let gate = at.add(2 * pair * PANEL);
                    // SAFETY: its piece: these columns of these rows.
                    let (up, to) = (gate.add(PANEL), out.at(first + row, column));
                    match shared.config.activation {
                        Activation::Silu => kernels.silu_mul(gate, up, PANEL, to),
                        Activation::Gelu => kernels.gelu_mul(gate, up, PANEL, to),
                    }
                }
            }
        }
    }
}
