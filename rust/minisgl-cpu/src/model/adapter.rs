//! LoRA adapters: B (A x) is added to the outputs of a layer, with a separate adapter, or none, for each token.
//!
//! Invariants: a token's adapter output is computed in full precision; it does not depend on the other tokens of the
//! step or on the precision of the weights' matmuls.

#![allow(unsafe_code)]

use std::ops::Range;

use minisgl_kernels::panels::{Matrix, Part};
use minisgl_kernels::{Acts, Kind, Mode, TensorView};

use crate::error::{Error, Result};
use crate::model::config::ModelConfig;
use crate::model::grid::Grid;

/// Maximum number of tokens in a run.
pub const RUN: usize = 32;

/// LoRA factors of one linear layer: A [rank, inputs], and B [outputs, rank] with the scale multiplied in.
#[derive(Clone, Debug)]
pub struct Pair {
    /// Layer index in the model.
    pub layer: usize,
    /// Linear layer, such as `q_proj`.
    pub part: String,
    /// A, row-major [rank, inputs].
    pub a: Vec<f32>,
    /// B, row-major [outputs, rank].
    pub b: Vec<f32>,
}

/// Matmul of a layer that adapters change; several linear layers may share one.
#[derive(Clone, Copy, Debug)]
pub enum Site {
    /// Projection to queries, keys and values.
    Qkv,
    /// Output projection of attention.
    Out,
    /// Gate and up projection of the MLP.
    GateUp,
    /// Down projection of the MLP.
    Down,
}

/// LoRA factors of one site: the A of its linear layers concatenated, and B with the site's output columns.
pub(super) struct Factors {
    pub a: Matrix,
    pub b: Matrix,
}

/// LoRA adapter, packed for this model. It applies only to requests that select it.
pub struct Adapter {
    layers: Vec<[Option<Factors>; 4]>,
    rank: usize,
}

/// Run of adjacent tokens with the same adapter.
pub struct Run<'a> {
    /// Adapter of the tokens.
    pub adapter: &'a Adapter,
    /// Token indices within the step.
    pub tokens: Range<usize>,
}

/// Shared buffers for the activations between A and B, one for each run.
#[derive(Default)]
pub struct AdapterBuffers {
    pub(super) runs: Vec<Acts>,
    rank: usize,
}

/// Buffers of one thread for adapters.
pub struct ThreadAdapterBuffers {
    pub(super) from: Acts,
    pub(super) low: Grid,
    rank: usize,
}

impl Adapter {
    /// Packs an adapter from `pairs`. Errors if a pair does not fit the model's sizes or no pair applies to this model.
    pub fn new(config: &ModelConfig, pairs: &[Pair]) -> Result<Self> {
        let mut layers = Vec::with_capacity(config.num_layers);
        for layer in 0..config.num_layers {
            let of = |part: &'static str, inputs, outputs| {
                let found = pairs.iter().find(|one| one.layer == layer && one.part == part);
                SiteLayer::of(found, part, inputs, outputs)
            };
            let (hidden, inner) = (config.hidden_size, config.intermediate_sizes[layer]);
            let [q, k, v] = config.widths(layer);
            let mut qkv = vec![of("q_proj", hidden, q)?];
            for (part, outputs) in [("k_proj", k), ("v_proj", v)] {
                if outputs > 0 {
                    qkv.push(of(part, hidden, outputs)?);
                }
            }
            let mut sites = [
                join_factors(&qkv, false)?,
                join_factors(&[of("o_proj", q, hidden)?], false)?,
                None,
                None,
            ];
            if config.experts_of(layer).is_none() {
                sites[2] = if config.gated {
                    join_factors(&[of("gate_proj", hidden, inner)?, of("up_proj", hidden, inner)?], true)?
                } else {
                    join_factors(&[of("up_proj", hidden, inner)?], false)?
                };
                sites[3] = join_factors(&[of("down_proj", inner, hidden)?], false)?;
            }
            layers.push(sites);
        }
        let all = layers.iter().flatten().flatten();
        let rank = all.map(|one| one.a.n()).max().unwrap_or(0);
        if rank == 0 {
            return Err(Error::setting("the adapter has no A and B for this model"));
        }
        Ok(Self { layers, rank })
    }

    pub(super) fn at(&self, layer: usize, site: Site) -> Option<&Factors> {
        self.layers[layer][site as usize].as_ref()
    }
}

