//! The second half of a layer where all tokens go through one MLP.
//!
//! Invariants: gate and up of a column are there at once, so that only their product is kept.

#![allow(unsafe_code)]

use std::ops::Range;

use minisgl_kernels::panels::PANEL;
use minisgl_kernels::{ActsPtr, Kernels, plain};

use crate::model::adapter::Site;
use crate::model::buffers::Phase;
use crate::model::config::{Activation, Norms};
use crate::model::grid::Grid;
use crate::model::products::{Groups, To};
use crate::model::weights::{Layer, Mlp, Norm, PerLayerPart};
use crate::model::worker::{FEW, Worker, each};

/// What an activation without a gate beside it is multiplied with.
static ONES: [f32; 32 * PANEL] = [1.0; 32 * PANEL];

/// `out = activation(gate) * up` of `n` numbers; `out` may be `gate`, and overlaps neither else.
///
/// # Safety
/// As of the kernels.
unsafe fn activate(
    activation: Activation,
    kernels: &Kernels,
    gate: *const f32,
    up: *const f32,
    n: usize,
    out: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        match activation {
            Activation::Silu => kernels.silu_mul(gate, up, n, out),
            Activation::ScaledSilu { gate: by, out: of_out } => plain::scaled_silu_mul(gate, up, n, (by, of_out), out),
            Activation::Gelu => kernels.gelu_mul(gate, up, n, out),
            Activation::GeluErf => {
                std::ptr::copy(gate, out, n);
                let (numbers, by) = (
                    std::slice::from_raw_parts_mut(out, n),
                    std::slice::from_raw_parts(up, n),
                );
                plain::gelu_erf_mul(kernels.isa(), numbers, by);
            }
            Activation::Relu2 => plain::relu2_mul(gate, up, n, out),
            Activation::ClampedSwiglu { alpha, limit } => plain::clamped_swiglu(gate, up, n, (alpha, limit), out),
        }
    }
}

impl Worker<'_, '_> {
    pub(super) fn dense(&mut self, index: usize, layer: &Layer, mlp: &Mlp) {
        let config = self.shared.config;
        let parallel = config.is_parallel();
        let scale = layer.scale_behind_mlp();
        let norm = layer.norms_behind.as_ref().map(|(_, norm)| norm);
        let to = if let Some(norm) = norm.filter(|_| config.norms == Norms::Over) {
            To::Under(norm, Phase::AddDown)
        } else if !parallel && (config.has_behind() || scale != 1.0) {
            To::Behind(norm, Phase::AddDown, scale)
        } else {
            To::Hidden
        };
        let phases = [Phase::PrepareMlp, Phase::GateUp, Phase::PrepareDown, Phase::Down];
        self.mlp(index, layer.norm_before_mlp(), mlp, phases, true, to);
        if parallel {
            self.add_aside(index, Phase::AddDown, None, scale);
        }
    }

    /// Add to each token what the layer makes of the token's numbers for it; the sums are multiplied by `scale`.
    pub(super) fn per_layer(&mut self, index: usize, part: &PerLayerPart, scale: f32) {
        let shared = self.shared;
        let (buffers, config) = (shared.buffers, shared.config);
        let size = config.per_layer.map_or(0, |per_layer| per_layer.size);
        let mode = shared.mode.with(&part.gate.1);
        // where there are several streams, `correct` has left what is read there
        let several = config.streams.is_some();
        let from = if several { &buffers.behind } else { &buffers.x };
        let acts = self.prepare(index, Phase::PrepareGate, from, None, config.hidden_size, mode);
        let gate = std::slice::from_ref(&part.gate);
        self.project_all(index, (Phase::PerLayerGate, None), gate, acts, &buffers.inner);
        self.barrier.wait();
        each(shared.counter(index, Phase::PerLayer), shared.count(), FEW, |token| {
            let (gate, up) = (buffers.inner.at(token, 0), buffers.per_layer.at(token, index * size));
            // SAFETY: its piece: the row of this token in `inner`; both were written before a barrier.
            unsafe { activate(config.activation, &shared.kernels, gate, up, size, gate) };
        });
        self.barrier.wait();
        let mode = shared.mode.with(&part.out.weight);
        let acts = self.prepare(index, Phase::PreparePerLayer, &buffers.inner, None, size, mode);
        let to = if several {
            To::Aside
        } else {
            To::Behind(Some(&part.norm), Phase::AddPerLayer, scale)
        };
        self.add_product(index, (Phase::PerLayerOut, None), &part.out, acts, to);
        if several {
            self.add_to_streams(index, &part.norm);
        }
        self.lap(6);
    }

