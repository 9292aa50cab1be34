//! The numbers of a model, as Python read them from its config.json.
//!
//! `layers/` checks them, each part beside what it makes of them.

use minisgl_kernels::convolution::CHANNELS;
use minisgl_kernels::delta_rule::BLOCK;
use minisgl_kernels::mamba::Gating;
use minisgl_kernels::panels::PANEL;
use serde::Deserialize;

/// Sizes beyond these are no model of today, but a damaged file.
pub(super) const MAX_LAYERS: usize = 4096;
pub(super) const MAX_STATE: usize = 1 << 28;
/// Streams of hidden numbers.
pub(super) const MAX_STREAMS: usize = 8;

/// One decoder for all architectures: what differs between them is in here.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Numbers of a token between layers.
    pub hidden_size: usize,
    /// Layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// The rest of attention's sizes, by layer.
    pub heads: Vec<Heads>,
    /// By layer: whether it has attention, and with it keys and values.
    pub attends: Vec<bool>,
    /// What layers keep of each sequence in place of keys and values, or beside them.
    pub state: Option<StateKind>,
    /// By layer: whether it keeps that.
    pub state_layers: Vec<bool>,
    /// What attention gives is multiplied by sigmoids of numbers that come with the queries.
    pub attention_gates: bool,
    /// Values are normalised over each head, without weights.
    pub value_norm: bool,
    /// Numbers between the two halves of a dense MLP, by layer; 0: there is none.
    pub intermediate_sizes: Vec<usize>,
    /// Ids.
    pub vocab_size: usize,
    /// Added to the mean square under the root.
    pub norm_eps: f32,
    /// Norms take the mean off, too.
    pub layer_norm: bool,
    /// Norms have biases.
    pub norm_bias: bool,
    /// Added to the weights of norms as checkpoints have them; GGUF has the sums.
    pub norm_offset: f32,
    /// Where a layer has norms.
    pub norms: Norms,
    /// Norms of queries and keys.
    pub qk_norm: HeadNorms,
    /// Tables of radians per position, of which layers choose one: twice as many numbers of each head are rotated, from
    /// the first on.
    pub inverse_frequencies: Vec<Vec<f32>>,
    /// By table: cosine and sine are multiplied by it (YaRN, longrope).
    pub rope_scales: Vec<f32>,
    /// How queries grow with their position.
    pub query_growth: Option<QueryGrowth>,
    /// The head is the table of embeddings.
    pub tie_word_embeddings: bool,
    /// Biases of the projections to queries, keys and values.
    pub qkv_bias: bool,
    /// A bias of attention's way out.
    pub out_bias: bool,
    /// Biases of the MLP.
    pub mlp_bias: bool,
    /// A bias of the MLP's way out, where its other matrices have none.
    pub down_bias: bool,
    /// A bias of the head.
    pub head_bias: bool,
    /// Positions that have learned numbers, added to embeddings; 0: there are none.
    pub learned_positions: usize,
    /// The row that the first position has of them.
    pub first_position: usize,
    /// Kinds of tokens that have numbers of their own, added to embeddings; 0: there are none.
    pub token_types: usize,
    /// The second of two texts has tokens of the second kind.
    pub pair_types: bool,
    /// Embeddings are normalised.
    pub embedding_norm: bool,
    /// The first layer has no norm before attention.
    pub bare_first: bool,
    /// There is a norm behind the last layer.
    pub last_norm: bool,
    /// Scores have numbers added by head and distance.
    pub distances: Option<ByDistance>,
    /// An encoder: tokens attend to those behind them, too, to all of their row or to as many as before them.
    pub both_ways: bool,
    /// By layer: a token attends to as many tokens, itself included; none: to all before it.
    pub windows: Vec<Option<usize>>,
    /// Windows are chunks of the text: a token attends to those of its own chunk before it.
    pub chunked: bool,
    /// By layer: the table by which queries and keys are rotated; none: they are not.
    pub rotary: Vec<Option<usize>>,
    /// Each query head has a score that takes its part of the weights and gives no value.
    pub sinks: bool,
    /// The factor of the products of queries and keys.
    pub attention_scale: f32,
    /// Values are multiplied by it.
    pub value_scale: f32,
    /// Those products are kept within it, softly; 0: they are as they are.
    pub attention_cap: f32,
    /// Embeddings are multiplied by it.
    pub embedding_scale: f32,
    /// What attention and the MLP add is multiplied by it.
    pub residual_scale: f32,
    /// What a layer gives is multiplied by a number of its own.
    pub layer_scales: bool,
    /// Numbers of each token that each layer adds, in its own way.
    pub per_layer: Option<PerLayer>,
    /// Hidden numbers in several streams, of which attention and the MLP see the first.
    pub streams: Option<Streams>,
    /// By layer: by how many deviations above their mean the gates of an MLP are cut; 0: they are not. Empty: of none.
    pub gate_cuts: Vec<f32>,
    /// Logits are multiplied by it.
    pub logits_scale: f32,
    /// And kept within this, softly; 0: they are as they are.
    pub logits_cap: f32,
    /// What the gate of an MLP goes through.
    pub activation: Activation,
    /// The MLP has a gate beside what it is multiplied with; else that goes through the activation itself.
    pub gated: bool,
    /// How the names of tensors begin that are no part of the decoder.
    pub left_out: Vec<String>,
    /// Keys and values of all heads are made of one latent, which is what pages hold (MLA).
    pub latent: Option<LatentConfig>,
    /// Routed experts in place of the MLP of some layers.
    pub moe: Option<MoeConfig>,
}