/// A linear layer of a site, with its LoRA pair if the adapter has one.
struct SiteLayer<'a> {
    pair: Option<&'a Pair>,
    rank: usize,
    inputs: usize,
    outputs: usize,
}

impl<'a> SiteLayer<'a> {
    fn of(pair: Option<&'a Pair>, part: &str, inputs: usize, outputs: usize) -> Result<Self> {
        let rank = pair.map_or(0, |pair| pair.a.len() / inputs);
        if let Some(pair) = pair
            && (rank == 0 || pair.a.len() != rank * inputs || pair.b.len() != outputs * rank)
        {
            let (a, b) = (pair.a.len(), pair.b.len());
            return Err(Error::setting(format!(
                "{part}: A with {a} and B with {b} elements do not fit {outputs} x {inputs}"
            )));
        }
        Ok(Self {
            pair,
            rank,
            inputs,
            outputs,
        })
    }

    /// Returns B as [outputs, width] with its values in the columns from `first` on, zeros elsewhere.
    fn spread(&self, first: usize, width: usize) -> Vec<f32> {
        let mut rows = vec![0.0; self.outputs * width];
        if let Some(pair) = self.pair {
            for (to, from) in rows.chunks_exact_mut(width).zip(pair.b.chunks_exact(self.rank)) {
                to[first..first + self.rank].copy_from_slice(from);
            }
        }
        rows
    }
}

/// Packs the factors of a site, side by side or interleaved by panel. `None` if the adapter changes no part of it.
fn join_factors(blocks: &[SiteLayer<'_>], interleave: bool) -> Result<Option<Factors>> {
    let rank: usize = blocks.iter().map(|block| block.rank).sum();
    if rank == 0 {
        return Ok(None);
    }
    let (mut a, mut b, mut first) = (Vec::new(), Vec::new(), 0);
    for block in blocks {
        a.extend(block.pair.iter().flat_map(|pair| &pair.a).copied());
        b.push(block.spread(first, rank));
        first += block.rank;
    }
    let bytes = |numbers: &[f32]| -> Vec<u8> { numbers.iter().flat_map(|factor| factor.to_le_bytes()).collect() };
    let (a, b): (Vec<u8>, Vec<Vec<u8>>) = (bytes(&a), b.iter().map(|factor| bytes(factor)).collect());
    let shapes: Vec<[usize; 2]> = blocks.iter().map(|block| [block.outputs, rank]).collect();
    let parts = b
        .iter()
        .zip(&shapes)
        .map(|(data, shape)| Ok(Part::new(TensorView::new("lora_B", Kind::F32, shape, data)?)))
        .collect::<Result<Vec<_>>>()?;
    let shape = [rank, blocks[0].inputs];
    let whole = Part::new(TensorView::new("lora_A", Kind::F32, &shape, &a)?);
    Ok(Some(Factors {
        a: Matrix::pack(&[whole], false, Some(Kind::F32))?,
        b: Matrix::pack(&parts, interleave, Some(Kind::F32))?,
    }))
}

impl AdapterBuffers {
    /// Grows the buffers for a step with `runs`. Returns the rank that buffers are sized for.
    pub fn reserve(&mut self, runs: &[Run<'_>]) -> usize {
        let rank = max_rank(runs);
        if rank > self.rank {
            self.runs.clear();
            self.rank = rank;
        }
        while self.runs.len() < runs.len() {
            self.runs.push(Acts::new(RUN, self.rank, Mode::Exact));
        }
        self.rank
    }
}

fn max_rank(runs: &[Run<'_>]) -> usize {
    runs.iter().map(|run| run.adapter.rank).max().unwrap_or(0)
}

impl ThreadAdapterBuffers {
    /// Creates buffers for matmuls with at most `widest` inputs.
    pub fn new(widest: usize) -> Self {
        Self {
            from: Acts::new(1, widest, Mode::Exact),
            low: Grid::new(1),
            rank: 0,
        }
    }

    /// Grows the buffers for a step with adapters of at most `rank`.
    pub fn reserve(&mut self, rank: usize, widest: usize) {
        if rank > self.rank {
            self.rank = rank;
            self.from = Acts::new(RUN, widest, Mode::Exact);
            self.low = Grid::new(rank);
            self.low.reserve(RUN);
        }
    }
}
