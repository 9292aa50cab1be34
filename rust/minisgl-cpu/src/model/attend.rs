//! The first half of a layer: projections, rotation, keys and values into their pages, attention, and the way out.
//!
//! Invariants: keys and values of a step are in their pages before any of its rows reads them.

#![allow(unsafe_code)]

use crate::attention::Call;
use crate::kernels::Mode;
use crate::model::adapter::Site;
use crate::model::buffers::Phase;
use crate::model::weights::Layer;
use crate::model::worker::{FEW, Worker, each};

impl Worker<'_, '_> {
    pub(super) fn attend(&mut self, index: usize, layer: &Layer) {
        let shared = self.shared;
        let (config, buffers) = (shared.config, shared.buffers);
        // one preparation serves all parts
        let whole = layer.qkv.iter().all(|(_, part)| shared.mode.with(part) == shared.mode);
        let mode = if whole { shared.mode } else { Mode::Exact };
        self.lower(
            index,
            (Phase::LowerQkv, Site::Qkv),
            &buffers.x,
            Some(&layer.attention_norm),
            config.hidden_size,
        );
        let acts = self.prepare(
            index,
            Phase::Prepare,
            &buffers.x,
            Some(&layer.attention_norm),
            config.hidden_size,
            mode,
        );
        self.project_all(index, Phase::Qkv, &layer.qkv, acts, &buffers.qkv);
        self.barrier.wait();
        self.lap(1);
        each(shared.counter(index, Phase::Rotate), shared.count(), FEW, |token| {
            self.rotate_and_store(index, layer, token);
        });
        self.barrier.wait();
        self.lap(2);
        let call = Call {
            rows: shared.rows,
            kv: shared.kv,
            layer: index,
            queries: buffers.qkv.at(0, 0),
            query_stride: buffers.qkv.stride(),
            out: buffers.attended.at(0, 0),
            out_stride: buffers.attended.stride(),
        };
        let plan = shared.plan;
        while let Some(unit) = shared.counter(index, Phase::Attend).take(plan.units(index)) {
            // SAFETY: its piece; keys and values of this layer are written before the barrier.
            unsafe { shared.attention.run_unit(plan, unit, &call, self.scratch) };
        }
        self.barrier.wait();
        if plan.merges(index) > 0 {
            while let Some(unit) = shared.counter(index, Phase::Merge).take(plan.merges(index)) {
                // SAFETY: its piece; what units left is written before the barrier.
                unsafe { shared.attention.merge(plan, unit, &call) };
            }
            self.barrier.wait();
        }
        self.lap(3);
        let width = config.num_heads * config.head_dim;
        self.lower(index, (Phase::LowerOut, Site::Out), &buffers.attended, None, width);
        let acts = self.prepare(
            index,
            Phase::PrepareOut,
            &buffers.attended,
            None,
            width,
            shared.mode.with(&layer.out.weight),
        );
        let behind = layer
            .norms_behind
            .as_ref()
            .map(|(norm, _)| (norm.as_slice(), Phase::AddOut));
        self.add_product(index, (Phase::Out, Site::Out), &layer.out, acts, behind);
        self.lap(4);
    }

    /// Biases, head norms and rotation of one token, then its keys and values go into their page.
    fn rotate_and_store(&self, index: usize, layer: &Layer, token: usize) {
        let shared = self.shared;
        let (config, buffers, kernels) = (shared.config, shared.buffers, shared.kernels);
        let dim = config.head_dim;
        let (heads, kv_heads) = (config.num_heads, config.num_kv_heads);
        let row = buffers.qkv.at(token, 0);
        let angles = config.rotary[index].map(|table| {
            let at = table * dim;
            (buffers.angles.at(token, at), buffers.angles.at(token, at + dim / 2))
        });
        // SAFETY: its piece: the row of this token in `qkv`; `angles` was written before a barrier.
        unsafe {
            if let Some(bias) = &layer.qkv_bias {
                kernels.add(row, bias.as_ptr(), (heads + 2 * kv_heads) * dim);
            }
            for head in 0..heads + kv_heads {
                let at = row.add(head * dim);
                if let Some((of_queries, of_keys)) = &layer.head_norms {
                    let norm = if head < heads { of_queries } else { of_keys };
                    kernels.rms_norm(at, norm.as_ptr(), dim, config.rms_norm_eps, at);
                }
                if let Some((cos, sin)) = angles {
                    kernels.rotate(at, cos, sin, dim / 2);
                }
            }
            let keys = row.add(heads * dim);
            let slot = std::slice::from_ref(&shared.tokens.slots[token]);
            shared.kv.store(index, slot, keys, keys.add(kv_heads * dim), 0);
        }
    }
}