/// What is added to scores by distance.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum ByDistance {
    /// Learned numbers of ranges.
    Ranges(Ranges),
    /// By head, in proportion to the distance.
    Slopes(Slopes),
}

/// Each head adds its slope, less than 0, times the distance of a key from its query, on either side (ALiBi, arXiv
/// 2108.12409).
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Slopes {
    /// By query head.
    pub by_head: Vec<f32>,
    /// Positions of a sequence.
    pub positions: usize,
}

/// Ranges of distances between tokens that have a number of each head in common: half of them for keys before their
/// query, half for those behind.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Ranges {
    /// How many.
    pub count: usize,
    /// From here on all is the last one.
    pub most: usize,
    /// Positions of a sequence.
    pub positions: usize,
}

impl Ranges {
    /// Of keys so far behind their query: short distances have ranges of their own, longer ones are told apart by their
    /// logarithm.
    pub fn of(&self, behind: i64) -> usize {
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

/// Attention over latents. In the description around it there is one key/value head, whose keys are a latent and the
/// numbers that are rotated, and whose values are the latent.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatentConfig {
    /// Numbers of a latent.
    pub rank: usize,
    /// Numbers of the latent that queries are made of; 0: they are made of the hidden numbers.
    pub query_rank: usize,
    /// Numbers of a head's query and key that are not rotated; those that are come behind.
    pub plain_dim: usize,
    /// Numbers of a head's value.
    pub value_dim: usize,
    /// Of the norms of latents.
    pub norm_eps: f32,
}

/// What a layer keeps of a sequence: of one size, whatever its length, and true behind one of its tokens.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum StateKind {
    /// The last inputs of a short convolution.
    ShortConv(ShortConv),
    /// The last inputs of a convolution, and a matrix of each head.
    DeltaNet(DeltaNet),
    /// The last inputs of a convolution, and a matrix of each head.
    Mamba2(Mamba2),
}

/// A gated delta net (arXiv 2412.06464).
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct DeltaNet {
    /// Heads of queries and keys; each serves as many of values.
    pub key_heads: usize,
    /// Heads of values.
    pub value_heads: usize,
    /// Numbers of a query and of a key.
    pub key_dim: usize,
    /// Numbers of a value.
    pub value_dim: usize,
    /// Tokens that the convolution sees, its own included.
    pub length: usize,
}

/// A convolution over the last tokens, channel by channel, between two gates (LFM2).
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct ShortConv {
    /// Tokens that it sees, its own included.
    pub length: usize,
    /// All its parts have biases.
    pub bias: bool,
}

