//! A decoder's weights as they are held, and how its tensors become them, layer by layer.
//!
//! Invariants: every layer is loaded by one thread, all threads load at once; what does not fit the config is an error
//! that names the tensor.

use std::sync::Mutex;

use crate::error::{Error, Result};
use crate::files::Kind;
use crate::files::TensorView;
use crate::kernels::Mode;
use crate::model::config::{ModelConfig, MoeConfig};
use crate::model::names::{Global, Naming, Part};
use crate::model::tensors::{Found, Tensors};
use crate::threads::{Counter, Pool};
use crate::weights::{Matrix, PANEL, Part as Piece};

/// A matrix, perhaps with a bias. Both are padded to whole panels.
pub struct Linear {
    /// [outputs, inputs]
    pub weight: Matrix,
    /// [outputs]
    pub bias: Option<Vec<f32>>,
}

/// down(activation(gate(x)) * up(x)).
pub struct Mlp {
    /// Panels of both in turns: gate, up, gate, up; or, where the two are held differently, gate alone. The bias is of both
    /// in turns.
    pub gate_up: Linear,
    /// Up, where it is not in `gate_up`.
    pub up: Option<Matrix>,
    /// Back to the hidden size.
    pub down: Linear,
    /// Numbers between the two.
    pub inner: usize,
}

impl Mlp {
    /// Gate and up in as few matrices as their kinds allow.
    fn new(gate: TensorView<'_>, up: TensorView<'_>, down: Matrix, inner: usize) -> Result<Self> {
        let (gate, up) = (Piece::new(gate), Piece::new(up));
        let alike = gate.tensor.kind().held() == up.tensor.kind().held();
        let linear = |weight| Linear { weight, bias: None };
        let (gate_up, up) = if alike {
            (Matrix::pack(&[gate, up], true, None)?, None)
        } else {
            (
                Matrix::pack(&[gate], false, None)?,
                Some(Matrix::pack(&[up], false, None)?),
            )
        };
        Ok(Self {
            gate_up: linear(gate_up),
            up,
            down: linear(down),
            inner,
        })
    }

    /// Panels of gate and up.
    pub fn gate_up_panels(&self) -> usize {
        self.gate_up.weight.panels() + self.up.as_ref().map_or(0, Matrix::panels)
    }

    /// What both are multiplied with where `mode` is asked for.
    pub fn gate_up_mode(&self, mode: Mode) -> Mode {
        let gate = mode.with(&self.gate_up.weight);
        self.up.as_ref().map_or(gate, |up| gate.with(up))
    }

    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        [&self.gate_up.weight, &self.down.weight].into_iter().chain(&self.up)
    }
}

/// Routed experts.
pub struct Experts {
    /// [experts, hidden]
    pub router: Matrix,
    /// All of them.
    pub experts: Vec<Mlp>,
}

/// What follows attention.
pub enum FeedForward {
    /// One for all tokens.
    Dense(Mlp),
    /// Each token's own choice.
    Experts(Experts),
}

/// Projections to queries, keys and values, side by side: (first column of the output, matrix).
pub type Projections = Vec<(usize, Matrix)>;

/// One layer.
pub struct Layer {
    /// Before attention.
    pub attention_norm: Vec<f32>,
    /// One matrix if all are held alike, else up to three.
    pub qkv: Projections,
    /// The biases of all three, in the order of the columns.
    pub qkv_bias: Option<Vec<f32>>,
    /// q_norm and k_norm.
    pub head_norms: Option<(Vec<f32>, Vec<f32>)>,
    /// Out of attention.
    pub out: Linear,
    /// Before the MLP.
    pub mlp_norm: Vec<f32>,
    /// Behind attention and behind the MLP.
    pub norms_behind: Option<(Vec<f32>, Vec<f32>)>,
    /// The MLP.
    pub feed_forward: FeedForward,
}

