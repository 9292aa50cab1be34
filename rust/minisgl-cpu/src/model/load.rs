//! Loading of a model's weights: one thread loads a layer, all threads load at once.
//!
//! Invariants: a tensor that does not fit the configuration is an error with the tensor's name.

use std::sync::{Arc, Mutex};

use minisgl_kernels::Kind;
use minisgl_kernels::attention::Distances;
use minisgl_kernels::memory::Zeroed;
use minisgl_kernels::panels::{Matrix, Panels, Shape};

use crate::error::{Error, Result};
use crate::model::config::{ByDistance, ModelConfig, Patches, Slopes};
use crate::model::held::Norm;
use crate::model::layers::{Loader, per_layer_tables, stream_tables};
use crate::model::names::{At, Part};
use crate::model::operation::{Angles, Embed, Operation, PatchEmbed, Project, Rows};
use crate::model::pieces::{load_norm, pack, padded};
use crate::model::tensors::{ModelTensor, Tensors};
use crate::model::weights::{Mtp, Weights};
use crate::threads::{Counter, Pool};
use crate::weights::{Packer, Packing};

/// Callback for load progress, with (parts done, parts in total). All threads may call it.
pub type Progress<'a> = &'a (dyn Fn(usize, usize) + Sync);

impl Weights {
    /// Returns the number of parts of a model that are packed one by one: its layers, and the tables around them.
    pub fn num_parts(config: &ModelConfig) -> usize {
        config.num_layers + 2
    }

    /// Reads and packs all tensors on the threads of `pool`. Errors if the file has an unused tensor.
    pub fn load(
        (tensors, packer): (&Tensors, &Packer),
        config: &ModelConfig,
        pool: &mut Pool,
        progress: Progress<'_>,
    ) -> Result<Self> {
        let (mut layers, (mut before, head)) = load_parts((tensors, packer), config, pool, progress)?;
        let [into_streams, mut after] = stream_tables(tensors, config, &packer.part(config.num_layers + 1))?;
        before.extend(into_streams);
        for (layer, operations) in layers.iter_mut().enumerate() {
            let taps = config.patches.iter().flat_map(|patches| &patches.taps);
            let tapped = taps.enumerate().filter(|(_, tap)| **tap == layer);
            operations.extend(tapped.map(|(index, _)| Operation::Tap(index)));
            operations.extend((layer < config.deep_features).then_some(Operation::AddFeatures(layer)));
        }
        after.push(Operation::Check);
        let mtp = config
            .mtp
            .then(|| load_mtp(tensors, config, layers.pop()))
            .transpose()?;
        let norm = config
            .last_norm
            .then(|| load_global_norm(tensors, config, Part::Norm))
            .transpose()?;
        let distances = config
            .distances
            .as_ref()
            .map(|kind| load_distances(tensors, config.num_heads, kind))
            .transpose()?;
        let head_bias = config
            .head_bias
            .then(|| tensors.part_vector(Part::Head, At::default(), "bias", config.vocab_size))
            .transpose()?;
        if config.patches.is_none() {
            tensors.check_all_used(|name| is_redundant(name, tensors, config))?;
        }
        Ok(Self {
            before,
            layers,
            after,
            mtp,
            norm,
            head,
            head_bias: head_bias.map(padded),
            distances,
        })
    }
}

/// Operations before the layers, and the LM head.
type Tables = (Vec<Operation>, Matrix);

