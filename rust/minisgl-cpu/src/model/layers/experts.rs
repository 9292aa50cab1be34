//! Loader of routed experts: each token goes through the few with its highest router scores.

use std::sync::Arc;

use minisgl_kernels::TensorView;
use minisgl_kernels::panels::Matrix;

use crate::error::Result;
use crate::model::config::{ModelConfig, MoeConfig, Norms};
use crate::model::held::Norm;
use crate::model::layers::loader::{Loader, MAX_SIZE, unsupported, within};
use crate::model::layers::mlp::{interleave_panels, unfuse};
use crate::model::names::{At, Part};
use crate::model::operation::{Add, Combine, Experts, Mlp, Operation, Project, Route, Rows};
use crate::model::pieces::{pack, padded};
use crate::model::tensors::ModelTensor;

/// Rejects settings of experts that are invalid or not supported.
pub(super) fn check(config: &ModelConfig) -> Result<()> {
    let Some(moe) = &config.moe else {
        return Ok(());
    };
    let sizes = [
        ("num_experts", moe.num_experts, 4096),
        ("moe_intermediate_size", moe.intermediate_size, MAX_SIZE),
        ("num_experts_per_tok", moe.experts_per_token, moe.num_experts),
        ("shared_expert_intermediate_size", moe.shared_size.max(1), MAX_SIZE),
    ];
    for (name, value, most) in sizes {
        within(name, value, most)?;
    }
    let groups = moe.groups;
    if groups == 0 || !moe.num_experts.is_multiple_of(groups) {
        let why = format!("does not divide {} experts", moe.num_experts);
        return Err(unsupported("n_group", groups, &why));
    }
    let most = moe.chosen_groups * (moe.num_experts / groups);
    if moe.chosen_groups > groups || moe.experts_per_token > most {
        let why = format!("must be 1 to {groups}, with {} experts or more", moe.experts_per_token);
        return Err(unsupported("topk_group", moe.chosen_groups, &why));
    }
    Ok(())
}