/// All of a model.
pub struct Weights {
    /// The layers, in order.
    pub layers: Vec<Layer>,
    /// After the last layer.
    pub norm: Vec<f32>,
    /// [vocabulary, hidden]; rows of it are the embeddings unless `embedding` is there.
    pub head: Matrix,
    /// [vocabulary, hidden], where it is not the head.
    pub embedding: Option<Matrix>,
}

/// What of a load is done: (parts done, parts in all).
pub type Progress<'a> = &'a (dyn Fn(usize, usize) + Sync);

impl Weights {
    /// Read all tensors on all threads of `pool`.
    pub fn load(tensors: &Tensors, config: &ModelConfig, pool: &mut Pool, progress: Progress<'_>) -> Result<Self> {
        let parts = config.num_layers + 1;
        let layers: Vec<Mutex<Option<Layer>>> = (0..config.num_layers).map(|_| Mutex::new(None)).collect();
        let tables = Mutex::new(None);
        let failed = Mutex::new(None);
        let (next, done) = (Counter::default(), Counter::default());
        pool.run(&|_, _| {
            while let Some(part) = next.take(parts) {
                if locked(&failed).is_some() {
                    return;
                }
                // the largest first
                let loaded = if part == 0 {
                    load_tables(tensors, config).map(|found| *locked(&tables) = Some(found))
                } else {
                    Loader {
                        tensors,
                        config,
                        layer: part - 1,
                    }
                    .load()
                    .map(|found| *locked(&layers[part - 1]) = Some(found))
                };
                if let Err(error) = loaded {
                    locked(&failed).get_or_insert(error);
                    return;
                }
                if let Some(before) = done.take(usize::MAX) {
                    progress(before + 1, parts);
                }
            }
        })?;
        if let Some(error) = locked(&failed).take() {
            return Err(error);
        }
        let lost = || Error::file("a part of the weights was not loaded");
        let layers = layers
            .into_iter()
            .map(|cell| cell.into_inner().unwrap_or_else(|e| e.into_inner()).ok_or_else(lost))
            .collect::<Result<Vec<Layer>>>()?;
        let (head, embedding) = locked(&tables).take().ok_or_else(lost)?;
        let norm = load_norm(
            tensors,
            config,
            tensors.naming().global(Global::Norm),
            config.hidden_size,
        )?;
        tensors.all_used(|name| is_redundant(name, config))?;
        Ok(Self {
            layers,
            norm: padded(norm),
            head,
            embedding,
        })
    }

    /// Bytes of all matrices.
    pub fn bytes(&self) -> usize {
        let of_mlp = |mlp: &Mlp| mlp.matrices().map(Matrix::bytes).sum::<usize>();
        let of_layer = |layer: &Layer| {
            layer.qkv.iter().map(|(_, part)| part.bytes()).sum::<usize>()
                + layer.out.weight.bytes()
                + match &layer.feed_forward {
                    FeedForward::Dense(mlp) => of_mlp(mlp),
                    FeedForward::Experts(all) => all.router.bytes() + all.experts.iter().map(of_mlp).sum::<usize>(),
                }
        };
        self.layers.iter().map(of_layer).sum::<usize>()
            + self.head.bytes()
            + self.embedding.as_ref().map_or(0, Matrix::bytes)
    }

    /// How the matrices are held, by bytes, the most first.
    pub fn kinds(&self) -> Vec<(Kind, usize)> {
        let mut found: Vec<(Kind, usize)> = Vec::new();
        let mut add = |matrix: &Matrix| match found.iter_mut().find(|(kind, _)| *kind == matrix.kind()) {
            Some((_, bytes)) => *bytes += matrix.bytes(),
            None => found.push((matrix.kind(), matrix.bytes())),
        };
        add(&self.head);
        self.embedding.iter().for_each(&mut add);
        for layer in &self.layers {
            layer.qkv.iter().for_each(|(_, part)| add(part));
            add(&layer.out.weight);
            let mlps = match &layer.feed_forward {
                FeedForward::Dense(mlp) => std::slice::from_ref(mlp),
                FeedForward::Experts(all) => &all.experts,
            };
            mlps.iter().flat_map(Mlp::matrices).for_each(&mut add);
        }
        found.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        found
    }
}