/// Loads the layers and the tables on all threads. Stops at the first error.
fn load_parts(
    (tensors, packer): (&Tensors, &Packer),
    config: &ModelConfig,
    pool: &mut Pool,
    progress: Progress<'_>,
) -> Result<(Vec<Vec<Operation>>, Tables)> {
    let parts = config.num_layers + 1;
    let layers: Vec<Mutex<Option<Vec<Operation>>>> = (0..config.num_layers).map(|_| Mutex::new(None)).collect();
    let tables = Mutex::new(None);
    let failed = Mutex::new(None);
    let (next, done) = (Counter::default(), Counter::default());
    let load = |part: usize| -> Result<()> {
        let packing = packer.part(part);
        // the tables first: they are the largest part
        let Some(layer) = part.checked_sub(1) else {
            let loaded = load_tables(tensors, config, &packing)?;
            *lock(&tables) = Some(loaded);
            return Ok(());
        };
        let loader = Loader {
            tensors,
            config,
            packing,
            layer,
        };
        let is_mtp = config.mtp && layer + 1 == config.num_layers;
        let loaded = if is_mtp { loader.load_mtp()? } else { loader.load()? };
        *lock(&layers[layer]) = Some(loaded);
        Ok(())
    };
    pool.run(&|_, _| {
        while let Some(part) = next.claim(parts) {
            if lock(&failed).is_some() {
                return;
            }
            if let Err(error) = load(part) {
                lock(&failed).get_or_insert(error);
                return;
            }
            // otherwise panels plus file pages would take twice the model's memory
            tensors.release();
            if let Some(before) = done.claim(usize::MAX) {
                progress(before + 1, parts);
            }
        }
    })?;
    if let Some(error) = lock(&failed).take() {
        return Err(error);
    }
    let missing = || Error::file("a part of the weights was not loaded");
    let layers = layers.iter().map(|layer| lock(layer).take().ok_or_else(missing));
    let layers = layers.collect::<Result<Vec<_>>>()?;
    let tables = lock(&tables).take().ok_or_else(missing)?;
    Ok((layers, tables))
}

/// RoPE factors in GGUF files; the configuration's frequencies include them already.
const ROPE_FACTORS: [&str; 3] = [
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
];

