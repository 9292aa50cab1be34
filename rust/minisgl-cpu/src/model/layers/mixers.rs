//! Loader of layers with a recurrent state: short convolutions, gated delta nets, Mamba-2.

use std::sync::Arc;

use minisgl_kernels::convolution::Convolution;
use minisgl_kernels::mamba::Gating;
use minisgl_kernels::panels::Part as Piece;

use crate::error::Result;
use crate::model::config::{DeltaNet, MAX_STATE, Mamba2, ModelConfig, ShortConv, StateKind};
use crate::model::delta::{Delta, grouped_row};
use crate::model::held::Norm;
use crate::model::layers::loader::{Loader, unsupported};
use crate::model::names::Part;
use crate::model::operation::{Convolve, Mamba, Operation, Project, Projections, Rows};
use crate::model::pieces::{padded, side_by_side};
use crate::model::tensors::ModelTensor;

/// Rejects recurrent states that are invalid or not supported.
pub(super) fn check(config: &ModelConfig) -> Result<()> {
    let size = config.state.map_or(0, |kind| kind.size(config));
    for layer in (0..config.num_layers).filter(|layer| config.state_layers[*layer]) {
        let both = config.attends[layer] && (config.has_behind() || config.is_parallel());
        if size == 0 || size > MAX_STATE || both {
            return Err(unsupported("layer_types", layer, "its state is not supported"));
        }
    }
    Ok(())
}

/// Input projection, recurrent operation, and the output projection as (inputs, has a bias).
type Mixer = (Project, Operation, (usize, bool));

