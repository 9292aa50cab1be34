//! Loading: from the settings to an engine that is ready for steps.
//!
//! Invariants: invalid settings are rejected before anything large is read.

use std::path::PathBuf;

use minisgl_kernels::kv::{KvDtype, KvHeads, KvPool, KvShape};
use minisgl_kernels::{Isa, Kernels, Kind, Mode};
use serde::Deserialize;

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::files::{self, gguf, safetensors};
use crate::model::{self, Decoder, ModelConfig, Names, Origin, Progress, Tensors, Tower, TowerSettings, Weights};
use crate::states::States;
use crate::step::{Choices, Sizes};
use crate::threads::{Pool, default_threads};
use crate::weights::{Cache, Keeping, Packer};

/// Settings of the engine, as Python sends them in JSON.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Sizes and features of the model.
    pub model: ModelConfig,
    /// Tensor names of the model, in checkpoints and in GGUF files.
    pub names: Names,
    /// GGUF file or folder of safetensors; `None` for dummy weights.
    pub weights: Option<PathBuf>,
    /// Cache of packed weights (panels); `None` packs them at each start.
    #[serde(default)]
    pub panels: Option<Cache>,
    /// Random seed of dummy weights.
    pub seed: u64,
    /// Element type of dummy weights: bfloat16, mxfp4 (experts only) or f32.
    pub dummy_kind: Option<String>,
    /// Token ids that end a sequence.
    pub eos_ids: Vec<u32>,
    /// Number of threads that compute; `None` is one per core.
    pub num_threads: Option<usize>,
    /// Highest instruction set to use: scalar, avx2, avx512 or amx. `None` is the best that the processor has.
    pub isa: Option<String>,
    /// Activation precision in matmuls: exact, bf16 or int8.
    pub activations: String,
    /// Element type of the KV cache: f16, f32, q8 or q4.
    pub kv_dtype: String,
    /// Pages of the KV pool.
    pub num_pages: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Requests that may hold a slot at once.
    pub max_rows: usize,
    /// Maximum length of a sequence, in tokens.
    pub max_seq_len: usize,
    /// Maximum number of state snapshots (recurrent layers only).
    pub num_checkpoints: usize,
    /// Measure the time of each part of the forward pass.
    pub timed: bool,
    /// Vision tower of the model; `None` accepts no images.
    #[serde(default)]
    pub tower: Option<TowerSettings>,
    /// Folder of safetensors or GGUF file with the tower; `None` for dummy weights.
    #[serde(default)]
    pub tower_weights: Option<PathBuf>,
    /// Maximum bytes of image features, without those that are being computed.
    #[serde(default)]
    pub image_cache: usize,
}

impl Settings {
    /// Parses settings from JSON and checks the model's configuration.
    pub fn parse(text: &str) -> Result<Self> {
        let settings: Self =
            serde_json::from_str(text).map_err(|error| Error::setting(format!("engine settings: {error}")))?;
        model::check(&settings.model)?;
        (settings.tower.as_ref()).map_or(Ok(()), |tower| model::check(&tower.model))?;
        Ok(settings)
    }

    /// Returns the bytes of one KV page in all layers.
    pub fn page_bytes(&self) -> Result<usize> {
        Ok(KvPool::page_bytes(&self.kv_shape()?))
    }

    /// Returns the bytes of one sequence's recurrent state, 0 if no layer has one.
    pub fn state_bytes(&self) -> usize {
        States::bytes_for(&self.model.state_sizes())
    }

    /// Returns the bytes of memory in which an image of `tokens` tokens is computed, 0 without a vision tower.
    pub fn image_bytes(&self, tokens: usize) -> Result<usize> {
        let mode = self.mode()?;
        Ok((self.tower.as_ref()).map_or(0, |tower| tower.image_bytes(tokens, mode)))
    }

    /// Returns the pages of an image's tokens that attend to each other, 0 if they do not.
    fn pages_together(&self) -> usize {
        let tokens = self.tower.as_ref().map_or(0, TowerSettings::tokens_together);
        tokens.div_ceil(self.page_size.max(1))
    }

    fn kv_shape(&self) -> Result<KvShape> {
        let shape = KvShape {
            layers: self
                .model
                .kv_owners()
                .map(|(_, heads)| KvHeads {
                    count: heads.kv_heads,
                    dim: heads.head_dim,
                })
                .collect(),
            pages: self.num_pages + 1 + self.max_rows * self.pages_together(),
            page_size: self.page_size,
            latent: self.model.latent.as_ref().map(|latent| latent.rank),
            dtype: KvDtype::parse(&self.kv_dtype)?,
        };
        shape.check()?;
        Ok(shape)
    }