/// Mamba-2 (arXiv 2405.21060).
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Mamba2 {
    /// Heads.
    pub heads: usize,
    /// Numbers of a head's x.
    pub head_dim: usize,
    /// Groups of neighbouring heads, which have B and C in common; the norm goes over those of a group.
    pub groups: usize,
    /// Numbers of B and of C.
    pub size: usize,
    /// Tokens that the convolution sees, its own included.
    pub length: usize,
    /// The convolution has biases.
    pub conv_bias: bool,
    /// Steps are no smaller.
    pub least_step: f32,
    /// And no larger.
    pub most_step: Option<f32>,
    /// How gate and norm go together.
    #[serde(with = "GatingName")]
    pub gating: Gating,
    /// What z, x, B, C and the steps are multiplied by as they come in.
    pub factors: [f32; 5],
    /// And what goes out.
    pub out_scale: f32,
}

/// The names of [`Gating`].
#[derive(Deserialize)]
#[serde(remote = "Gating", rename_all = "snake_case")]
enum GatingName {
    Alone,
    BeforeNorm,
    BehindNorm,
}

/// Sizes of one layer's attention.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Heads {
    /// Heads of keys and values; each serves as many query heads.
    pub kv_heads: usize,
    /// Numbers of a head.
    pub head_dim: usize,
    /// The layer whose keys and values it attends to.
    pub kv_of: usize,
    /// Values are the keys as projected.
    pub values_are_keys: bool,
}

/// Embeddings that are added by layer.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct PerLayer {
    /// Numbers of a token for each layer.
    pub size: usize,
    /// Ids that have such embeddings.
    pub vocab_size: usize,
}

/// Hidden numbers in several streams (AltUp, arXiv 2301.13310), with a residual of low rank (Laurel, arXiv 2411.07501).
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Streams {
    /// Streams.
    pub count: usize,
    /// Numbers between the two matrices of the residual.
    pub rank: usize,
}

/// The activation function of an MLP.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// g sigmoid(g).
    Silu,
    /// The same of a gate that is scaled, as is what comes out.
    ScaledSilu {
        /// Of the gate.
        gate: f32,
        /// Of what comes out.
        out: f32,
    },
    /// By its tanh approximation.
    Gelu,
    /// By the error function.
    GeluErf,
    /// max(g, 0)^2.
    Relu2,
    /// g sigmoid(alpha g), with one more than what it is multiplied with; g is at most `limit`, and that within it.
    ClampedSwiglu {
        /// How steep.
        alpha: f32,
        /// Above 0.
        limit: f32,
    },
}

/// Where a layer has norms.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Norms {
    /// Before attention and before the MLP.
    Before,
    /// Behind both, before what they give is added.
    Behind,
    /// Before and behind.
    Both,
    /// One before both, which read the same numbers and are added together.
    Parallel,
    /// One before each, which read the same hidden numbers and are added together.
    Apart,
    /// Behind both, over the sums of what they give and the hidden numbers.
    Over,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum HeadNorms {
    /// None.
    None,
    /// Over each head, before rotation.
    Head,
    /// Over each head with weights of its own, before rotation.
    Heads,
    /// Over all heads at once, before rotation.
    Whole,
    /// Over each head, behind rotation.
    Rotated,
    /// The same without weights, in layers that rotate.
    Plain,
}

/// The query at position p is multiplied by 1 + beta ln(1 + floor((p + first) / every)).
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueryGrowth {
    /// How much.
    pub beta: f32,
    /// After how many positions.
    pub every: u32,
    /// The number of the first position.
    pub first: u32,
    /// In layers alone that rotate nothing.
    pub unrotated: bool,
}

