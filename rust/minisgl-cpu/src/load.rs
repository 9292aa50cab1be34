//! From settings to a ready engine.
//!
//! Invariants: what cannot be is told before anything large is read.

use std::path::PathBuf;

use minisgl_kernels::kv::{KvDtype, KvHeads, KvPool, KvShape};
use minisgl_kernels::{Isa, Kernels, Kind, Mode};
use serde::Deserialize;

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::files;
use crate::model::{self, Decoder, ModelConfig, Names, Origin, Progress, Tensors, Weights};
use crate::states::States;
use crate::step::{Choices, Sizes};
use crate::threads::{Pool, default_threads};
use crate::weights::{Cache, Keeping, Packer};

/// All that Python decides.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The numbers of the model.
    pub model: ModelConfig,
    /// What its files call the parts of it.
    pub names: Names,
    /// A GGUF file or a folder of safetensors; none: seeded noise.
    pub weights: Option<PathBuf>,
    /// Where their panels are kept; none: they are packed at each start.
    #[serde(default)]
    pub panels: Option<Cache>,
    /// The seed of dummy weights.
    pub seed: u64,
    /// bfloat16, mxfp4 (experts alone) or f32, of dummy weights.
    pub dummy_kind: Option<String>,
    /// Ids that end a sequence.
    pub eos_ids: Vec<u32>,
    /// None: as many as there are cores.
    pub num_threads: Option<usize>,
    /// Holds the instruction set down: scalar, avx2, avx512, amx.
    pub isa: Option<String>,
    /// exact or int8.
    pub activations: String,
    /// f16, f32, q8 or q4.
    pub kv_dtype: String,
    /// Pages of the pool.
    pub num_pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Requests with a slot.
    pub max_rows: usize,
    /// Tokens of a sequence.
    pub max_seq_len: usize,
    /// States that are kept.
    pub num_checkpoints: usize,
    /// Measure the parts of forwards.
    pub timed: bool,
}

impl Settings {
    /// From JSON.
    pub fn parse(text: &str) -> Result<Self> {
        let settings: Self =
            serde_json::from_str(text).map_err(|error| Error::setting(format!("engine settings: {error}")))?;
        model::check(&settings.model)?;
        Ok(settings)
    }

    /// Bytes of one page in all layers.
    pub fn page_bytes(&self) -> Result<usize> {
        Ok(KvPool::page_bytes(&self.kv_shape()?))
    }

    /// Bytes of the state of one sequence; 0: no layer keeps any.
    pub fn state_bytes(&self) -> usize {
        States::bytes_of(&self.model.state_sizes())
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
            pages: self.num_pages + 1,
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

    fn tensors(&self) -> Result<Tensors> {
        let Some(path) = &self.weights else {
            let kind = match self.dummy_kind.as_deref() {
                Some("bfloat16") => Kind::BF16,
                Some("mxfp4") => Kind::MXFP4,
                _ => Kind::F32,
            };
            let files = self.names.checkpoint.clone();
            return Ok(Tensors::new(Origin::Dummy { seed: self.seed, kind }, files));
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

/// The operations of the model, a line each. Of matrices only the sizes are read.
pub fn operations(settings: &Settings) -> Result<String> {
    let (tensors, mut pool) = (settings.tensors()?, Pool::new(1)?);
    let weights = Weights::load((&tensors, &Packer::sketch()), &settings.model, &mut pool, &|_, _| ())?;
    Ok(weights.to_string())
}

/// What was loaded.
pub struct Loaded {
    /// Ready for steps.
    pub engine: Engine,
    /// Panels that are to be written into the cache behind the start.
    pub keeping: Option<Keeping>,
    /// All panels are in a file of the cache.
    pub mapped: bool,
}

/// Read the weights and make an engine of them.
pub fn load(settings: &Settings, progress: Progress<'_>) -> Result<Loaded> {
    let (mode, shape) = (settings.mode()?, settings.kv_shape()?);
    let isa = Isa::detect(settings.isa.as_deref())?;
    let mut pool = Pool::new(settings.num_threads.unwrap_or_else(default_threads))?;
    let tensors = settings.tensors()?;
    let packer = Packer::new(tensors.source(), settings.panels.as_ref());
    let weights = Weights::load((&tensors, &packer), &settings.model, &mut pool, progress)?;
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
    let engine = Engine::new(decoder, pool, sizes, choices, &settings.eos_ids)?;
    Ok(Loaded {
        engine,
        keeping,
        mapped,
    })
}
