//! Builder of layers as lists of operations. Each kind of part is checked, loaded and listed in its own file.
//!
//! Invariants: a `ModelConfig` that `check` accepted has no size that could overflow or divide by zero later; tensors
//! of a layer are requested in a fixed order, which identifies their panels in the cache.

mod attention;
mod experts;
mod loader;
mod mixers;
mod mlp;
mod streams;

use std::sync::Arc;

pub(super) use loader::Loader;
pub(super) use streams::{per_layer_tables, stream_tables};

use crate::error::{Error, Result};
use crate::model::config::{MAX_LAYERS, ModelConfig, Norms};
use crate::model::held::Norm;
use crate::model::layers::loader::{MAX_SIZE, unsupported, within};
use crate::model::names::Part;
use crate::model::operation::{Add, Operation, Project, Rows};

/// Rejects configurations that are invalid or not supported. The error has the name of the value in config.json.
pub fn check(config: &ModelConfig) -> Result<()> {
    within("hidden_size", config.hidden_size, MAX_SIZE)?;
    within("num_hidden_layers", config.num_layers, MAX_LAYERS)?;
    within("num_attention_heads", config.num_heads, MAX_LAYERS)?;
    within("vocab_size", config.vocab_size, MAX_SIZE)?;
    check_lengths(config)?;
    if config.pair_types && config.token_types < 2 {
        return Err(unsupported("type_vocab_size", config.token_types, "must be at least 2"));
    }
    if config.learned_positions > 0 && config.first_position >= config.learned_positions {
        let why = "must exceed the first position";
        return Err(unsupported("max_position_embeddings", config.learned_positions, why));
    }
    let alone = config
        .moe
        .as_ref()
        .is_none_or(|moe| moe.shared_size == 0 && !moe.beside);
    let plain = alone && config.per_layer.is_none() && !config.layer_scales && config.residual_scale == 1.0;
    if config.norms == Norms::Over && !plain {
        return Err(Error::unsupported(
            "config.json: norms of residual sums are supported for plain encoders only",
        ));
    }
    let has_first = |layer: usize| config.attends[layer] || config.state.is_some() && config.state_layers[layer];
    if config.is_parallel() && (config.moe.is_some() || !(0..config.num_layers).all(has_first)) {
        return Err(Error::unsupported(
            "config.json: an MLP parallel to attention is not supported with experts or in a layer without attention",
        ));
    }
    check_images(config)?;
    check_mtp(config)?;
    attention::check(config)?;
    mixers::check(config)?;
    mlp::check(config)?;
    experts::check(config)?;
    streams::check(config)
}

/// Rejects settings of images, of a text model or a vision tower, that are invalid.
fn check_images(config: &ModelConfig) -> Result<()> {
    let pairs = config.inverse_frequencies.first().map_or(0, Vec::len);
    let axes = &config.rope_axes;
    let one_table = config.inverse_frequencies.len() == 1 && axes.len() == pairs;
    let fits = one_table && axes.iter().all(|axis| *axis < 3);
    if !axes.is_empty() && !fits {
        return Err(unsupported(
            "mrope_section",
            axes.len(),
            "must be one axis for each pair",
        ));
    }
    if config.deep_features > config.num_layers {
        let why = "more than layers of the text model";
        return Err(unsupported("deepstack_visual_indexes", config.deep_features, why));
    }
    let Some(patches) = &config.patches else { return Ok(()) };
    within("patch_size", patches.size, 256)?;
    within("temporal_patch_size", patches.frames, 16)?;
    within("spatial_merge_size", patches.merge, 16)?;
    within("num_position_embeddings", patches.side, MAX_LAYERS)?;
    if !patches.taps.is_sorted_by(|one, next| one < next) || patches.taps.iter().any(|tap| *tap >= config.num_layers) {
        let why = "must be ascending layers of the tower";
        return Err(unsupported("deepstack_visual_indexes", patches.taps.len(), why));
    }
    Ok(())
}