impl Loader<'_> {
    /// Returns the operations of a recurrent layer, and its output projection.
    pub(super) fn mixer(&self, kind: StateKind, norm: Option<Arc<Norm>>) -> Result<(Vec<Operation>, Project)> {
        let (into, mix, (inner, bias)) = match kind {
            StateKind::ShortConv(conv) => self.convolving(conv)?,
            StateKind::DeltaNet(net) => self.delta(net)?,
            StateKind::Mamba2(sizes) => self.mamba(sizes)?,
        };
        let out = self.product(Part::MixOut, [self.config.hidden_size, inner], bias, Rows::Attended)?;
        let into = Project {
            norm,
            to: Rows::Projected,
            adds: false,
            as_held: true,
            ..into
        };
        Ok((vec![Operation::Project(into), mix], out))
    }

    fn mamba(&self, sizes: Mamba2) -> Result<Mixer> {
        let (config, heads, inner) = (self.config, sizes.heads, sizes.inner());
        let (hidden, channels, of_groups) = (config.hidden_size, sizes.channels(), sizes.groups * sizes.size);
        let into = self.product(Part::MixIn, [sizes.projected(), hidden], false, Rows::Hidden)?;
        let mut convolution = self.convolution((sizes.length, channels), sizes.conv_bias)?;
        let [_, of_x, of_b, of_c, _] = sizes.factors;
        convolution.scale(0..inner, of_x);
        convolution.scale(inner..inner + of_groups, of_b);
        convolution.scale(inner + of_groups..channels, of_c);
        let is_checkpoint = self.tensors.is_checkpoint();
        // GGUF stores the norm as [groups, size]
        let (whole, by_group) = ([inner], [sizes.groups, inner / sizes.groups]);
        let shape = if is_checkpoint { &whole[..] } else { &by_group[..] };
        let norm = if sizes.gating == Gating::Alone {
            Vec::new()
        } else {
            self.tensors.part(Part::MixNorm, self.at(), shape)?.view()?.decode()
        };
        let mix = Operation::Mamba(Mamba {
            layer: self.layer,
            convolution,
            decay_rates: self.decay_rates(heads)?,
            skip: self.vector(Part::Past, "weight", heads)?,
            step_bias: self.vector(Part::StepBias, "bias", heads)?,
            norm,
            eps: config.norm_eps,
            sizes,
        });
        Ok((into, mix, (inner, false)))
    }

    fn convolving(&self, conv: ShortConv) -> Result<Mixer> {
        let size = self.config.hidden_size;
        let into = self.product(Part::MixIn, [3 * size, size], conv.bias, Rows::Hidden)?;
        let mix = Operation::Convolve(Convolve {
            layer: self.layer,
            convolution: self.convolution((conv.length, size), conv.bias)?,
            size,
        });
        Ok((into, mix, (size, conv.bias)))
    }

    fn delta(&self, net: DeltaNet) -> Result<Mixer> {
        let (config, heads, dim) = (self.config, net.value_heads, net.key_dim as f32);
        let into = Project::new(Rows::Hidden, self.delta_projections(&net)?, Rows::Projected);
        let mix = Operation::Delta(Delta {
            layer: self.layer,
            convolution: self.convolution((net.length, net.channels()), false)?,
            scales: [1.0 / dim, 1.0 / dim.sqrt()].map(|one| vec![one; net.key_dim]),
            decay_rates: self.decay_rates(heads)?,
            step_bias: self.vector(Part::StepBias, "bias", heads)?,
            norm: padded(self.vector(Part::MixNorm, "weight", net.value_dim)?),
            eps: config.norm_eps,
            tiled: self.tensors.files.tiled,
            net,
        });
        Ok((into, mix, (net.inner(), false)))
    }

    /// Loads the decay rate of each head, below 0. Checkpoints store the logarithm of its magnitude.
    fn decay_rates(&self, heads: usize) -> Result<Vec<f32>> {
        let mut decay_rates = self.vector(Part::Fading, "weight", heads)?;
        if self.tensors.is_checkpoint() {
            decay_rates.iter_mut().for_each(|rate| *rate = -rate.exp());
        }
        Ok(decay_rates)
    }

    /// Packs a delta net's input projection: two tensors (rows by key head) in some files, four in others.
    fn delta_projections(&self, net: &DeltaNet) -> Result<Projections> {
        let (files, hidden) = (&self.tensors.files, self.config.hidden_size);
        let (inner, heads) = (net.inner(), net.value_heads);
        let (group, keys) = (heads / net.key_heads, (net.key_heads * net.key_dim, net.key_dim));
        let values = (inner, group * net.value_dim);
        let of_all = |row: usize| grouped_row(&[keys, keys, values, values], row);
        let of_rates = |row: usize| grouped_row(&[(heads, group), (heads, group)], row);
        let (all, rates) = (files.knows(Part::MixAll), files.knows(Part::MixRates));
        let wide: &[_] = if all {
            &[(Part::MixAll, net.channels() + inner)]
        } else {
            &[(Part::MixIn, net.channels()), (Part::MixGate, inner)]
        };
        let narrow: &[_] = if rates {
            &[(Part::MixRates, 2 * heads)]
        } else {
            &[(Part::MixRate, heads), (Part::MixStep, heads)]
        };
        let tensors: Vec<_> = (wide.iter().chain(narrow))
            .map(|(part, rows)| self.part(*part, [*rows, hidden]))
            .collect::<Result<_>>()?;
        let views: Vec<_> = tensors.iter().map(ModelTensor::view).collect::<Result<_>>()?;
        let mut pieces = Vec::new();
        for (at, view) in views.into_iter().enumerate() {
            pieces.push(match at < wide.len() {
                true if all => Piece::ordered(view, &of_all),
                false if rates => Piece::ordered(view, &of_rates),
                _ => Piece::new(view),
            });
        }
        side_by_side(&self.packing, &pieces)
    }

    /// Loads a convolution over `length` tokens and `channels` channels.
    fn convolution(&self, (length, channels): (usize, usize), bias: bool) -> Result<Convolution> {
        let tensor = self
            .tensors
            .part(Part::Convolution, self.at(), &[channels, 1, length])?;
        let bias = self.bias(bias, Part::Convolution, channels)?;
        Ok(Convolution::new(&tensor.view()?.decode(), bias, (length, channels)))
    }
}