    fn mode(&self) -> Result<Mode> {
        match self.activations.as_str() {
            "exact" => Ok(Mode::Exact),
            "bf16" => Ok(Mode::Bf16),
            "int8" => Ok(Mode::Int8),
            other => Err(Error::setting(format!(
                "--activations {other}: choose exact, bf16 or int8"
            ))),
        }
    }

    fn dummy(&self) -> Origin {
        let kind = match self.dummy_kind.as_deref() {
            Some("bfloat16") => Kind::BF16,
            Some("mxfp4") => Kind::MXFP4,
            _ => Kind::F32,
        };
        Origin::Dummy { seed: self.seed, kind }
    }

    /// Opens the files of the vision tower, if there is one.
    fn tower_tensors(&self) -> Result<Option<Tensors>> {
        let Some(tower) = &self.tower else { return Ok(None) };
        // not `files::open`, which hides a tower
        let origin = match &self.tower_weights {
            Some(path) if path.is_dir() => Origin::Files(Box::new(safetensors::Folder::open(path)?)),
            Some(path) => Origin::Files(Box::new(gguf::File::open(path)?)),
            None => self.dummy(),
        };
        Ok(Some(Tensors::new(origin, tower.names.clone())))
    }

    fn tensors(&self) -> Result<Tensors> {
        let Some(path) = &self.weights else {
            return Ok(Tensors::new(self.dummy(), self.names.checkpoint.clone()));
        };
        let source = files::open(path)?;
        let files = if source.architecture().is_some() {
            &self.names.gguf
        } else {
            &self.names.checkpoint
        };
        Ok(Tensors::new(Origin::Files(source), files.clone()))
    }
}

/// Returns the model's operations as text, one a line. Reads only the shapes of matrices.
pub fn operations(settings: &Settings) -> Result<String> {
    let (tensors, mut pool) = (settings.tensors()?, Pool::new(1)?);
    let weights = Weights::load((&tensors, &Packer::sketch()), &settings.model, &mut pool, &|_, _| ())?;
    Ok(weights.to_string())
}

/// Result of loading: the engine and the state of the panel cache.
pub struct Loaded {
    /// Engine that is ready for steps.
    pub engine: Engine,
    /// Panels to be written to the cache in the background; `None` if there is nothing to write.
    pub keeping: Option<Keeping>,
    /// True if all panels came from a cache file.
    pub mapped: bool,
}

/// Reads the weights and creates the engine. `progress` gets the progress of loading.
pub fn load(settings: &Settings, progress: Progress<'_>) -> Result<Loaded> {
    let (mode, shape) = (settings.mode()?, settings.kv_shape()?);
    let isa = Isa::detect(settings.isa.as_deref())?;
    let mut pool = Pool::new(settings.num_threads.unwrap_or_else(default_threads))?;
    let tensors = settings.tensors()?;
    let of_tower = settings.tower_tensors()?;
    let sources: Vec<_> = [Some(&tensors), of_tower.as_ref()]
        .into_iter()
        .flatten()
        .filter_map(Tensors::source)
        .collect();
    let mut packer = Packer::new(&sources, settings.panels.as_ref());
    let weights = Weights::load((&tensors, &packer), &settings.model, &mut pool, progress)?;
    packer.end_model(Weights::num_parts(&settings.model));
    let tower = (settings.tower.as_ref().zip(of_tower.as_ref()))
        .map(|(tower, of)| Tower::load(tower, (of, &packer), (Kernels::new(isa), mode), &mut pool))
        .transpose()?;
    let (keeping, mapped) = packer.end();
    let decoder = Decoder::new(settings.model.clone(), weights, Kernels::new(isa), mode);
    let sizes = Sizes {
        num_pages: settings.num_pages,
        page_size: settings.page_size,
        max_rows: settings.max_rows,
        max_seq_len: settings.max_seq_len,
        num_checkpoints: settings.num_checkpoints,
    };
    let choices = Choices {
        kv: shape,
        timed: settings.timed,
    };
    let mut engine = Engine::new(decoder, pool, sizes, choices, &settings.eos_ids)?;
    if let Some(tower) = tower {
        engine.see(tower, settings.image_cache);
    }
    Ok(Loaded {
        engine,
        keeping,
        mapped,
    })
}
