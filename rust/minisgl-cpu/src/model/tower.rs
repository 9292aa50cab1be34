//! The vision tower of a model: it computes the features of an image's tokens from the image's pixels.
//!
//! `Decoder` computes the tower's layers, which are those of an encoder with a token for each patch. Mergers then join
//! blocks of patches to tokens of the text model. `advance` computes an image in slices.
//!
//! Invariants: features depend on the image alone, not on the slices; nothing stays allocated between two images.

#![allow(unsafe_code)]

use std::ops::Range;
use std::slice::from_raw_parts_mut;
use std::sync::Arc;
use std::time::Duration;

use minisgl_kernels::attention::Rows;
use minisgl_kernels::kv::{KvDtype, KvHeads, KvPool, KvShape};
use minisgl_kernels::panels::PANEL;
use minisgl_kernels::{Acts, Kernels, Mode, plain};
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::model::buffers::{Buffers, TOKENS};
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
use crate::threads::{Counter, Deadline, Pool};
use crate::weights::{Packer, Packing};

/// Patches in a KV page of the tower.
const PAGE: usize = 128;
/// Merged tokens per thread of a slice's least work: some tens of milliseconds for the largest mergers.
const MERGED: usize = LINE_TOKENS;
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
        if self.both_ways { self.tokens_of_square() } else { 0 }
    }

    fn tokens_of_square(&self) -> usize {
        let patches = self.model.patches.as_ref();
        patches.map_or(0, |patches| (patches.side / patches.merge.max(1)).pow(2))
    }

    /// Returns the bytes of memory in which an image of `tokens` tokens is computed, with its features. If images have
    /// one size, it counts.
    pub fn image_bytes(&self, tokens: usize, mode: Mode) -> usize {
        let (config, patches) = (&self.model, self.model.patches.as_ref());
        let is_square = config.inverse_frequencies.is_empty();
        let tokens = if is_square { self.tokens_of_square() } else { tokens };
        let (merge, taps) = patches.map_or((1, 0), |patches| (patches.merge, patches.taps.len()));
        let count = tokens * merge.pow(2);
        let kv = kv_shape(config, count);
        let index = size_of::<u32>() + size_of::<[u32; 3]>();
        count * (Buffers::bytes_of_token(config, mode) + index)
            + KvPool::page_bytes(&kv) * kv.pages
            + tokens * (taps + 1) * self.out_size * size_of::<f32>()
    }
}

/// Merger of blocks of patches: norm, matrix, GELU, matrix; or the norm of their average and one matrix; or one matrix.
struct Merger {
    norm: Option<Norm>,
    /// True if the norm applies to the joined patches, false if to each patch.
    is_joined: bool,
    /// The first of two matrices.
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
            norm: Some(load_norm(tensors, &settings.model, norm, at, normed)?),
            is_joined,
            up: Some(linear(up, [joined, joined])?),
            down: linear(down, [settings.out_size, joined])?,
        })
    }

    /// Loads a merger that multiplies the joined `patches` of a block by one matrix.
    fn load_joining(
        tensors: &Tensors,
        packing: &Packing<'_>,
        settings: &TowerSettings,
        patches: usize,
    ) -> Result<Self> {
        let shape = [settings.out_size, settings.model.hidden_size * patches];
        let matrix = tensors.part(Part::MergerDown, At::default(), &shape)?;
        Ok(Self {
            norm: None,
            is_joined: true,
            up: None,
            down: Linear {
                weight: pack(packing, &[matrix], false)?,
                bias: None,
            },
        })
    }

    /// Returns true if the merger averages the patches of a block.
    fn averages(&self) -> bool {
        self.up.is_none() && self.norm.is_some()
    }

    /// Loads a merger that averages the patches of a block.
    fn load_averaging(tensors: &Tensors, packing: &Packing<'_>, settings: &TowerSettings) -> Result<Self> {
        let (hidden, at) = (settings.model.hidden_size, At::default());
        let matrix = tensors.part(Part::MergerDown, at, &[hidden, settings.out_size])?;
        let weight = tensors.part_vector(Part::MergerNorm, at, "weight", hidden)?;
        // checkpoints store the weights minus 1, GGUF files as they are
        let offset = if tensors.is_checkpoint() { 1.0 } else { 0.0 };
        Ok(Self {
            norm: Some(Norm {
                weight: padded(weight.iter().map(|weight| offset + weight).collect()),
                bias: None,
                eps: settings.model.norm_eps,
                layer_norm: false,
            }),
            is_joined: true,
            up: None,
            down: Linear {
                weight: pack_transposed(packing, matrix.view()?)?,
                bias: None,
            },
        })
    }
}

