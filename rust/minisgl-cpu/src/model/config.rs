//! Model configuration, as Python reads it from config.json.
//!
//! `layers/` validates it, each part next to the code that uses it.

use minisgl_kernels::convolution::CHANNELS;
use minisgl_kernels::delta_rule::BLOCK;
use minisgl_kernels::mamba::Gating;
use minisgl_kernels::panels::PANEL;
use serde::Deserialize;

/// Maximum number of layers (and of some other sizes). A larger value means a damaged file.
pub(super) const MAX_LAYERS: usize = 4096;
pub(super) const MAX_STATE: usize = 1 << 28;
/// Maximum number of residual streams.
pub(super) const MAX_STREAMS: usize = 8;

/// Model configuration: all that differs between architectures, which share one decoder. Fields are documented in
/// `python/minisgl/models/config.py`, those of the parts in `architectures.py` there.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    pub(crate) hidden_size: usize,
    pub(crate) num_layers: usize,
    pub(crate) num_heads: usize,
    pub(crate) heads: Vec<Heads>,
    pub(crate) attends: Vec<bool>,
    pub(crate) state: Option<StateKind>,
    pub(crate) state_layers: Vec<bool>,
    pub(crate) attention_gates: bool,
    pub(crate) value_norm: bool,
    pub(crate) intermediate_sizes: Vec<usize>,
    pub(crate) vocab_size: usize,
    pub(crate) norm_eps: f32,
    pub(crate) layer_norm: bool,
    pub(crate) norm_bias: bool,
    pub(crate) norm_offset: f32,
    pub(crate) norms: Norms,
    pub(crate) qk_norm: HeadNorms,
    pub(crate) inverse_frequencies: Vec<Vec<f32>>,
    pub(crate) rope_scales: Vec<f32>,
    pub(crate) query_growth: Option<QueryGrowth>,
    pub(crate) tie_word_embeddings: bool,
    pub(crate) qkv_bias: bool,
    pub(crate) out_bias: bool,
    pub(crate) mlp_bias: bool,
    pub(crate) down_bias: bool,
    pub(crate) head_bias: bool,
    pub(crate) learned_positions: usize,
    pub(crate) first_position: usize,
    pub(crate) token_types: usize,
    pub(crate) pair_types: bool,
    pub(crate) embedding_norm: bool,
    pub(crate) bare_first: bool,
    pub(crate) last_norm: bool,
    pub(crate) distances: Option<ByDistance>,
    pub(crate) both_ways: bool,
    pub(crate) windows: Vec<Option<usize>>,
    pub(crate) chunked: bool,
    pub(crate) rotary: Vec<Option<usize>>,
    pub(crate) sinks: bool,
    pub(crate) attention_scale: f32,
    pub(crate) value_scale: f32,
    pub(crate) attention_cap: f32,
    pub(crate) embedding_scale: f32,
    pub(crate) residual_scale: f32,
    pub(crate) layer_scales: bool,
    pub(crate) per_layer: Option<PerLayer>,
    pub(crate) streams: Option<Streams>,
    pub(crate) gate_cuts: Vec<f32>,
    pub(crate) logits_scale: f32,
    pub(crate) logits_cap: f32,
    pub(crate) activation: Activation,
    pub(crate) gated: bool,
    pub(crate) left_out: Vec<String>,
    pub(crate) latent: Option<LatentConfig>,
    pub(crate) moe: Option<MoeConfig>,
    #[serde(default)]
    pub(crate) rope_axes: Vec<usize>,
    #[serde(default)]
    pub(crate) deep_features: usize,
    #[serde(default)]
    pub(crate) patches: Option<Patches>,
    #[serde(default)]
    pub(crate) mtp: bool,
}

/// Input of a vision tower: patches of an image in place of tokens.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Patches {
    pub size: usize,
    pub frames: usize,
    pub merge: usize,
    pub side: usize,
    pub taps: Vec<usize>,
}

impl Patches {
    /// Returns the pixel values of a patch.
    pub fn values(&self) -> usize {
        3 * self.size * self.size
    }

    /// Returns the row and the column of patch `at` in a grid with `columns` columns. Patches are ordered by blocks.
    pub fn place(&self, at: usize, columns: usize) -> [usize; 2] {
        let (merge, block) = (self.merge, at / (self.merge * self.merge));
        let of_block = [block / (columns / merge), block % (columns / merge)];
        [
            of_block[0] * merge + at / merge % merge,
            of_block[1] * merge + at % merge,
        ]
    }
}