/// Returns true for a tensor that is not needed, such as a copy of the embedding, or RoPE frequencies.
fn is_redundant(name: &str, tensors: &Tensors, config: &ModelConfig) -> bool {
    ROPE_FACTORS.contains(&name)
        || tensors.files.buffers.iter().any(|end| name.ends_with(end))
        || name.ends_with("rotary_emb.inv_freq")
        || config.left_out.iter().any(|prefix| name.starts_with(prefix))
        || (config.tie_word_embeddings && name == "lm_head.weight")
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// Loads the operations before the layers, and the LM head.
fn load_tables(tensors: &Tensors, config: &ModelConfig, packing: &Packing<'_>) -> Result<Tables> {
    if let Some(patches) = &config.patches {
        return Ok((load_patches(tensors, config, patches, packing)?, no_head()));
    }
    let shape = [config.vocab_size, config.hidden_size];
    let of = |part, shape: &[usize; 2]| pack(packing, &[tensors.part(part, At::default(), shape)?], false);
    let embedding = of(Part::Embedding, &shape)?;
    let added = |part, count: usize| (count > 0).then(|| of(part, &[count, config.hidden_size])).transpose();
    let positions = added(Part::Positions, config.learned_positions)?;
    let token_types = added(Part::TokenTypes, config.token_types)?;
    let per_layer = per_layer_tables(tensors, config, packing)?;
    let (head, table) = if config.tie_word_embeddings && !has_other_head(tensors, shape)? {
        (embedding, None)
    } else {
        (of(Part::Head, &shape)?, Some(embedding))
    };
    let norm = || load_global_norm(tensors, config, Part::EmbeddingNorm);
    let embed = Operation::Embed(Embed {
        table,
        scale: config.embedding_scale,
        token_types,
        positions,
        first_position: config.first_position,
        norm: config.embedding_norm.then(norm).transpose()?,
        angles: angles_of(config),
    });
    Ok(([embed].into_iter().chain(per_layer).collect(), head))
}

fn angles_of(config: &ModelConfig) -> Angles {
    let tables = config.inverse_frequencies.iter().cloned();
    Angles {
        tables: tables.zip(config.rope_scales.iter().copied()).collect(),
        axes: config.rope_axes.clone(),
    }
}

/// Loads the input of a vision tower. An image is a film of equal frames, so the weights of all frames are added.
fn load_patches(
    tensors: &Tensors,
    config: &ModelConfig,
    patches: &Patches,
    packing: &Packing<'_>,
) -> Result<Vec<Operation>> {
    let (hidden, size, frames, values) = (config.hidden_size, patches.size, patches.frames, patches.values());
    let values_of = |what, shape: &[usize]| tensors.part_values(Part::Patches, At::default(), what, shape);
    let sums: Vec<f32> = if tensors.has(Part::Patches, At::default(), "weight.1") {
        // GGUF files have a tensor for each of two frames
        let frame = |what| values_of(what, &[hidden, 3, size, size]);
        let (first, second) = (frame("weight")?, frame("weight.1")?);
        first.iter().zip(second).map(|(one, other)| one + other).collect()
    } else {
        let film = values_of("weight", &[hidden, 3, frames, size, size])?;
        let channels = film.chunks(frames * size * size);
        let sums = channels.flat_map(|film| {
            let (first, others) = film.split_at(size * size);
            let rest = |at| others.iter().skip(at).step_by(size * size);
            first
                .iter()
                .enumerate()
                .map(move |(at, one)| rest(at).fold(*one, |sum, x| sum + x))
        });
        sums.collect()
    };
    let folded = ModelTensor::Owned {
        name: "patches".to_owned(),
        kind: Kind::F32,
        shape: vec![hidden, values],
        data: sums.into_iter().flat_map(f32::to_le_bytes).collect(),
    };
    let positions = tensors.part(Part::Positions, At::default(), &[patches.side * patches.side, hidden])?;
    let project = Project {
        bias: Some(padded(tensors.part_vector(
            Part::Patches,
            At::default(),
            "bias",
            hidden,
        )?)),
        adds: true,
        ..Project::new(Rows::Inner, vec![(0, pack(packing, &[folded], false)?)], Rows::Hidden)
    };
    let embed = PatchEmbed {
        patches: patches.clone(),
        positions: positions.view()?.decode(),
        angles: angles_of(config),
    };
    Ok(vec![Operation::Patches(embed), Operation::Project(project)])
}

/// Returns a matrix without rows, for a model without an LM head.
fn no_head() -> Matrix {
    let [n, panels, k] = [0; 3];
    let shape = Shape {
        kind: Kind::F32,
        n,
        panels,
        k,
    };
    Matrix::new(shape, Panels::Own(Arc::new(Zeroed::new(0))))
}

/// Loads a norm that belongs to no layer.
fn load_global_norm(tensors: &Tensors, config: &ModelConfig, part: Part) -> Result<Norm> {
    load_norm(tensors, config, part, At::default(), config.hidden_size)
}

/// Returns the MTP layer, of `operations` that are loaded already.
fn load_mtp(tensors: &Tensors, config: &ModelConfig, operations: Option<Vec<Operation>>) -> Result<Mtp> {
    let at = At {
        layer: config.num_layers - 1,
        ..At::default()
    };
    Ok(Mtp {
        operations: operations.unwrap_or_default(),
        norm: load_norm(tensors, config, Part::MtpNorm, at, config.hidden_size)?,
    })
}

fn load_distances(tensors: &Tensors, heads: usize, kind: &ByDistance) -> Result<Distances> {
    let by_distance = |positions: usize, bias_of: &dyn Fn(usize, i64) -> f32| {
        let most = positions as i64;
        let all = (0..heads).flat_map(|head| (1 - most..most).map(move |behind| (head, behind)));
        Distances {
            numbers: all
                .map(|(head, behind)| bias_of(head, behind) * std::f32::consts::LOG2_E)
                .collect(),
            most: positions,
        }
    };
    match kind {
        ByDistance::Ranges(ranges) => {
            let tensor = tensors.part(Part::Distances, At::default(), &[ranges.count, heads])?;
            let numbers = tensor.view()?.decode();
            let bias_of = |head, behind| numbers[ranges.bucket_of(behind) * heads + head];
            Ok(by_distance(ranges.positions, &bias_of))
        }
        ByDistance::Slopes(Slopes { by_head, positions }) => {
            let bias_of = |head: usize, behind: i64| by_head[head] * behind.unsigned_abs() as f32;
            Ok(by_distance(*positions, &bias_of))
        }
    }
}

/// Returns true if the file's LM head differs from the embedding, though some fine-tunes claim that they are tied.
fn has_other_head(tensors: &Tensors, shape: [usize; 2]) -> Result<bool> {
    if !tensors.has(Part::Head, At::default(), "weight") {
        return Ok(false);
    }
    let of = |part| tensors.part(part, At::default(), &shape);
    let (head, table) = (of(Part::Head)?, of(Part::Embedding)?);
    let (head, table) = (head.view()?, table.view()?);
    Ok(head.kind() != table.kind() || head.data() != table.data())
}