/// Computation of the tower over one image, in slices.
pub struct TowerRun {
    memory: Memory,
    kv: KvPool,
    grid: [usize; 2],
    /// Indices of all patches.
    all: Vec<u32>,
    /// 0 and the number of patches.
    bounds: [u32; 2],
    axes: Vec<[u32; 3]>,
    /// Index of the next operation, of which a slice may have computed some work items.
    next: usize,
    /// Number of merged blocks of tokens: all blocks of a merger, then those of the next one.
    merged: usize,
    /// Features of the merged tokens, [tokens, width].
    features: Vec<f32>,
    deadline: Arc<Deadline>,
    is_finite: bool,
}

impl Tower {
    /// Loads the tower on the threads of `pool`. Errors if its settings are invalid or a tensor is missing or unknown.
    pub fn load(
        settings: &TowerSettings,
        (tensors, packer): (&Tensors, &Packer),
        (kernels, mode): (Kernels, Mode),
        pool: &mut Pool,
    ) -> Result<Self> {
        let config = &settings.model;
        let patches = config.patches.clone();
        let patches = patches.ok_or_else(|| Error::setting("the tower has no patches"))?;
        let (channels, _) = settings.table.as_chunks::<256>();
        let table = channels.try_into();
        let table = table.map_err(|_| Error::setting("the tower's table must have 3 x 256 values"))?;
        let weights = Weights::load((tensors, packer), config, pool, &|_, _| ())?;
        let (packing, block) = (packer.part(Weights::num_parts(config)), patches.merge.pow(2));
        let deep = [Part::DeepMergerNorm, Part::DeepMergerUp, Part::DeepMergerDown];
        let last = [Part::MergerNorm, Part::MergerUp, Part::MergerDown];
        let of_taps = (0..patches.taps.len()).map(|at| ((deep, at), true));
        let mergers = of_taps.chain(tensors.files.knows(Part::MergerUp).then_some(((last, 0), false)));
        let mut mergers = mergers
            .map(|(parts, is_joined)| Merger::load(tensors, &packing, settings, parts, (block, is_joined)))
            .collect::<Result<Vec<_>>>()?;
        if mergers.is_empty() {
            mergers.push(if tensors.files.knows(Part::MergerNorm) {
                Merger::load_averaging(tensors, &packing, settings)?
            } else {
                Merger::load_joining(tensors, &packing, settings, block)?
            });
        }
        let in_gguf = tensors.source().is_some_and(|source| source.architecture().is_some());
        let of_tower = [
            "visual.",
            "vision_tower.",
            "multi_modal_projector.",
            "vision_model.",
            "connector.",
        ];
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
        // learned positions are resampled only in addition to RoPE
        let is_square = self.decoder.config.inverse_frequencies.is_empty();
        let sized = !is_square || grid == [self.patches.side; 2];
        (whole && sized && bytes == pixels).then_some(tokens)
    }

    /// Begins to compute an image, whose `grid` has passed `tokens_of`.
    pub fn begin(&self, pool: &Pool, grid: [usize; 2]) -> Result<TowerRun> {
        let count = grid[0] * grid[1];
        let kv = KvPool::new(kv_shape(&self.decoder.config, count))?;
        let axes = |at| {
            let [row, column] = self.patches.place(at, grid[1]);
            [0, row as u32, column as u32]
        };
        let (deadline, tokens) = (Arc::new(Deadline::default()), count / self.patches.merge.pow(2));
        let mut memory = self.decoder.memory(pool.threads(), &kv, false)?;
        memory.end_at(&deadline);
        let mut run = TowerRun {
            memory,
            kv,
            grid,
            all: (0..count as u32).collect(),
            bounds: [0, count as u32],
            axes: (0..count).map(axes).collect(),
            next: 0,
            merged: 0,
            features: vec![0.0; tokens * self.width()],
            deadline,
            is_finite: true,
        };
        let row = row_of(&run.bounds, &run.all, &run.kv);
        self.decoder.begin(&mut run.memory, &row, count)?;
        Ok(run)
    }