/// In GGUF; the config's frequencies have them already.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// What files have besides: a copy of the table as a head, and frequencies that the config already says.
fn is_redundant(name: &str, config: &ModelConfig) -> bool {
    name == ROPE_FACTORS
        || name.ends_with("rotary_emb.inv_freq")
        || (config.tie_word_embeddings && name == "lm_head.weight")
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

pub(super) fn load_tables(tensors: &Tensors, config: &ModelConfig) -> Result<(Matrix, Option<Matrix>)> {
    let shape = [config.vocab_size, config.hidden_size];
    let embedding = pack(&[tensors.global(Global::Embedding, shape)?], false)?;
    if config.tie_word_embeddings && !has_other_head(tensors, shape)? {
        return Ok((embedding, None));
    }
    Ok((pack(&[tensors.global(Global::Head, shape)?], false)?, Some(embedding)))
}

/// People train a model whose head was tied and forget to say that it no longer is.
fn has_other_head(tensors: &Tensors, shape: [usize; 2]) -> Result<bool> {
    if !tensors.has(tensors.naming().global(Global::Head)) {
        return Ok(false);
    }
    let (head, table) = (
        tensors.global(Global::Head, shape)?,
        tensors.global(Global::Embedding, shape)?,
    );
    let (head, table) = (head.view()?, table.view()?);
    Ok(head.kind() != table.kind() || head.data() != table.data())
}

/// [size] weights of a norm, as they are multiplied with.
pub(super) fn load_norm(tensors: &Tensors, config: &ModelConfig, name: &str, size: usize) -> Result<Vec<f32>> {
    let mut weights = tensors.vector(name, size)?;
    if tensors.naming() == Naming::Checkpoint {
        weights.iter_mut().for_each(|weight| *weight += config.norm_offset);
    }
    Ok(weights)
}

fn pack(found: &[Found<'_>], interleave: bool) -> Result<Matrix> {
    let views: Vec<TensorView<'_>> = found.iter().map(Found::view).collect::<Result<_>>()?;
    let pieces: Vec<_> = views.into_iter().map(Piece::new).collect();
    Matrix::pack(&pieces, interleave, None)
}

/// With zeros up to whole panels.
pub(super) fn padded(mut numbers: Vec<f32>) -> Vec<f32> {
    numbers.resize(numbers.len().next_multiple_of(2 * PANEL), 0.0);
    numbers
}

/// Loads one layer.
pub(super) struct Loader<'a> {
    pub tensors: &'a Tensors,
    pub config: &'a ModelConfig,
    pub layer: usize,
}

impl Loader<'_> {
    pub fn load(&self) -> Result<Layer> {
        let config = self.config;
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let attended = config.num_heads * config.head_dim;
        let head_norms = if config.qk_norm {
            let of = |part| self.norm(part, config.head_dim);
            Some((of(Part::QNorm)?, of(Part::KNorm)?))
        } else {
            None
        };
        let (mlp_norm, norms_behind) = if config.norms_behind {
            let of = |part| self.norm(part, hidden).map(padded);
            let behind = (of(Part::AttentionNormBehind)?, of(Part::MlpNormBehind)?);
            (Part::MlpNormOfFour, Some(behind))
        } else {
            (Part::MlpNorm, None)
        };
        Ok(Layer {
            attention_norm: padded(self.norm(Part::AttentionNorm, hidden)?),
            qkv: self.projections()?,
            qkv_bias: self.qkv_bias()?,
            head_norms,
            out: Linear {
                weight: pack(
                    &[self.tensors.matrix(self.layer, Part::Out, [hidden, attended])?],
                    false,
                )?,
                bias: self.bias(config.out_bias, Part::Out, hidden)?,
            },
            mlp_norm: padded(self.norm(mlp_norm, hidden)?),
            norms_behind,
            feed_forward: match config.experts_of(self.layer) {
                None => FeedForward::Dense(self.dense(inner)?),
                Some(moe) => FeedForward::Experts(self.experts(moe)?),
            },
        })
    }

    fn vector(&self, part: Part, what: &str, size: usize) -> Result<Vec<f32>> {
        self.tensors.layer_vector(self.layer, part, what, size)
    }

    fn norm(&self, part: Part, size: usize) -> Result<Vec<f32>> {
        let name = self.tensors.naming().layer(self.layer, part, "weight");
        load_norm(self.tensors, self.config, &name, size)
    }

    fn bias(&self, there: bool, part: Part, size: usize) -> Result<Option<Vec<f32>>> {
        if !there {
            return Ok(None);
        }
        self.vector(part, "bias", size).map(|bias| Some(padded(bias)))
    }

    /// Columns of queries, keys and values, one after the other.
    fn widths(&self) -> [(Part, usize); 3] {
        let (config, dim) = (self.config, self.config.head_dim);
        let keys = config.num_kv_heads * dim;
        [(Part::Q, config.num_heads * dim), (Part::K, keys), (Part::V, keys)]
    }

    fn projections(&self) -> Result<Projections> {
        let (hidden, dim) = (self.config.hidden_size, self.config.head_dim);
        let rotated = matches!(self.tensors.naming(), Naming::Gguf { rotated: true });
        // interleaved halves of a head are put apart
        let apart = move |row: usize| {
            let (head, within) = (row / dim * dim, row % dim);
            head + within % (dim / 2) * 2 + within / (dim / 2)
        };
        let widths = self.widths();
        let found = widths
            .iter()
            .map(|(part, width)| self.tensors.matrix(self.layer, *part, [*width, hidden]))
            .collect::<Result<Vec<_>>>()?;
        let views: Vec<TensorView<'_>> = found.iter().map(Found::view).collect::<Result<_>>()?;
        let pieces: Vec<Piece<'_>> = views
            .iter()
            .zip(&widths)
            .map(|(view, (part, _))| match part {
                Part::Q | Part::K if rotated => Piece::ordered(*view, &apart),
                _ => Piece::new(*view),
            })
            .collect();
        let alike = views.windows(2).all(|two| two[0].kind().held() == two[1].kind().held());
        let whole = widths.iter().all(|(_, width)| width.is_multiple_of(PANEL));
        if alike || !whole {
            let held = if alike { None } else { Some(Kind::F32) };
            return Ok(vec![(0, Matrix::pack(&pieces, false, held)?)]);
        }
        let mut column = 0;
        let mut parts = Vec::new();
        for (piece, (_, width)) in pieces.iter().zip(widths) {
            parts.push((column, Matrix::pack(std::slice::from_ref(piece), false, None)?));
            column += width;
        }
        Ok(parts)
    }

    fn qkv_bias(&self) -> Result<Option<Vec<f32>>> {
        if !self.config.qkv_bias {
            return Ok(None);
        }
        let dim = self.config.head_dim;
        let rotated = matches!(self.tensors.naming(), Naming::Gguf { rotated: true });
        let mut all = Vec::new();
        for (part, width) in self.widths() {
            let bias = self.vector(part, "bias", width)?;
            if rotated && !matches!(part, Part::V) {
                all.extend((0..width).map(|row| {
                    let (head, within) = (row / dim * dim, row % dim);
                    bias[head + within % (dim / 2) * 2 + within / (dim / 2)]
                }));
            } else {
                all.extend(bias);
            }
        }
        Ok(Some(padded(all)))
    }

    fn dense(&self, inner: usize) -> Result<Mlp> {
        let hidden = self.config.hidden_size;
        let of = |part, shape| self.tensors.matrix(self.layer, part, shape);
        let gate_up_bias = if self.config.mlp_bias {
            let (gate, up) = (
                self.vector(Part::Gate, "bias", inner)?,
                self.vector(Part::Up, "bias", inner)?,
            );
            Some(in_turns(&gate, &up))
        } else {
            None
        };
        let (gate, up) = (of(Part::Gate, [inner, hidden])?, of(Part::Up, [inner, hidden])?);
        let down = pack(&[of(Part::Down, [hidden, inner])?], false)?;
        let mut mlp = Mlp::new(gate.view()?, up.view()?, down, inner)?;
        mlp.gate_up.bias = gate_up_bias;
        mlp.down.bias = self.bias(self.config.mlp_bias, Part::Down, hidden)?;
        Ok(mlp)
    }

    fn experts(&self, moe: &MoeConfig) -> Result<Experts> {
        let (hidden, inner, count) = (self.config.hidden_size, moe.intermediate_size, moe.num_experts);
        let router = pack(
            &[self.tensors.matrix(self.layer, Part::Router, [count, hidden])?],
            false,
        )?;
        let naming = self.tensors.naming();
        let stacked =
            matches!(naming, Naming::Gguf { .. }) || self.tensors.has(&naming.experts(self.layer, Part::Down));
        let experts = if !stacked {
            (0..count)
                .map(|expert| self.own_expert(expert, inner))
                .collect::<Result<Vec<_>>>()?
        } else {
            self.stacked_experts(count, hidden, inner)?
        };
        Ok(Experts { router, experts })
    }

    /// An expert whose matrices are tensors of their own.
    fn own_expert(&self, expert: usize, inner: usize) -> Result<Mlp> {
        let (hidden, naming) = (self.config.hidden_size, self.tensors.naming());
        let of = |part, shape: [usize; 2]| self.tensors.get(&naming.expert(self.layer, expert, part), &shape);
        let (gate, up) = (of(Part::Gate, [inner, hidden])?, of(Part::Up, [inner, hidden])?);
        let down = pack(&[of(Part::Down, [hidden, inner])?], false)?;
        Mlp::new(gate.view()?, up.view()?, down, inner)
    }

    /// All experts' matrices in one tensor: gate and up in one, too (checkpoints), or apart (GGUF).
    fn stacked_experts(&self, count: usize, hidden: usize, inner: usize) -> Result<Vec<Mlp>> {
        let naming = self.tensors.naming();
        let of = |part, shape: [usize; 3]| self.tensors.get(&naming.experts(self.layer, part), &shape);
        let down = of(Part::Down, [count, hidden, inner])?;
        let both = match naming {
            Naming::Checkpoint => vec![of(Part::Gate, [count, 2 * inner, hidden])?],
            Naming::Gguf { .. } => {
                vec![
                    of(Part::Gate, [count, inner, hidden])?,
                    of(Part::Up, [count, inner, hidden])?,
                ]
            }
        };
        let views: Vec<TensorView<'_>> = both.iter().map(Found::view).collect::<Result<_>>()?;
        let down = down.view()?;
        let half = [inner, hidden];
        (0..count)
            .map(|expert| {
                let (gate, up) = match views.as_slice() {
                    [gate_up] => {
                        let own = gate_up.slice(expert)?;
                        let (gate, up) = own.data().split_at(own.data().len() / 2);
                        let part = |data| TensorView::new(own.name(), own.kind(), &half, data);
                        (part(gate)?, part(up)?)
                    }
                    _ => (views[0].slice(expert)?, views[1].slice(expert)?),
                };
                let down = Matrix::pack(&[Piece::new(down.slice(expert)?)], false, None)?;
                Mlp::new(gate, up, down, inner)
            })
            .collect()
    }
}

/// Panels of two vectors in turns, as the panels of their matrices lie.
fn in_turns(one: &[f32], other: &[f32]) -> Vec<f32> {
    let (one, other) = (padded(one.to_vec()), padded(other.to_vec()));
    one.chunks(PANEL)
        .zip(other.chunks(PANEL))
        .flat_map(|(a, b)| a.iter().chain(b).copied())
        .collect()
}
