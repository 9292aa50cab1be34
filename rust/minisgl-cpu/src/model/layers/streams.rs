//! Loader of residual streams (AltUp, arXiv 2301.13310), of which a layer sees the first, with a low-rank residual
//! (Laurel, arXiv 2411.07501); and of per-layer embeddings (Gemma 3n).

use std::sync::Arc;

use minisgl_kernels::panels::Part as Piece;

use crate::error::Result;
use crate::model::config::{MAX_STREAMS, ModelConfig, Norms, PerLayer, Streams};
use crate::model::held::Norm;
use crate::model::layers::loader::{Loader, MAX_SIZE, unsupported, within};
use crate::model::names::{At, Part};
use crate::model::operation::{Add, Mixing, Operation, Project, Projections, Rows, SumPerLayer};
use crate::model::pieces::{load_norm, pack};
use crate::model::tensors::Tensors;
use crate::weights::Packing;

/// Rejects settings of streams and per-layer embeddings that are invalid or not supported.
pub(super) fn check(config: &ModelConfig) -> Result<()> {
    if let Some(per_layer) = config.per_layer {
        let most = MAX_SIZE / config.num_layers;
        within("hidden_size_per_layer_input", per_layer.size, most)?;
        within("vocab_size_per_layer_input", per_layer.vocab_size, MAX_SIZE)?;
    }
    if let Some(streams) = config.streams {
        within(
            "altup_num_inputs",
            streams.count,
            MAX_STREAMS.min(config.num_layers + 2),
        )?;
        within("laurel_rank", streams.rank, MAX_SIZE)?;
        let whole = config.norms == Norms::Both && config.per_layer.is_some() && !config.attends.contains(&false);
        if !whole || config.moe.is_some() {
            let why = "not supported with these layers";
            return Err(unsupported("altup_num_inputs", streams.count, why));
        }
    }
    Ok(())
}

/// Operations around a layer: before attention, after attention, after the MLP.
pub(super) type Around = [Vec<Operation>; 3];

impl Loader<'_> {
    /// Returns the operations that streams add to a layer. `norm` is the norm of attention's input.
    pub(super) fn streams(&self, streams: Streams, norm: Option<Arc<Norm>>) -> Result<Around> {
        let (size, count) = (self.config.hidden_size, streams.count);
        let of = |part, shape: [usize; 2]| -> Result<Vec<f32>> { Ok(self.part(part, shape)?.view()?.decode()) };
        let mut router_norm = self.norm(Part::StreamRouterNorm)?;
        let weights = router_norm.weight.iter_mut();
        weights.for_each(|number| *number /= size as f32);
        let mixing = Arc::new(Mixing {
            norm: router_norm,
            router: of(Part::StreamRouter, [count, size])?,
            predict: of(Part::StreamPredict, [count * count, count])?,
            correct: of(Part::StreamCorrect, [count, count])?,
            scale: self.vector(Part::StreamScale, "weight", size)?,
        });
        let down = Project {
            norm: norm.clone(),
            to: Rows::Inner,
            ..self.product(Part::LaurelDown, [streams.rank, size], false, Rows::Hidden)?
        };
        let up = Project {
            to: Rows::Beside,
            ..self.product(Part::LaurelUp, [size, streams.rank], false, Rows::Inner)?
        };
        let laurel = Operation::Laurel {
            before: norm,
            norm: self.norm(Part::LaurelNorm)?,
        };
        let predict = Operation::Predict(mixing.clone());
        Ok([
            vec![predict, Operation::Project(down), Operation::Project(up), laurel],
            vec![Operation::AddLaurel],
            vec![Operation::Correct(mixing)],
        ])
    }

    /// Returns the operations that gate and add a layer's per-layer embedding; the sums are multiplied by `last`. With
    /// several streams the gate reads the output of `Correct`, and all streams but the first get the result.
    pub(super) fn per_layer(&self, PerLayer { size, .. }: PerLayer, last: f32) -> Result<Vec<Operation>> {
        let (hidden, several) = (self.config.hidden_size, self.config.streams.is_some());
        let from = if several { Rows::Aside } else { Rows::Hidden };
        let gate = Project {
            to: Rows::Inner,
            ..self.product(Part::PerLayerGate, [size, hidden], false, from)?
        };
        let out = Project {
            to: Rows::Aside,
            ..self.product(Part::PerLayerOut, [hidden, size], false, Rows::Inner)?
        };
        let norm = self.norm(Part::PerLayerNormBehind)?;
        Ok(vec![
            Operation::Project(gate),
            Operation::GatePerLayer(self.config.activation, size, self.layer * size),
            Operation::Project(out),
            if several {
                Operation::AddToStreams(norm)
            } else {
                Operation::Add(Add {
                    norm: Some(norm),
                    scale: self.config.residual_scale,
                    last,
                })
            },
        ])
    }
}

/// Returns the operations that compute per-layer embeddings from a token's embedding and its id; empty without them.
pub(crate) fn per_layer_tables(
    tensors: &Tensors,
    config: &ModelConfig,
    packing: &Packing<'_>,
) -> Result<Vec<Operation>> {
    let Some(PerLayer { size, vocab_size }) = config.per_layer else {
        return Ok(Vec::new());
    };
    let (layers, all) = (config.num_layers, config.num_layers * size);
    let of = |part, shape: [usize; 2]| pack(packing, &[tensors.part(part, At::default(), &shape)?], false);
    let embedding = of(Part::PerLayerEmbedding, [vocab_size, all])?;
    let model = vec![(0, of(Part::PerLayerModel, [all, config.hidden_size])?)];
    Ok(vec![
        Operation::Project(Project::new(Rows::Hidden, model, Rows::PerLayer)),
        Operation::SumPerLayer(SumPerLayer {
            embedding,
            norm: load_norm(tensors, config, Part::PerLayerNorm, At::default(), size)?,
            size,
            layers,
        }),
    ])
}

/// Returns the operations that split the first stream into several before the layers, and merge them afterwards.
pub(crate) fn stream_tables(
    tensors: &Tensors,
    config: &ModelConfig,
    packing: &Packing<'_>,
) -> Result<[Vec<Operation>; 2]> {
    let Some(streams) = config.streams else {
        return Ok(Default::default());
    };
    let (size, others) = (config.hidden_size, streams.count - 1);
    let all = |part| -> Result<Vec<Projections>> {
        if tensors.is_checkpoint() {
            let at = |expert| At {
                expert,
                ..At::default()
            };
            let of = |other| tensors.part(part, at(other), &[size, size]);
            return (0..others)
                .map(|other| Ok(vec![(0, pack(packing, &[of(other)?], false)?)]))
                .collect();
        }
        let tensor = tensors.part(part, At::default(), &[others, size, size])?;
        let view = tensor.view()?;
        let one = |other| packing.pack(&[Piece::new(view.slice(other)?)], false, None);
        (0..others).map(|other| Ok(vec![(0, one(other)?)])).collect()
    };
    let product = |from, matrices, to| Operation::Project(Project::new(from, matrices, to));
    let into = all(Part::StreamIn)?.into_iter().enumerate();
    let into = into.map(|(at, matrices)| product(Rows::Hidden, matrices, Rows::Stream(at)));
    let out = all(Part::StreamOut)?.into_iter().enumerate();
    let out = out.flat_map(|(at, matrices)| {
        let sum = Operation::SumStreams(at, others);
        [product(Rows::Stream(at), matrices, Rows::Beside), sum]
    });
    Ok([into.chain([Operation::ScaleStreams]).collect(), out.collect()])
}