/// Rejects an MTP layer in models whose layers it cannot continue.
fn check_mtp(config: &ModelConfig) -> Result<()> {
    let others = config.streams.is_some() || config.per_layer.is_some() || config.patches.is_some();
    let plain = !others && config.state.is_none() && !config.both_ways && config.rope_axes.is_empty();
    let last = config.num_layers - 1;
    let own = config.attends[last] && config.heads[last].kv_of == last;
    if config.mtp && !(plain && own && last > 0) {
        return Err(Error::unsupported(
            "config.json: an MTP layer is not supported in such a model",
        ));
    }
    Ok(())
}

/// Rejects per-layer lists and RoPE tables with inconsistent lengths.
fn check_lengths(config: &ModelConfig) -> Result<()> {
    let layers = config.num_layers;
    let tables = config.inverse_frequencies.len();
    let [sizes, per_layer_tables] = [
        "must be the number of per-layer sizes",
        "must be one table or none per layer",
    ];
    let by_layer = [
        ("num_hidden_layers", config.heads.len(), sizes),
        ("num_hidden_layers", config.intermediate_sizes.len(), sizes),
        ("num_hidden_layers", config.attends.len(), sizes),
        ("num_hidden_layers", config.state_layers.len(), sizes),
        ("layer_types", config.windows.len(), "must be one per layer"),
        ("no_rope_layers", config.rotary.len(), per_layer_tables),
    ];
    if let Some((name, count, why)) = by_layer.into_iter().find(|(_, count, _)| *count != layers) {
        let value = if name == "num_hidden_layers" { layers } else { count };
        return Err(unsupported(name, value, why));
    }
    if config.rotary.iter().flatten().any(|table| *table >= tables) {
        return Err(unsupported("no_rope_layers", config.rotary.len(), per_layer_tables));
    }
    if config.rope_scales.len() != tables {
        return Err(unsupported("rope_scaling", config.rope_scales.len(), "one per table"));
    }
    Ok(())
}