/// Routed experts.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoeConfig {
    /// Experts of a layer.
    pub num_experts: usize,
    /// How many of them each token goes through.
    pub experts_per_token: usize,
    /// Numbers between the two halves of an expert.
    pub intermediate_size: usize,
    /// A token's weights are scaled to sum up to 1.
    pub norm_topk_prob: bool,
    /// The layers that have experts.
    pub layers: Vec<usize>,
    /// Numbers between the two halves of an expert that every token goes through; 0: there is none.
    pub shared_size: usize,
    /// It is weighted by a gate.
    pub shared_gated: bool,
    /// What a router's logits become.
    pub score: Score,
    /// Experts are chosen by their scores with a bias each, which their weights do not have.
    pub choice_bias: bool,
    /// Groups of neighbours.
    pub groups: usize,
    /// From how many groups experts are chosen.
    pub chosen_groups: usize,
    /// How many of its largest scores a group is chosen by.
    pub group_best: usize,
    /// What weights are divided by at least where they are scaled to sum up to 1.
    pub least_sum: f32,
    /// Weights are multiplied by it in the end.
    pub scale: f32,
    /// What experts read is weighted, not what they give.
    pub weighs_input: bool,
    /// The router has biases.
    pub router_bias: bool,
    /// Experts have biases.
    pub bias: bool,
    /// What all experts of a token give together has a bias.
    pub sum_bias: bool,
    /// And by a number of each expert.
    pub expert_scale: bool,
    /// A dense MLP stands beside the experts, each of both with norms of its own.
    pub beside: bool,
    /// The router reads hidden numbers normalised with weights of its own.
    pub router_norm: bool,
}

/// What a router's logits become.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Score {
    /// Shares of all experts.
    Softmax,
    /// 1 / (1 + e^-x), each by itself.
    Sigmoid,
}

impl ModelConfig {
    /// The layers that have keys and values of their own.
    pub fn kv_owners(&self) -> impl Iterator<Item = (usize, &Heads)> {
        let attending = self.heads.iter().enumerate().filter(|(layer, _)| self.attends[*layer]);
        attending.filter(|(layer, heads)| heads.kv_of == *layer)
    }

    /// Where the pool has the keys and values that a layer attends to.
    pub fn kv_layer(&self, layer: usize) -> usize {
        let owner = self.heads[layer].kv_of;
        self.kv_owners().position(|(one, _)| one == owner).unwrap_or(0)
    }

    /// Numbers of the state of each layer.
    pub fn state_sizes(&self) -> Vec<usize> {
        let size = self.state.map_or(0, |kind| kind.size(self));
        self.state_layers
            .iter()
            .map(|there| if *there { size } else { 0 })
            .collect()
    }

    /// How many numbers of each head a layer rotates.
    pub fn rotary_dim(&self, layer: usize) -> usize {
        self.rotary[layer].map_or(0, |table| 2 * self.inverse_frequencies[table].len())
    }

    /// Where the cosines of a table lie among the angles of a position; sines follow.
    pub fn angles_at(&self, table: usize) -> usize {
        self.inverse_frequencies[..table]
            .iter()
            .map(|table| 2 * table.len())
            .sum()
    }

    /// Columns of queries, keys and values that a layer projects to.
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

    /// Columns of gates of what attention gives, before those of queries.
    pub fn gates(&self, layer: usize) -> usize {
        if self.attention_gates { self.widths(layer)[0] } else { 0 }
    }

    /// Numbers that go into attention's way out.
    pub fn attended(&self, layer: usize) -> usize {
        let dim = self.heads[layer].head_dim;
        self.num_heads * self.latent.as_ref().map_or(dim, |latent| latent.value_dim)
    }

    /// Numbers of a head's query before it is made fit for latents.
    pub fn query_dim(&self, layer: usize) -> usize {
        let dim = self.heads[layer].head_dim;
        self.latent
            .as_ref()
            .map_or(dim, |latent| latent.plain_dim + dim - latent.rank)
    }

    /// Numbers of a token that the first products of attention give, with room for values: queries, or what they are
    /// made of, then keys and values.
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