    /// One MLP for all tokens. `adapts`: adapters may change it.
    pub(super) fn mlp(
        &mut self,
        index: usize,
        norm: Option<&Norm>,
        mlp: &Mlp,
        [prepare, gate_up, prepare_down, down]: [Phase; 4],
        adapts: bool,
        to: To<'_>,
    ) {
        let shared = self.shared;
        let (buffers, hidden) = (shared.buffers, shared.config.hidden_size);
        if adapts {
            self.lower(index, (Phase::LowerMlp, Site::GateUp), &buffers.x, norm, hidden);
        }
        let mode = mlp.gate_up_mode(shared.mode);
        let acts = self.prepare(index, prepare, &buffers.x, norm, hidden, mode);
        let counter = shared.counter(index, gate_up);
        let groups = if shared.config.gated {
            Groups::pairs(mlp.gate_up_panels(), shared.threads)
        } else {
            Groups::of(&mlp.gate_up.weight, shared.threads)
        };
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
                adapts.then_some(index),
            );
        }
        self.barrier.wait();
        if let Some(by) = shared.config.gate_cut(index) {
            self.cut_gates(index, mlp.inner, by);
        }
        self.lap(5);
        if adapts {
            self.lower(index, (Phase::LowerDown, Site::Down), &buffers.inner, None, mlp.inner);
        }
        let mode = shared.mode.with(&mlp.down.weight);
        let acts = self.prepare(index, prepare_down, &buffers.inner, None, mlp.inner, mode);
        self.add_product(index, (down, adapts.then_some(Site::Down)), &mlp.down, acts, to);
        self.lap(6);
    }

    /// Each token's gates, which lie there as they are, are cut and go on.
    fn cut_gates(&mut self, index: usize, inner: usize, by: f32) {
        let shared = self.shared;
        let (gates, ups) = (&shared.buffers.inner, &shared.buffers.ups);
        each(shared.counter(index, Phase::Cut), shared.count(), FEW, |token| {
            let (gate, up) = (gates.at(token, 0), ups.at(token, 0));
            // SAFETY: its piece: the rows of this token, written before a barrier.
            unsafe {
                plain::cut(std::slice::from_raw_parts_mut(gate, inner), by);
                activate(
                    shared.config.activation,
                    &shared.kernels,
                    gate,
                    up,
                    inner.next_multiple_of(PANEL),
                    gate,
                );
            }
        });
        self.barrier.wait();
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
                // numbers that lie side by side, and where those of the same kind go on
                let (some, next) = if shared.config.gated {
                    (PANEL, 2 * PANEL)
                } else {
                    (ONES.len(), ONES.len())
                };
                for (i, begin) in (0..width).step_by(next).enumerate() {
                    let count = some.min(width - begin);
                    let column = panels.start * PANEL * some / next + i * some;
                    let gate = at.add(begin);
                    // SAFETY: its piece: these columns of these rows.
                    let to = out.at(first + row, column);
                    let up = if shared.config.gated {
                        gate.add(PANEL).cast_const()
                    } else {
                        ONES.as_ptr()
                    };
                    if mlp.cut {
                        to.copy_from_nonoverlapping(gate, count);
                        let ups = shared.buffers.ups.at(first + row, column);
                        ups.copy_from_nonoverlapping(up, count);
                    } else {
                        activate(shared.config.activation, &kernels, gate, up, count, to);
                    }
                }
            }
        }
    }
}