/// Attention bias by distance between query and key.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum ByDistance {
    Ranges(Ranges),
    Slopes(Slopes),
}

/// ALiBi (arXiv 2108.12409): each head adds its slope (below 0) times the distance of key and query, on both sides.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Slopes {
    pub by_head: Vec<f32>,
    pub positions: usize,
}

/// Relative position buckets (T5) with one bias per head, half of them for keys before the query, half after it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Ranges {
    pub count: usize,
    pub most: usize,
    pub positions: usize,
}

impl Ranges {
    /// Returns the bucket of a key `behind` tokens after its query. Long distances share buckets by logarithm.
    pub fn bucket_of(&self, behind: i64) -> usize {
        let side = self.count / 2;
        let (away, exact) = (behind.unsigned_abs() as usize, side / 2);
        let within = if away < exact {
            away
        } else {
            let share = (away as f32 / exact as f32).ln() / ((self.most as f64 / exact as f64).ln() as f32);
            (exact + (share * (side - exact) as f32) as usize).min(side - 1)
        };
        within + if behind > 0 { side } else { 0 }
    }
}

/// Latent attention (MLA), stored as one KV head: its key is the latent plus RoPE columns, its value the latent.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatentConfig {
    pub rank: usize,
    pub query_rank: usize,
    pub plain_dim: usize,
    pub value_dim: usize,
    pub norm_eps: f32,
}

/// Recurrent state of a layer: of constant size, and valid after one specific token of the sequence.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum StateKind {
    ShortConv(ShortConv),
    DeltaNet(DeltaNet),
    Mamba2(Mamba2),
}

/// Gated delta net (arXiv 2412.06464).
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct DeltaNet {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub length: usize,
}

/// Short convolution over the last tokens, per channel, between two gates (LFM2).
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct ShortConv {
    pub length: usize,
    pub bias: bool,
}

/// Mamba-2 layer (arXiv 2405.21060).
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Mamba2 {
    pub heads: usize,
    pub head_dim: usize,
    pub groups: usize,
    pub size: usize,
    pub length: usize,
    pub conv_bias: bool,
    pub least_step: f32,
    pub most_step: Option<f32>,
    #[serde(with = "GatingName")]
    pub gating: Gating,
    pub factors: [f32; 5],
    pub out_scale: f32,
}

/// Names of the [`Gating`] variants in JSON.
#[derive(Deserialize)]
#[serde(remote = "Gating", rename_all = "snake_case")]
enum GatingName {
    Alone,
    BeforeNorm,
    BehindNorm,
}

/// Attention sizes of one layer.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Heads {
    pub kv_heads: usize,
    pub head_dim: usize,
    pub kv_of: usize,
    pub values_are_keys: bool,
}

/// Embeddings that are added in each layer (Gemma 3n).
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct PerLayer {
    pub size: usize,
    pub vocab_size: usize,
}

/// Several residual streams (AltUp, arXiv 2301.13310) with a low-rank residual (Laurel, arXiv 2411.07501).
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Streams {
    pub count: usize,
    pub rank: usize,
}

/// Activation function of an MLP.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    Silu,
    ScaledSilu { gate: f32, out: f32 },
    Gelu,
    GeluErf,
    Relu2,
    ClampedSwiglu { alpha: f32, limit: f32 },
}

/// Placement of the norms in a layer.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Norms {
    Before,
    Behind,
    Both,
    Parallel,
    Apart,
    Over,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum HeadNorms {
    None,
    Head,
    Heads,
    Whole,
    Rotated,
    Plain,
}

/// Query scaling by position: the query at position p is multiplied by 1 + beta ln(1 + floor((p + first) / every)).
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueryGrowth {
    pub beta: f32,
    pub every: u32,
    pub first: u32,
    pub unrotated: bool,
}

/// Routed experts (mixture of experts).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeConfig {
    pub num_experts: usize,
    pub experts_per_token: usize,
    pub intermediate_size: usize,
    pub norm_topk_prob: bool,
    pub layers: Vec<usize>,
    pub shared_size: usize,
    pub shared_gated: bool,
    pub score: Score,
    pub choice_bias: bool,
    pub groups: usize,
    pub chosen_groups: usize,
    pub group_best: usize,
    pub least_sum: f32,
    pub scale: f32,
    pub weighs_input: bool,
    pub router_bias: bool,
    pub bias: bool,
    pub sum_bias: bool,
    pub expert_scale: bool,
    pub beside: bool,
    pub router_norm: bool,
}

