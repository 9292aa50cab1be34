//! Vision tower: from the pixels of an image to the features that stand for its tokens.
//!
//! Its layers are those of an encoder, computed by `Decoder`. Mergers join blocks of patches to tokens of the text model.
//!
//! Invariants: features depend on the image alone; nothing stays allocated between two images.

#![allow(unsafe_code)]

use std::slice::from_raw_parts_mut;

use minisgl_kernels::attention::Rows;
use minisgl_kernels::kv::{KvDtype, KvHeads, KvPool, KvShape};
use minisgl_kernels::panels::PANEL;
use minisgl_kernels::{Acts, Kernels, Mode, plain};
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::model::buffers::TOKENS;
use crate::model::config::{ModelConfig, Patches};
use crate::model::decoder::{Decoder, Memory};
use crate::model::grid::Grid;
use crate::model::held::{Linear, Norm};
use crate::model::names::{At, Files, Part};
use crate::model::pieces::{load_norm, pack, pack_transposed, padded};
use crate::model::products::Groups;
use crate::model::tensors::Tensors;
use crate::model::weights::Weights;
use crate::model::worker::{Image, LINE_TOKENS, Tokens, each};
use crate::threads::{Counter, Pool};
use crate::weights::{Packer, Packing};

/// Patches in a KV page of the tower.
const PAGE: usize = 128;
const ONES: [f32; 32 * PANEL] = [1.0; 32 * PANEL];

/// Settings of a vision tower, as Python sends them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TowerSettings {
    /// Sizes and features of the tower's layers.
    pub model: ModelConfig,
    /// Tensor names of the tower.
    pub names: Files,
    /// Value of each pixel as the tower reads it, [channels, 256].
    pub table: Vec<f32>,
    /// Hidden size of the text model.
    pub out_size: usize,
    /// True if tokens of an image attend to each other in both directions. All images are then squares of one size.
    pub both_ways: bool,
}

impl TowerSettings {
    /// Returns the tokens of each image if they attend to each other, else 0.
    pub fn tokens_together(&self) -> usize {
        let patches = self.model.patches.as_ref().filter(|_| self.both_ways);
        patches.map_or(0, |patches| (patches.side / patches.merge.max(1)).pow(2))
    }
}

/// Merger of blocks of patches: norm, matrix, GELU, matrix; or the norm of their average and one matrix.
struct Merger {
    norm: Norm,
    /// True if the norm applies to the joined patches, false if to each patch.
    is_joined: bool,
    /// The first matrix; `None` if patches are averaged.
    up: Option<Linear>,
    down: Linear,
}

/// Vision tower with its weights.
pub struct Tower {
    decoder: Decoder,
    patches: Patches,
    mode: Mode,
    table: [[f32; 256]; 3],
    /// Mergers after some layers, and then the last one.
    mergers: Vec<Merger>,
    out_size: usize,
    /// True if tokens of an image attend to each other in both directions.
    pub both_ways: bool,
}

impl Merger {
    /// Loads a merger of `patches`, with the named parts of index `at`.
    fn load(
        tensors: &Tensors,
        packing: &Packing<'_>,
        settings: &TowerSettings,
        ([norm, up, down], at): ([Part; 3], usize),
        (patches, is_joined): (usize, bool),
    ) -> Result<Self> {
        let taps = settings.model.patches.iter().flat_map(|patches| &patches.taps);
        let at = At {
            layer: at,
            tap: taps.copied().nth(at).unwrap_or_default(),
            ..At::default()
        };
        let (hidden, joined) = (settings.model.hidden_size, settings.model.hidden_size * patches);
        let linear = |part, shape: [usize; 2]| -> Result<Linear> {
            Ok(Linear {
                weight: pack(packing, &[tensors.part(part, at, &shape)?], false)?,
                bias: Some(padded(tensors.part_vector(part, at, "bias", shape[0])?)),
            })
        };
        let normed = if is_joined { joined } else { hidden };
        Ok(Self {
            norm: load_norm(tensors, &settings.model, norm, at, normed)?,
            is_joined,
            up: Some(linear(up, [joined, joined])?),
            down: linear(down, [settings.out_size, joined])?,
        })
    }