impl Loader<'_> {
    /// Returns the operations of an MLP with experts: routing, experts, the shared expert or dense MLP, and their sum,
    /// which is added as `add` says. `norm` is the norm of the MLP's input.
    pub(super) fn experts(&self, moe: &MoeConfig, norm: Option<Arc<Norm>>, add: Add) -> Result<Vec<Operation>> {
        let (config, hidden, count) = (self.config, self.config.hidden_size, moe.num_experts);
        let mut router = vec![self.part(Part::Router, [count, hidden])?];
        let shared = if moe.shared_size > 0 {
            if moe.shared_gated {
                router.push(self.part(Part::SharedRouter, [1, hidden])?);
            }
            let parts = [Part::SharedGate, Part::SharedUp, Part::SharedDown];
            Some(self.dense(parts, moe.shared_size)?)
        } else if moe.beside {
            let inner = config.intermediate_sizes[self.layer];
            Some(self.dense([Part::Gate, Part::Up, Part::Down], inner)?)
        } else {
            None
        };
        let vector = |there: bool, part, what| there.then(|| self.vector(part, what, count)).transpose();
        let own_norm = moe.router_norm.then(|| self.router_norm()).transpose()?;
        let route = Route {
            norm: own_norm.map(Arc::new).or_else(|| norm.clone()),
            router: pack(&self.packing, &router, false)?,
            choice_bias: vector(moe.choice_bias, Part::ChoiceBias, "bias")?,
            bias: self.bias(moe.router_bias, Part::Router, count)?,
            scales: vector(moe.expert_scale, Part::ExpertScale, "weight")?,
            by: Arc::new(moe.clone()),
        };
        let before = moe.beside.then(|| self.norm(Part::ExpertsNorm)).transpose()?;
        let experts = Experts {
            norm: before.map(Arc::new).or_else(|| norm.clone()),
            experts: self.all_experts(moe)?,
            per_token: moe.experts_per_token,
            weighs_input: moe.weighs_input,
        };
        let behind = || Ok((self.norm(Part::ExpertsNormBehind)?, self.norm(Part::BesideNormBehind)?));
        let combine = Combine {
            per_token: moe.experts_per_token,
            weighs_input: moe.weighs_input,
            sum_bias: moe
                .sum_bias
                .then(|| self.vector(Part::ExpertsSumBias, "bias", hidden))
                .transpose()?,
            aside: shared.as_ref().map(|_| moe.shared_gated.then_some(count)),
            norms: moe.beside.then(behind).transpose()?.map(Box::new),
            over: self.config.norms == Norms::Over,
            add,
        };
        let mut operations = vec![Operation::Route(route), Operation::Experts(experts)];
        if let Some(shared) = shared {
            let (halves, down) = self.mlp(norm, shared, false);
            let down = Project {
                to: Rows::Aside,
                ..down
            };
            operations.extend([halves, Operation::Project(down)]);
        }
        operations.push(Operation::Combine(combine));
        Ok(operations)
    }

    fn all_experts(&self, moe: &MoeConfig) -> Result<Vec<Mlp>> {
        let apart = self.tensors.files.knows(Part::ExpertDown);
        if !apart || self.tensors.has(Part::ExpertsDown, self.at(), "weight") {
            return self.stacked_experts(moe);
        }
        (0..moe.num_experts)
            .map(|expert| self.own_expert(expert, moe.intermediate_size))
            .collect()
    }

    /// Loads the norm of the router's input, with its weights divided by the root of the hidden size.
    fn router_norm(&self) -> Result<Norm> {
        let hidden = self.config.hidden_size;
        let mut weight = self.vector(Part::RouterNorm, "weight", hidden)?;
        let by = (hidden as f32).sqrt().recip();
        weight.iter_mut().for_each(|number| *number *= by);
        Ok(Norm {
            weight: padded(weight),
            bias: None,
            eps: self.config.norm_eps,
            layer_norm: self.config.layer_norm,
        })
    }

    /// Loads an expert whose matrices are separate tensors.
    fn own_expert(&self, expert: usize, inner: usize) -> Result<Mlp> {
        let hidden = self.config.hidden_size;
        let at = At { expert, ..self.at() };
        let of = |part, shape: [usize; 2]| self.tensors.part(part, at, &shape);
        if !self.config.gated {
            let up = of(Part::ExpertUp, [inner, hidden])?;
            let down = pack(&self.packing, &[of(Part::ExpertDown, [hidden, inner])?], false)?;
            return self.ungated(up.view()?, down, inner);
        }
        let (gate, up) = (
            of(Part::ExpertGate, [inner, hidden])?,
            of(Part::ExpertUp, [inner, hidden])?,
        );
        let down = pack(&self.packing, &[of(Part::ExpertDown, [hidden, inner])?], false)?;
        self.gated([gate.view()?, up.view()?], down, inner)
    }

    /// Loads experts stacked in one tensor per matrix; gate and up may share one (checkpoints) or not (GGUF).
    fn stacked_experts(&self, moe: &MoeConfig) -> Result<Vec<Mlp>> {
        let (hidden, inner, count) = (self.config.hidden_size, moe.intermediate_size, moe.num_experts);
        let (files, half) = (&self.tensors.files, [count, inner, hidden]);
        let transposed =
            files.knows(Part::ExpertsDownTransposed) && !self.tensors.has(Part::ExpertsDown, self.at(), "weight");
        let of = |part, shape: [usize; 3]| self.tensors.part(part, self.at(), &shape);
        let both = if !self.config.gated {
            vec![of(Part::ExpertsUp, half)?]
        } else if transposed {
            vec![of(Part::ExpertsGateUpTransposed, [count, hidden, 2 * inner])?]
        } else if files.knows(Part::ExpertsGateUp) {
            vec![of(Part::ExpertsGateUp, [count, 2 * inner, hidden])?]
        } else {
            vec![of(Part::ExpertsGate, half)?, of(Part::ExpertsUp, half)?]
        };
        let down = if transposed {
            of(Part::ExpertsDownTransposed, half)?
        } else {
            of(Part::ExpertsDown, [count, hidden, inner])?
        };
        let views: Vec<TensorView<'_>> = both.iter().map(ModelTensor::view).collect::<Result<_>>()?;
        let (down, biases) = (down.view()?, self.expert_biases(moe)?);
        let one = |expert| -> Result<Mlp> {
            let down = ModelTensor::transposed(down.slice(expert)?, transposed)?;
            let down = pack(&self.packing, &[down], false)?;
            let mut mlp = match views.as_slice() {
                [up] if !self.config.gated => self.ungated(up.slice(expert)?, down, inner)?,
                [both] => {
                    let both = ModelTensor::transposed(both.slice(expert)?, transposed)?;
                    self.fused_expert(both.view()?, down, inner)?
                }
                _ => self.gated([views[0].slice(expert)?, views[1].slice(expert)?], down, inner)?,
            };
            if let Some([gate, up, down]) = biases.get(expert) {
                mlp.halves.gate_up.bias = Some(interleave_panels(gate, up));
                mlp.down.bias = Some(padded(down.clone()));
            }
            Ok(mlp)
        };
        (0..count).map(one).collect()
    }

    /// Creates an expert whose gate and up projection are one tensor.
    fn fused_expert(&self, both: TensorView<'_>, down: Matrix, inner: usize) -> Result<Mlp> {
        if !self.tensors.files.gate_up_in_turns {
            let half = [inner, self.config.hidden_size];
            let (gate, up) = unfuse(both, &half)?;
            return self.gated([gate, up], down, inner);
        }
        let [gate, up] = [0, 1].map(|first| ModelTensor::select_rows(&both, (first..2 * inner).step_by(2)));
        self.gated([gate.view()?, up.view()?], down, inner)
    }

    /// Loads the biases of gate, up and down for each expert; empty if experts have none.
    fn expert_biases(&self, moe: &MoeConfig) -> Result<Vec<[Vec<f32>; 3]>> {
        if !moe.bias {
            return Ok(Vec::new());
        }
        let (files, inner) = (&self.tensors.files, moe.intermediate_size);
        let of = |part, size: usize| -> Result<Vec<f32>> {
            let tensor = self.tensors.part(part, self.at(), &[moe.num_experts, size])?;
            Ok(tensor.view()?.decode())
        };
        let (gate, up) = if files.knows(Part::ExpertsGateUpBias) {
            let both = of(Part::ExpertsGateUpBias, 2 * inner)?;
            let side = |up: usize| -> Vec<f32> {
                let at = |i: usize| {
                    if files.gate_up_in_turns {
                        i * 2 + up
                    } else {
                        i / inner * 2 * inner + up * inner + i % inner
                    }
                };
                (0..both.len() / 2).map(|i| both[at(i)]).collect()
            };
            (side(0), side(1))
        } else {
            (of(Part::ExpertsGateBias, inner)?, of(Part::ExpertsUpBias, inner)?)
        };
        let down = of(Part::ExpertsDownBias, self.config.hidden_size)?;
        let of_up = gate.chunks_exact(inner).zip(up.chunks_exact(inner));
        let all = of_up.zip(down.chunks_exact(self.config.hidden_size));
        Ok(all
            .map(|((gate, up), down)| [gate, up, down].map(<[f32]>::to_vec))
            .collect())
    }
}