/// Function that turns router logits into scores.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Score {
    Softmax,
    Sigmoid,
}

impl ModelConfig {
    /// Returns true if some layer has routed experts.
    pub fn has_experts(&self) -> bool {
        self.moe.is_some()
    }

    /// Returns true if some layer has sliding-window attention.
    pub fn has_windows(&self) -> bool {
        self.windows.iter().any(Option::is_some)
    }

    /// Returns the layers that store their own keys and values, with their attention sizes.
    pub fn kv_owners(&self) -> impl Iterator<Item = (usize, &Heads)> {
        let attending = self.heads.iter().enumerate().filter(|(layer, _)| self.attends[*layer]);
        attending.filter(|(layer, heads)| heads.kv_of == *layer)
    }

    /// Returns the KV pool index of the keys and values that `layer` attends to, which may be another layer's.
    /// The layers of a vision tower share one, as an image is computed at once.
    pub fn kv_layer(&self, layer: usize) -> usize {
        if self.patches.is_some() {
            return 0;
        }
        let owner = self.heads[layer].kv_of;
        self.kv_owners()
            .position(|(candidate, _)| candidate == owner)
            .unwrap_or(0)
    }

    /// Returns the elements of each layer's recurrent state, 0 for layers without one.
    pub fn state_sizes(&self) -> Vec<usize> {
        let size = self.state.map_or(0, |kind| kind.size(self));
        self.state_layers
            .iter()
            .map(|there| if *there { size } else { 0 })
            .collect()
    }

    /// Returns how many columns of each head RoPE rotates in `layer`.
    pub fn rotary_dim(&self, layer: usize) -> usize {
        self.rotary[layer].map_or(0, |table| 2 * self.inverse_frequencies[table].len())
    }

    /// Returns the column of the cosines of RoPE table `table` in the angles buffer. The sines follow.
    pub fn angles_at(&self, table: usize) -> usize {
        self.inverse_frequencies[..table]
            .iter()
            .map(|table| 2 * table.len())
            .sum()
    }

    /// Returns the columns of queries, keys and values that `layer` projects to.
    pub fn widths(&self, layer: usize) -> [usize; 3] {
        let heads = self.heads[layer];
        let keys = if heads.kv_of == layer {
            heads.kv_heads * heads.head_dim
        } else {
            0
        };
        let values = if heads.values_are_keys { 0 } else { keys };
        [self.num_heads * heads.head_dim, keys, values]
    }

    /// Returns the columns of attention's output gates, which precede the queries; 0 if it has none.
    pub fn gates(&self, layer: usize) -> usize {
        if self.attention_gates { self.widths(layer)[0] } else { 0 }
    }

    /// Returns the inputs of the output projection of attention.
    pub fn attended(&self, layer: usize) -> usize {
        let dim = self.heads[layer].head_dim;
        self.num_heads * self.latent.as_ref().map_or(dim, |latent| latent.value_dim)
    }

    /// Returns the elements of one head's query before it is mapped to the latent space.
    pub fn query_dim(&self, layer: usize) -> usize {
        let dim = self.heads[layer].head_dim;
        self.latent
            .as_ref()
            .map_or(dim, |latent| latent.plain_dim + dim - latent.rank)
    }

    /// Returns the columns of attention's first projection: gates, queries (or their latent), keys, values.
    pub fn projected(&self, layer: usize) -> usize {
        let key = self.heads[layer].head_dim;
        match &self.latent {
            None => {
                let [queries, keys, _] = self.widths(layer);
                self.gates(layer) + queries + 2 * keys
            }
            Some(latent) if latent.query_rank > 0 => latent.query_rank + key,
            Some(_) => self.num_heads * self.query_dim(layer) + key,
        }
    }

    /// Returns the largest intermediate size of dense MLPs, shared experts, low-rank parts and the MTP layer's input.
    pub fn max_inner(&self) -> usize {
        let shared = self.moe.as_ref().map_or(0, |moe| moe.shared_size);
        let per_layer = self.per_layer.map_or(0, |per_layer| per_layer.size);
        let rank = self.streams.map_or(0, |streams| streams.rank);
        let pixels = self.patches.as_ref().map_or(0, Patches::values);
        let joined = if self.mtp { 2 * self.hidden_size } else { 0 };
        self.intermediate_sizes
            .iter()
            .copied()
            .fold(shared.max(per_layer).max(rank).max(pixels).max(joined), usize::max)
    }