    /// Loads a merger that averages the patches of a block.
    fn load_averaging(tensors: &Tensors, packing: &Packing<'_>, settings: &TowerSettings) -> Result<Self> {
        let (hidden, at) = (settings.model.hidden_size, At::default());
        let matrix = tensors.part(Part::MergerDown, at, &[hidden, settings.out_size])?;
        let weight = tensors.part_vector(Part::MergerNorm, at, "weight", hidden)?;
        Ok(Self {
            norm: Norm {
                weight: padded(weight.iter().map(|weight| 1.0 + weight).collect()),
                bias: None,
                eps: settings.model.norm_eps,
                layer_norm: false,
            },
            is_joined: true,
            up: None,
            down: Linear {
                weight: pack_transposed(packing, matrix.view()?)?,
                bias: None,
            },
        })
    }
}

/// Computation of the tower over one image, operation by operation.
pub struct TowerRun {
    memory: Memory,
    kv: KvPool,
    grid: [usize; 2],
    /// Indices of all patches.
    all: Vec<u32>,
    axes: Vec<[u32; 3]>,
    /// Number of the next operation.
    next: usize,
    is_finite: bool,
}

impl Tower {
    /// Loads the tower on the threads of `pool`. Errors if its settings are invalid or a tensor is missing or unknown.
    pub fn load(
        settings: &TowerSettings,
        tensors: &Tensors,
        (kernels, mode): (Kernels, Mode),
        pool: &mut Pool,
    ) -> Result<Self> {
        let (packer, config) = (Packer::new(None, None), &settings.model);
        let patches = config.patches.clone();
        let patches = patches.ok_or_else(|| Error::setting("the tower has no patches"))?;
        let (channels, _) = settings.table.as_chunks::<256>();
        let table = channels.try_into();
        let table = table.map_err(|_| Error::setting("the tower's table must have 3 x 256 values"))?;
        let weights = Weights::load((tensors, &packer), config, pool, &|_, _| ())?;
        let (packing, block) = (packer.part(config.num_layers + 2), patches.merge.pow(2));
        let deep = [Part::DeepMergerNorm, Part::DeepMergerUp, Part::DeepMergerDown];
        let last = [Part::MergerNorm, Part::MergerUp, Part::MergerDown];
        let of_taps = (0..patches.taps.len()).map(|at| ((deep, at), true));
        let mergers = of_taps.chain(tensors.files.knows(Part::MergerUp).then_some(((last, 0), false)));
        let mut mergers = mergers
            .map(|(parts, is_joined)| Merger::load(tensors, &packing, settings, parts, (block, is_joined)))
            .collect::<Result<Vec<_>>>()?;
        if mergers.is_empty() {
            mergers.push(Merger::load_averaging(tensors, &packing, settings)?);
        }
        let in_gguf = tensors.source().is_some_and(|source| source.architecture().is_some());
        let of_tower = ["visual.", "vision_tower.", "multi_modal_projector."];
        // a head that sums up an image is not needed
        let is_known = |name: &str| !of_tower.iter().any(|part| name.contains(part)) || name.contains(".head.");
        tensors.check_all_used(|name| !in_gguf && is_known(name))?;
        Ok(Self {
            decoder: Decoder::new(config.clone(), weights, kernels, mode),
            patches,
            mode,
            table,
            mergers,
            out_size: settings.out_size,
            both_ways: settings.both_ways,
        })
    }

    /// Returns the bytes of all matrices.
    pub fn bytes(&self) -> usize {
        let linears = self
            .mergers
            .iter()
            .flat_map(|merger| merger.up.iter().chain([&merger.down]));
        self.decoder.weights.bytes() + linears.map(|linear| linear.weight.bytes()).sum::<usize>()
    }

    /// Returns the elements of a token's features: those of its embedding, then those of each layer that adds some.
    pub fn width(&self) -> usize {
        self.mergers.len() * self.out_size
    }

