//! Gate and up projection of an MLP, and the activation between them.
//!
//! Invariants: gate and up of a column are computed together, so that only their product is stored.

#![allow(unsafe_code)]

use std::ops::Range;

use minisgl_kernels::panels::PANEL;
use minisgl_kernels::{ActsPtr, Kernels, plain};

use crate::model::adapter::Site;
use crate::model::config::Activation;
use crate::model::grid::Grid;
use crate::model::operation::{GateUp, Halves};
use crate::model::products::Groups;
use crate::model::worker::{ITEM_TOKENS, Worker, each};

/// Factors for activations without a gate.
static ONES: [f32; 32 * PANEL] = [1.0; 32 * PANEL];

/// Computes `out = activation(gate) * up` for `n` elements. `out` may be `gate` but must not overlap otherwise.
///
/// # Safety
/// All three must be valid for `n` elements.
unsafe fn activate(
    activation: Activation,
    kernels: &Kernels,
    gate: *const f32,
    up: *const f32,
    n: usize,
    out: *mut f32,
) {
    // SAFETY: guaranteed by the caller.
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

impl Halves {
    /// Returns the work items of gate and up for `threads` threads.
    pub(super) fn groups(&self, threads: usize) -> Groups {
        if self.gated {
            Groups::pairs(self.panels(), threads)
        } else {
            Groups::new(&self.gate_up.weight, threads)
        }
    }
}

impl Worker<'_, '_> {
    /// Gates each token's per-layer embedding.
    pub(super) fn gate_per_layer(&mut self, activation: Activation, size: usize, first: usize) {
        let (shared, buffers) = (self.shared, self.shared.buffers);
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            let (gate, up) = (buffers.inner.at(token, 0), buffers.per_layer.at(token, first));
            // SAFETY: this thread's work item: the row of this token in `inner`; both were written before a barrier.
            unsafe { activate(activation, &shared.kernels, gate, up, size, gate) };
        });
        self.barrier.wait();
    }

    /// Computes gate, up and activation of all tokens.
    pub(super) fn gate_up(&mut self, mlp: &GateUp) {
        let (shared, halves, norm) = (self.shared, &mlp.halves, mlp.norm.as_deref());
        let (buffers, hidden) = (shared.buffers, shared.hidden);
        if let Some(layer) = mlp.adapted {
            self.lora_shrink((layer, Site::GateUp), &buffers.x, norm, hidden);
        }
        let mode = shared.mode.with_all(halves.matrices());
        let acts = self.prepare(&buffers.x, norm, hidden, mode);
        let (counter, groups, blocks) = (self.counter(), halves.groups(shared.threads), shared.blocks());
        while let Some(piece) = counter.claim(blocks * groups.count) {
            let (block, group) = (piece / groups.count, piece % groups.count);
            let (rows, kernels) = shared.block(block);
            let panels = groups.panels(group);
            self.gate_and_up(kernels, (halves, mlp.adapted), acts, panels, rows, &buffers.inner);
        }
        self.barrier.wait();
        if let Some(by) = halves.cut {
            self.sparsify_gates(halves, by);
        }
    }

    /// Sparsifies each token's gates, `max(gate - (mean + by * std), 0)`, applies the activation, multiplies by up.
    fn sparsify_gates(&mut self, halves: &Halves, by: f32) {
        let (shared, count) = (self.shared, halves.inner.next_multiple_of(PANEL));
        let (gates, ups) = (&shared.buffers.inner, &shared.buffers.ups);
        each(self.counter(), shared.count(), ITEM_TOKENS, |token| {
            let (gate, up) = (gates.at(token, 0), ups.at(token, 0));
            // SAFETY: this thread's work item: the rows of this token, written before a barrier.
            unsafe {
                plain::cut(std::slice::from_raw_parts_mut(gate, halves.inner), by);
                activate(halves.activation, &shared.kernels, gate, up, count, gate);
            }
        });
        self.barrier.wait();
    }

    /// Computes activation(gate) * up for the rows `rows` of `acts`, and writes the columns of `panels` in the same
    /// rows of `out`. `layer`: apply LoRA adapters of this layer; only if rows are the tokens of the step.
    pub(super) fn gate_and_up(
        &mut self,
        kernels: Kernels,
        (halves, layer): (&Halves, Option<usize>),
        acts: ActsPtr,
        panels: Range<usize>,
        rows: Range<usize>,
        out: &Grid,
    ) {
        let (shared, width) = (self.shared, panels.len() * PANEL);
        self.own.gate_up.reserve(rows.len());
        let both = self.own.gate_up.at(0, 0);
        // SAFETY: `both` belongs to this thread; `acts` was written before a barrier.
        unsafe {
            match &halves.up {
                None => {
                    let whole = &halves.gate_up.weight;
                    kernels.matmul(whole, panels.clone(), acts, rows.clone(), both, width, false);
                }
                Some(up) => {
                    for panel in panels.clone() {
                        let part = if panel % 2 == 0 { &halves.gate_up.weight } else { up };
                        let (its, at) = (panel / 2..panel / 2 + 1, (panel - panels.start) * PANEL);
                        kernels.matmul(part, its, acts, rows.clone(), both.add(at), width, false);
                    }
                }
            }
            if let Some(layer) = layer {
                shared.lora_expand((layer, Site::GateUp), panels.clone(), rows.clone(), both, width);
            }
            for (i, row) in rows.enumerate() {
                let at = both.add(i * width);
                if let Some(bias) = &halves.gate_up.bias {
                    kernels.add(at, bias[panels.start * PANEL..].as_ptr(), width);
                }
                self.between(&kernels, halves, at, panels.clone(), (out, row));
            }
        }
    }

    /// Applies the activation to one row, whose gate and up panels begin at `at`.
    ///
    /// # Safety
    /// No other thread may use these columns of the row meanwhile.
    unsafe fn between(
        &self,
        kernels: &Kernels,
        halves: &Halves,
        at: *const f32,
        panels: Range<usize>,
        (out, row): (&Grid, usize),
    ) {
        let width = panels.len() * PANEL;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let to = out.at(row, panels.start / 2 * PANEL);
            match halves.activation {
                Activation::Silu if halves.gated && halves.cut.is_none() => {
                    return kernels.silu_mul_of_panels(at, width / 2, to);
                }
                Activation::Gelu if halves.gated && halves.cut.is_none() => {
                    return kernels.gelu_mul_of_panels(at, width / 2, to);
                }
                _ => {}
            }
        }
        // adjacent elements of gate (or up), and the distance to the next ones
        let (some, next) = if halves.gated {
            (PANEL, 2 * PANEL)
        } else {
            (ONES.len(), ONES.len())
        };
        for (i, begin) in (0..width).step_by(next).enumerate() {
            let count = some.min(width - begin);
            let column = panels.start * PANEL * some / next + i * some;
            let to = out.at(row, column);
            // SAFETY: guaranteed by the caller.
            unsafe {
                let gate = at.add(begin);
                let up = if halves.gated { gate.add(PANEL) } else { ONES.as_ptr() };
                if halves.cut.is_some() {
                    to.copy_from_nonoverlapping(gate, count);
                    let ups = self.shared.buffers.ups.at(row, column);
                    ups.copy_from_nonoverlapping(up, count);
                } else {
                    activate(halves.activation, kernels, gate, up, count, to);
                }
            }
        }
    }
}