    /// Returns the gates' sparsity threshold in standard deviations above their mean, `None` to keep all gates.
    pub fn gate_threshold(&self, layer: usize) -> Option<f32> {
        self.gate_cuts.get(layer).copied().filter(|cut| *cut != 0.0)
    }

    /// Returns true if the MLP reads the hidden states without attention's output.
    pub fn is_parallel(&self) -> bool {
        matches!(self.norms, Norms::Parallel | Norms::Apart)
    }

    /// Returns true if outputs of attention and MLP are normalized or scaled before they are added.
    pub fn has_behind(&self) -> bool {
        matches!(self.norms, Norms::Behind | Norms::Both) || self.residual_scale != 1.0
    }

    /// Returns the experts of `layer`, `None` if its MLP is dense.
    pub fn experts_of(&self, layer: usize) -> Option<&MoeConfig> {
        self.moe.as_ref().filter(|moe| moe.layers.contains(&layer))
    }
}

impl StateKind {
    /// Returns the elements of one layer's state.
    pub fn size(&self, config: &ModelConfig) -> usize {
        match self {
            Self::ShortConv(conv) => conv.length.saturating_sub(1).saturating_mul(config.hidden_size),
            Self::DeltaNet(net) => net.state(),
            Self::Mamba2(sizes) => sizes.state(),
        }
    }

    /// Returns the columns of the layer's input projection.
    pub fn projected(&self, config: &ModelConfig) -> usize {
        match self {
            Self::ShortConv(_) => 3 * config.hidden_size,
            Self::DeltaNet(net) => net.channels() + net.inner() + 2 * net.value_heads,
            Self::Mamba2(sizes) => sizes.projected(),
        }
    }

    /// Returns the inputs of the layer's output projection.
    pub fn mixed(&self, config: &ModelConfig) -> usize {
        match self {
            Self::ShortConv(_) => config.hidden_size,
            Self::DeltaNet(net) => net.inner(),
            Self::Mamba2(sizes) => sizes.inner(),
        }
    }
}

impl DeltaNet {
    /// Returns the elements of all value heads.
    pub fn inner(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the convolved channels: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.inner()
    }

    /// Returns the column blocks of one head's state matrix.
    pub fn blocks(&self) -> usize {
        self.value_dim.div_ceil(BLOCK)
    }

    /// Returns the elements of one column block.
    pub fn block(&self) -> usize {
        self.key_dim * BLOCK
    }

    /// Returns the offset of the first head's blocks in a state. The convolution's last inputs precede them.
    pub fn first_block(&self) -> usize {
        ((self.length - 1) * self.channels()).next_multiple_of(PANEL)
    }

    /// Returns the elements of the state, 0 if the sizes are invalid.
    fn state(&self) -> usize {
        let heads = [self.key_heads, self.value_heads, self.length - self.length.min(1)];
        let sizes = [self.key_dim, self.value_dim];
        let within = heads.iter().all(|count| (1..=MAX_LAYERS).contains(count))
            && sizes.iter().all(|size| (1..=CHANNELS).contains(size));
        if !within || !self.value_heads.is_multiple_of(self.key_heads) {
            return 0;
        }
        self.first_block() + self.value_heads * self.blocks() * self.block()
    }
}

impl Mamba2 {
    /// Returns the elements of all heads.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the convolved channels: x, B and C.
    pub fn channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.size
    }

    /// Returns the columns of the input projection: gate, convolved channels, and a step size for each head.
    pub fn projected(&self) -> usize {
        self.inner() + self.channels() + self.heads
    }

    /// Returns the offset of a head's matrix in the state.
    pub fn head_offset(&self, head: usize) -> usize {
        (self.length - 1) * self.channels() + head * self.size * self.head_dim
    }

    /// Returns the (minimum, maximum) step size.
    pub fn steps(&self) -> (f32, f32) {
        (self.least_step, self.most_step.unwrap_or(f32::INFINITY))
    }

    /// Returns the elements of the state, 0 if the sizes are invalid.
    fn state(&self) -> usize {
        let sizes = [self.heads, self.head_dim, self.groups, self.size, self.length];
        let within = sizes.iter().all(|size| (1..=MAX_LAYERS).contains(size));
        let product = self.heads.checked_mul(self.head_dim * self.size);
        if !within || !self.heads.is_multiple_of(self.groups) || product.is_none_or(|all| all > MAX_STATE) {
            return 0;
        }
        self.head_offset(self.heads)
    }
}