impl Loader<'_> {
    /// Loads the layer and returns its operations, in order.
    pub fn load(&self) -> Result<Vec<Operation>> {
        let (config, layer) = (self.config, self.layer);
        let (attends, experts) = (config.attends[layer], config.experts_of(layer));
        let inner = config.intermediate_sizes[layer];
        let state = config.state.filter(|_| config.state_layers[layer]);
        let is_before = !matches!(config.norms, Norms::Behind | Norms::Over);
        let is_behind = matches!(config.norms, Norms::Behind | Norms::Both | Norms::Over);
        let norm_if = |there: bool, part| there.then(|| self.norm(part)).transpose();
        let bare = config.bare_first && layer == 0;
        let has_first = attends || state.is_some();
        let norm = norm_if(is_before && !bare && has_first, Part::AttentionNorm)?.map(Arc::new);
        let behind = norm_if(is_behind, Part::AttentionNormBehind)?;

        let mut first = Vec::new();
        let attention = attends.then(|| self.attention(norm.clone())).transpose()?;
        let mixer = state.map(|kind| self.mixer(kind, norm.clone())).transpose()?;
        match (attention, mixer) {
            (Some((attention, out)), Some((mixer, mixed))) => {
                // the recurrent layer must read the hidden states without attention's output
                let out = Project { to: Rows::Aside, ..out };
                first.extend(attention.into_iter().chain([Operation::Project(out)]));
                first.extend(mixer.into_iter().chain(self.way_out(mixed, behind)));
                first.push(self.add(None, 1.0)); // adds attention's output
            }
            (Some((operations, out)), None) | (None, Some((operations, out))) => {
                first.extend(operations.into_iter().chain(self.way_out(out, behind)));
            }
            (None, None) => {}
        }

        let has_mlp = inner > 0 || experts.is_some();
        let own = norm_if(is_before && has_mlp && config.norms != Norms::Parallel, Part::MlpNorm)?;
        // in parallel layers both read the same input: attention's norm is used for both
        let mlp_norm = own.map(Arc::new).or_else(|| norm.clone().filter(|_| !is_behind));
        let behind = norm_if(is_behind, Part::MlpNormBehind)?;
        let scale = if config.layer_scales {
            self.vector(Part::LayerScale, "weight", 1)?[0]
        } else {
            1.0
        };
        let last = if config.per_layer.is_some() { 1.0 } else { scale };
        let second = match experts {
            None if inner == 0 => Vec::new(),
            None => self.feed_forward(inner, mlp_norm, behind, last)?,
            Some(moe) => self.experts(moe, mlp_norm, self.addition(behind, last))?,
        };
        let per_layer = config.per_layer.map(|one| self.per_layer(one, scale)).transpose()?;
        let streams = config.streams.map(|one| self.streams(one, norm.clone())).transpose()?;
        let [around, between, end] = streams.unwrap_or_default();
        Ok([around, first, between, second, end, per_layer.unwrap_or_default()]
            .into_iter()
            .flatten()
            .collect())
    }

    /// Loads an MTP layer: a layer whose input is projected from the next token's embedding and the hidden states.
    pub fn load_mtp(&self) -> Result<Vec<Operation>> {
        let size = self.config.hidden_size;
        let join = Operation::JoinNext(self.norm(Part::MtpEmbeddingNorm)?, self.norm(Part::MtpHiddenNorm)?);
        let project = self.product(Part::MtpIn, [size, 2 * size], false, Rows::Inner)?;
        let input = [join, Operation::Project(project)];
        Ok(input
            .into_iter()
            .chain(self.load()?)
            .chain([Operation::Check])
            .collect())
    }

    /// Returns the operations from the output of attention (or a recurrent layer) to the residual stream.
    fn way_out(&self, out: Project, norm: Option<Norm>) -> Vec<Operation> {
        if self.config.is_parallel() {
            // the MLP must read the hidden states without attention's output
            return vec![Operation::Project(Project { to: Rows::Aside, ..out })];
        }
        self.added(out, norm, 1.0)
    }

    /// Returns a matmul and its addition to the hidden states. The sums are then multiplied by `last`.
    fn added(&self, out: Project, norm: Option<Norm>, last: f32) -> Vec<Operation> {
        if self.config.norms == Norms::Over {
            let sum = Operation::Project(Project { adds: true, ..out });
            return [sum].into_iter().chain(norm.map(Operation::Norm)).collect();
        }
        if norm.is_some() || self.config.residual_scale != 1.0 || last != 1.0 {
            let out = Operation::Project(Project { to: Rows::Aside, ..out });
            return vec![out, self.add(norm, last)];
        }
        vec![Operation::Project(Project { adds: true, ..out })]
    }

    fn add(&self, norm: Option<Norm>, last: f32) -> Operation {
        Operation::Add(self.addition(norm, last))
    }

    fn addition(&self, norm: Option<Norm>, last: f32) -> Add {
        let scale = self.config.residual_scale;
        Add { norm, scale, last }
    }

    /// Returns the operations of a dense MLP.
    fn feed_forward(
        &self,
        inner: usize,
        norm: Option<Arc<Norm>>,
        behind: Option<Norm>,
        last: f32,
    ) -> Result<Vec<Operation>> {
        let mut mlp = self.dense([Part::Gate, Part::Up, Part::Down], inner)?;
        mlp.halves.cut = self.config.gate_threshold(self.layer);
        let (halves, down) = self.mlp(norm, mlp, true);
        let mut operations = vec![halves];
        if self.config.is_parallel() {
            let sum = Operation::Project(Project { adds: true, ..down });
            operations.extend([sum, self.add(None, last)]); // adds attention's output
        } else {
            operations.extend(self.added(down, behind, last));
        }
        Ok(operations)
    }
}
