//! Loader of dense MLPs, and of the common form of dense MLPs and experts.

use std::sync::Arc;

use minisgl_kernels::TensorView;
use minisgl_kernels::panels::{Matrix, PANEL, Part as Piece};

use crate::error::{Error, Result};
use crate::model::adapter::Site;
use crate::model::config::{Activation, ModelConfig};
use crate::model::held::{Linear, Norm};
use crate::model::layers::loader::{Loader, MAX_SIZE, unsupported, within};
use crate::model::names::Part;
use crate::model::operation::{GateUp, Halves, Mlp, Operation, Project, Rows};
use crate::model::pieces::{pack, padded};

/// Rejects MLP settings that are invalid or not supported.
pub(super) fn check(config: &ModelConfig) -> Result<()> {
    for size in &config.intermediate_sizes {
        within("intermediate_size", (*size).max(1), MAX_SIZE)?;
    }
    let cuts = &config.gate_cuts;
    if !(cuts.is_empty() || cuts.len() == config.num_layers) || !cuts.iter().all(|cut| cut.is_finite()) {
        let why = "must be one finite value per layer";
        return Err(unsupported("activation_sparsity_pattern", cuts.len(), why));
    }
    if let Activation::ClampedSwiglu { alpha, limit } = config.activation
        && !(config.gated && alpha.is_finite() && limit > 0.0)
    {
        return Err(Error::unsupported(format!(
            "config.json: swiglu_limit: {limit}: must be above 0"
        )));
    }
    Ok(())
}

impl Loader<'_> {
    /// Returns the gate/up operation, and the down projection, whose target the caller sets. `adapted`: LoRA may apply.
    pub(super) fn mlp(&self, norm: Option<Arc<Norm>>, mlp: Mlp, adapted: bool) -> (Operation, Project) {
        let layer = adapted.then_some(self.layer);
        let down = Project {
            bias: mlp.down.bias,
            adapted: layer.map(|layer| (layer, Site::Down)),
            ..Project::new(Rows::Inner, vec![(0, mlp.down.weight)], Rows::Hidden)
        };
        let halves = GateUp {
            norm,
            halves: mlp.halves,
            adapted: layer,
        };
        (Operation::GateUp(halves), down)
    }

    /// Packs gate and up in one interleaved matrix if their element types are equal, else in two.
    pub(super) fn gated(&self, [gate, up]: [TensorView<'_>; 2], down: Matrix, inner: usize) -> Result<Mlp> {
        let (gate, up) = (Piece::new(gate), Piece::new(up));
        if gate.tensor.kind().held() == up.tensor.kind().held() {
            return Ok(self.assemble_mlp(self.packing.pack(&[gate, up], true, None)?, None, down, inner));
        }
        let [gate, up] = [gate, up].map(|one| self.packing.pack(&[one], false, None));
        Ok(self.assemble_mlp(gate?, Some(up?), down, inner))
    }

    /// Packs an MLP without a gate.
    pub(super) fn ungated(&self, up: TensorView<'_>, down: Matrix, inner: usize) -> Result<Mlp> {
        let up = self.packing.pack(&[Piece::new(up)], false, None)?;
        Ok(self.assemble_mlp(up, None, down, inner))
    }

    fn assemble_mlp(&self, gate_up: Matrix, up: Option<Matrix>, down: Matrix, inner: usize) -> Mlp {
        let linear = |weight| Linear { weight, bias: None };
        Mlp {
            halves: Halves {
                gate_up: linear(gate_up),
                up,
                inner,
                activation: self.config.activation,
                gated: self.config.gated,
                cut: None,
            },
            down: linear(down),
        }
    }

    /// Loads a dense MLP from the named parts.
    pub(super) fn dense(&self, [gate, up, down]: [Part; 3], inner: usize) -> Result<Mlp> {
        let (config, hidden) = (self.config, self.config.hidden_size);
        let bias = match (config.mlp_bias, config.gated) {
            (false, _) => None,
            (true, false) => Some(padded(self.vector(up, "bias", inner)?)),
            (true, true) => Some(interleave_panels(
                &self.vector(gate, "bias", inner)?,
                &self.vector(up, "bias", inner)?,
            )),
        };
        let down_weight = pack(&self.packing, &[self.part(down, [hidden, inner])?], false)?;
        let mut mlp = if !config.gated {
            let up = self.part(up, [inner, hidden])?;
            self.ungated(up.view()?, down_weight, inner)?
        } else if let Some(both) = self.fused(gate) {
            let both = self.part(both, [2 * inner, hidden])?;
            let half = [inner, hidden];
            let (gate, up) = unfuse(both.view()?, &half)?;
            self.gated([gate, up], down_weight, inner)?
        } else {
            let (gate, up) = (self.part(gate, [inner, hidden])?, self.part(up, [inner, hidden])?);
            self.gated([gate.view()?, up.view()?], down_weight, inner)?
        };
        mlp.halves.gate_up.bias = bias;
        mlp.down.bias = self.bias(config.mlp_bias || config.down_bias, down, hidden)?;
        Ok(mlp)
    }

    /// Returns the part that fuses `gate` with up, `None` if this file (some have both forms) has separate tensors.
    fn fused(&self, gate: Part) -> Option<Part> {
        let both = [(Part::Gate, Part::GateUp), (Part::SharedGate, Part::SharedGateUp)];
        let fused = both.into_iter().find(|(one, _)| *one == gate).map(|(_, both)| both);
        let apart = self.tensors.files.knows(gate) && self.tensors.has(gate, self.at(), "weight");
        fused.filter(|both| self.tensors.files.knows(*both) && !apart)
    }
}

/// Splits a fused tensor into gate and up, each of the shape `half`.
pub(super) fn unfuse<'a>(both: TensorView<'a>, half: &'a [usize; 2]) -> Result<(TensorView<'a>, TensorView<'a>)> {
    let (gate, up) = both.data().split_at(both.data().len() / 2);
    let part = |data| TensorView::new(both.name(), both.kind(), half, data);
    Ok((part(gate)?, part(up)?))
}

/// Interleaves two vectors panel by panel, like the panels of their matrices.
pub(super) fn interleave_panels(one: &[f32], other: &[f32]) -> Vec<f32> {
    let (one, other) = (padded(one.to_vec()), padded(other.to_vec()));
    one.chunks(PANEL)
        .zip(other.chunks(PANEL))
        .flat_map(|(a, b)| a.iter().chain(b).copied())
        .collect()
}