    /// Returns the rows and columns of tokens in an image whose `grid` of patches has whole blocks and `pixels` fit.
    pub fn tokens_of(&self, grid: [usize; 2], pixels: usize) -> Option<[usize; 2]> {
        let tokens = grid.map(|side| side / self.patches.merge);
        let whole = tokens.map(|side| side * self.patches.merge) == grid && !tokens.contains(&0);
        let bytes = grid[0].checked_mul(grid[1])?.checked_mul(self.patches.values())?;
        let sized = !self.both_ways || grid == [self.patches.side; 2];
        (whole && sized && bytes == pixels).then_some(tokens)
    }

    /// Returns the features of an image, [tokens, width]. `grid` and `pixels` have passed `tokens_of`. Errors if they
    /// are not finite.
    pub fn run(&self, pool: &mut Pool, grid: [usize; 2], pixels: &[u8]) -> Result<Vec<f32>> {
        let mut run = self.begin(pool, grid)?;
        while !self.advance(&mut run, pool, pixels)? {}
        self.finish(run, pool)
    }

    /// Begins to compute an image, whose `grid` has passed `tokens_of`.
    pub fn begin(&self, pool: &Pool, grid: [usize; 2]) -> Result<TowerRun> {
        let (config, count) = (&self.decoder.config, grid[0] * grid[1]);
        let kv = KvPool::new(KvShape {
            layers: vec![KvHeads {
                count: config.heads[0].kv_heads,
                dim: config.heads[0].head_dim,
            }],
            pages: count.div_ceil(PAGE),
            page_size: PAGE,
            latent: None,
            dtype: KvDtype::F32,
        })?;
        let axes = |at| {
            let [row, column] = self.patches.place(at, grid[1]);
            [0, row as u32, column as u32]
        };
        Ok(TowerRun {
            memory: self.decoder.memory(pool.threads(), &kv, false)?,
            kv,
            grid,
            all: (0..count as u32).collect(),
            axes: (0..count).map(axes).collect(),
            next: 0,
            is_finite: true,
        })
    }

    /// Runs the next operation of the tower over an image. Returns whether it was the last.
    pub fn advance(&self, run: &mut TowerRun, pool: &mut Pool, pixels: &[u8]) -> Result<bool> {
        let rows = Rows {
            seq_lens: &[run.all.len() as u32],
            qo_indptr: &[0, run.all.len() as u32],
            table: &run.all[..run.kv.shape().pages],
            columns: run.kv.shape().pages,
            slots: &[0],
            ends: &[],
        };
        let tokens = Tokens {
            ids: &run.all,
            positions: &run.all,
            slots: &run.all,
            decode: 0,
            runs: &[],
            types: &[],
            states: None,
            features: &[],
            axes: &run.axes,
            image: Some(Image {
                grid: run.grid,
                pixels,
                table: &self.table,
            }),
        };
        let (memory, next) = ((&mut run.memory, &run.kv), run.next..run.next + 1);
        let not_finite = self.decoder.forward_part(pool, memory, &rows, tokens, next)?;
        run.is_finite &= not_finite.is_empty();
        run.next += 1;
        Ok(run.next == self.decoder.weights.operations().count())
    }

    /// Returns the features of an image after the last operation, as `run` does.
    pub fn finish(&self, run: TowerRun, pool: &mut Pool) -> Result<Vec<f32>> {
        let merged = run.all.len() / self.patches.merge.pow(2);
        let mut features = vec![0.0; merged * self.width()];
        let last = self.mergers.len() - 1;
        for (index, (merger, from)) in self.mergers.iter().zip(run.memory.tapped()).enumerate() {
            // the last merger's features are the embedding, which comes first
            let at = if index == last { 0 } else { index + 1 } * self.out_size;
            let mut found = self.merged(pool, merger, from, merged)?;
            for (row, to) in found.rows(merged).zip(features.chunks_exact_mut(self.width())) {
                to[at..at + self.out_size].copy_from_slice(&row[..self.out_size]);
            }
        }
        if !run.is_finite || features.iter().any(|feature| !feature.is_finite()) {
            return Err(Error::step("the vision tower's output for an image is not finite"));
        }
        Ok(features)
    }