    /// Numbers between the halves of the largest MLP that is no routed expert.
    pub fn widest_inner(&self) -> usize {
        let shared = self.moe.as_ref().map_or(0, |moe| moe.shared_size);
        let per_layer = self.per_layer.map_or(0, |per_layer| per_layer.size);
        let rank = self.streams.map_or(0, |streams| streams.rank);
        self.intermediate_sizes
            .iter()
            .copied()
            .fold(shared.max(per_layer).max(rank), usize::max)
    }

    /// By how many deviations above their mean a layer's gates are cut, if they are.
    pub fn gate_cut(&self, layer: usize) -> Option<f32> {
        self.gate_cuts.get(layer).copied().filter(|cut| *cut != 0.0)
    }

    /// Whether the MLP reads the hidden numbers without what attention adds.
    pub fn is_parallel(&self) -> bool {
        matches!(self.norms, Norms::Parallel | Norms::Apart)
    }

    /// Whether what attention and the MLP give is changed before it is added.
    pub fn has_behind(&self) -> bool {
        matches!(self.norms, Norms::Behind | Norms::Both) || self.residual_scale != 1.0
    }

    /// Whether a layer's MLP is made of experts.
    pub fn experts_of(&self, layer: usize) -> Option<&MoeConfig> {
        self.moe.as_ref().filter(|moe| moe.layers.contains(&layer))
    }
}

impl StateKind {
    /// Numbers of a layer's state.
    pub fn size(&self, config: &ModelConfig) -> usize {
        match self {
            Self::ShortConv(conv) => conv.length.saturating_sub(1).saturating_mul(config.hidden_size),
            Self::DeltaNet(net) => net.state(),
            Self::Mamba2(sizes) => sizes.state(),
        }
    }

    /// Numbers of a token that a layer's first products give.
    pub fn projected(&self, config: &ModelConfig) -> usize {
        match self {
            Self::ShortConv(_) => 3 * config.hidden_size,
            Self::DeltaNet(net) => net.channels() + net.inner() + 2 * net.value_heads,
            Self::Mamba2(sizes) => sizes.projected(),
        }
    }

    /// Numbers of a token that go into its way out.
    pub fn mixed(&self, config: &ModelConfig) -> usize {
        match self {
            Self::ShortConv(_) => config.hidden_size,
            Self::DeltaNet(net) => net.inner(),
            Self::Mamba2(sizes) => sizes.inner(),
        }
    }
}

impl DeltaNet {
    /// Numbers of all values.
    pub fn inner(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Numbers that are convolved: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.inner()
    }

    /// Blocks of columns of a head's matrix.
    pub fn blocks(&self) -> usize {
        self.value_dim.div_ceil(BLOCK)
    }

    /// Numbers of a block.
    pub fn block(&self) -> usize {
        self.key_dim * BLOCK
    }

    /// Where the blocks begin in a state, head after head: behind the convolution's last inputs.
    pub fn first_block(&self) -> usize {
        ((self.length - 1) * self.channels()).next_multiple_of(PANEL)
    }

    /// Numbers of the state; 0 where that cannot be.
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
    /// Numbers of all heads.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Numbers that are convolved: x, B and C.
    pub fn channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.size
    }

    /// Numbers that come in: the gate, those, and a step for each head.
    pub fn projected(&self) -> usize {
        self.inner() + self.channels() + self.heads
    }

    /// Where a head's matrix lies in the state.
    pub fn of_head(&self, head: usize) -> usize {
        (self.length - 1) * self.channels() + head * self.size * self.head_dim
    }

    /// The bounds of steps.
    pub fn steps(&self) -> (f32, f32) {
        (self.least_step, self.most_step.unwrap_or(f32::INFINITY))
    }

    /// Numbers of the state; 0 where that cannot be.
    fn state(&self) -> usize {
        let sizes = [self.heads, self.head_dim, self.groups, self.size, self.length];
        let within = sizes.iter().all(|size| (1..=MAX_LAYERS).contains(size));
        let product = self.heads.checked_mul(self.head_dim * self.size);
        if !within || !self.heads.is_multiple_of(self.groups) || product.is_none_or(|all| all > MAX_STATE) {
            return 0;
        }
        self.of_head(self.heads)
    }
}