    /// Continues to compute an image for about `slice`, at least by a work item. `pixels` have passed `tokens_of` with the
    /// grid. Returns whether the computation has ended.
    pub fn advance(&self, run: &mut TowerRun, pool: &mut Pool, pixels: &[u8], slice: Duration) -> Result<bool> {
        let operations = self.decoder.weights.operations().count();
        run.deadline.begin(slice);
        while run.next < operations {
            self.operate(run, pool, pixels)?;
            if run.deadline.has_passed() {
                return Ok(false);
            }
            run.next += 1;
        }
        while self.merge_next(run, pool)? {
            if run.deadline.check() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Computes the work items of the next operation that are left, until the deadline.
    fn operate(&self, run: &mut TowerRun, pool: &mut Pool, pixels: &[u8]) -> Result<()> {
        let row = row_of(&run.bounds, &run.all, &run.kv);
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
        let not_finite = self.decoder.forward_part(pool, memory, &row, tokens, next)?;
        run.is_finite &= not_finite.is_empty();
        Ok(())
    }

    /// Merges the next block of tokens. Returns false if there is none.
    fn merge_next(&self, run: &mut TowerRun, pool: &mut Pool) -> Result<bool> {
        let (width, size) = (self.width(), TOKENS.min(MERGED * pool.threads()));
        let tokens = run.features.len() / width;
        let (index, block) = (run.merged / tokens.div_ceil(size), run.merged % tokens.div_ceil(size));
        let Some((merger, from)) = self.mergers.iter().zip(run.memory.tapped()).nth(index) else {
            return Ok(false);
        };
        let rows = block * size..tokens.min((block + 1) * size);
        let mut found = self.merged(pool, merger, from, rows.clone())?;
        // the last merger's features are the embedding, which comes first
        let at = (index + 1) % self.mergers.len() * self.out_size;
        let to = &mut run.features[rows.start * width..rows.end * width];
        for (row, to) in found.rows(rows.len()).zip(to.chunks_exact_mut(width)) {
            to[at..at + self.out_size].copy_from_slice(&row[..self.out_size]);
        }
        run.merged += 1;
        Ok(true)
    }

    /// Joins the patches of each of some `tokens`, and computes a merger's output, [tokens, out_size].
    fn merged(&self, pool: &mut Pool, merger: &Merger, from: &Grid, tokens: Range<usize>) -> Result<Grid> {
        let (hidden, kernels, count) = (self.decoder.config.hidden_size, &self.decoder.kernels, tokens.len());
        let block = self.patches.merge.pow(2);
        let (averages, last) = (merger.averages(), &self.decoder.weights.norm);
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
                        let from = from.at((tokens.start + row) * block + part, 0);
                        if let Some(norm) = last {
                            norm.apply(kernels, from, (0, hidden), from);
                        }
                        if averages && part > 0 {
                            kernels.add(to, from, hidden);
                            continue;
                        }
                        let to = to.add(part * hidden);
                        to.copy_from_nonoverlapping(from, hidden);
                        if let (Some(norm), false) = (&merger.norm, merger.is_joined) {
                            norm.apply(kernels, to, (0, hidden), to);
                        }
                    }
                    if averages {
                        let sums = from_raw_parts_mut(to, hidden);
                        sums.iter_mut().for_each(|sum| *sum /= block as f32);
                    }
                    if let (Some(norm), true) = (&merger.norm, merger.is_joined) {
                        norm.apply(kernels, to, (0, width), to);
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

    /// Multiplies at most `TOKENS` rows by a matrix, adds its bias and applies GELU if `activates`.
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
            while let Some(group) = counters[1].claim(groups.count) {
                let panels = groups.panels(group);
                let (column, width, stride) = (panels.start * PANEL, panels.len() * PANEL, out.stride());
                // SAFETY: this thread's work item: these columns; `acts` was written before the barrier.
                unsafe {
                    kernels.matmul(matrix, panels, acts, 0..count, out.at(0, column), stride, false);
                    for row in 0..count {
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

impl TowerRun {
    /// Returns the features of the computed image, [tokens, width]. Errors if they are not finite.
    pub fn finish(self) -> Result<Vec<f32>> {
        if !self.is_finite || self.features.iter().any(|feature| !feature.is_finite()) {
            return Err(Error::step("the vision tower's output for an image is not finite"));
        }
        Ok(self.features)
    }
}

/// Returns the KV pages of `count` patches. The layers share them, as each stores its keys before it reads any.
fn kv_shape(config: &ModelConfig, count: usize) -> KvShape {
    KvShape {
        layers: vec![KvHeads {
            count: config.heads[0].kv_heads,
            dim: config.heads[0].head_dim,
        }],
        pages: count.div_ceil(PAGE),
        page_size: PAGE,
        latent: None,
        dtype: KvDtype::F32,
    }
}

/// Returns the single row of attention, which has `all` patches. `bounds`: 0 and their number.
fn row_of<'a>(bounds: &'a [u32; 2], all: &'a [u32], kv: &KvPool) -> Rows<'a> {
    let columns = kv.shape().pages;
    Rows {
        seq_lens: &bounds[1..],
        qo_indptr: bounds,
        table: &all[..columns],
        columns,
        slots: &[0],
        ends: &[],
    }
}