    /// Joins the patches of each block, and computes a merger's output, [count, out_size].
    fn merged(&self, pool: &mut Pool, merger: &Merger, from: &Grid, count: usize) -> Result<Grid> {
        let (hidden, kernels) = (self.decoder.config.hidden_size, &self.decoder.kernels);
        let block = self.patches.merge.pow(2);
        let (averages, last) = (merger.up.is_none(), &self.decoder.weights.norm);
        let width = if averages { hidden } else { block * hidden };
        let mut joined = Grid::new(width);
        joined.reserve(count);
        let counter = Counter::default();
        pool.run(&|_, _| {
            each(&counter, count, 1, |row| {
                let to = joined.at(row, 0);
                // SAFETY: this thread's work item: the row; the forward pass that wrote `from` has ended.
                unsafe {
                    for part in 0..block {
                        let from = from.at(row * block + part, 0);
                        if let Some(norm) = last {
                            norm.apply(kernels, from, (0, hidden), from);
                        }
                        if averages && part > 0 {
                            kernels.add(to, from, hidden);
                            continue;
                        }
                        let to = to.add(part * hidden);
                        to.copy_from_nonoverlapping(from, hidden);
                        if !merger.is_joined {
                            merger.norm.apply(kernels, to, (0, hidden), to);
                        }
                    }
                    if averages {
                        let sums = from_raw_parts_mut(to, hidden);
                        sums.iter_mut().for_each(|sum| *sum /= block as f32);
                    }
                    if merger.is_joined {
                        merger.norm.apply(kernels, to, (0, width), to);
                    }
                }
            });
        })?;
        let inner = merger
            .up
            .as_ref()
            .map(|up| self.multiplied(pool, up, &joined, count, true));
        self.multiplied(pool, &merger.down, &inner.unwrap_or(Ok(joined))?, count, false)
    }

    /// Multiplies `count` rows by a matrix, adds its bias and applies GELU if `activates`.
    fn multiplied(&self, pool: &mut Pool, by: &Linear, from: &Grid, count: usize, activates: bool) -> Result<Grid> {
        let (matrix, kernels) = (&by.weight, &self.decoder.kernels);
        let buffer = Acts::new(count, matrix.k(), self.mode.with(matrix));
        let acts = buffer.writer(count, matrix.k());
        let mut out = Grid::new(matrix.panels() * PANEL);
        out.reserve(count);
        let groups = Groups::new(matrix, pool.threads());
        let counters: [Counter; 2] = Default::default();
        pool.run(&|_, barrier| {
            // SAFETY: this thread's work item: the row; `from` was written before this job.
            each(&counters[0], count, LINE_TOKENS, |row| unsafe {
                kernels.prepare(from.at(row, 0), acts, row)
            });
            barrier.wait();
            while let Some(piece) = counters[1].claim(count.div_ceil(TOKENS) * groups.count) {
                let (first, panels) = (piece / groups.count * TOKENS, groups.panels(piece % groups.count));
                let (rows, column, width) = (
                    first..count.min(first + TOKENS),
                    panels.start * PANEL,
                    panels.len() * PANEL,
                );
                // SAFETY: this thread's work item: these columns of these rows; `acts` was written before the barrier.
                unsafe {
                    kernels.matmul(
                        matrix,
                        panels,
                        acts,
                        rows.clone(),
                        out.at(first, column),
                        out.stride(),
                        false,
                    );
                    for row in rows {
                        let numbers = out.at(row, column);
                        if let Some(bias) = &by.bias {
                            kernels.add(numbers, bias[column..].as_ptr(), width);
                        }
                        if activates {
                            plain::gelu_erf_mul(kernels.isa(), from_raw_parts_mut(numbers, width), &ONES);
                        }
                    }
                }
            }
        })?;
        Ok(out)
    }
}
