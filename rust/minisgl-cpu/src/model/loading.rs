//! How a decoder's tensors become its weights, layer by layer.
//!
//! Invariants: what does not fit the config is an error that names the tensor.

use crate::error::Result;
use crate::files::TensorView;
use crate::model::config::{ModelConfig, MoeConfig};
use crate::model::names::{Global, Naming, Part};
use crate::model::tensors::{Found, Tensors};
use crate::model::weights::{Experts, FeedForward, Layer, Linear, Mlp, Projections};
use crate::weights::{Form, Matrix, PANEL, Part as Piece};

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
        let alike = views
            .windows(2)
            .all(|two| Form::of(two[0].kind()) == Form::of(two[1].kind()));
        let whole = widths.iter().all(|(_, width)| width.is_multiple_of(PANEL));
        if alike || !whole {
            let form = if alike { None } else { Some(Form::F32) };
            return Ok(vec![(0, Matrix::pack(&pieces, false, form)?)]);
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
        Ok(Mlp {
            gate_up: Linear {
                weight: pack(
                    &[of(Part::Gate, [inner, hidden])?, of(Part::Up, [inner, hidden])?],
                    true,
                )?,
                bias: gate_up_bias,
            },
            down: Linear {
                weight: pack(&[of(Part::Down, [hidden, inner])?], false)?,
                bias: self.bias(self.config.mlp_bias, Part::Down, hidden)?,
            },
            inner,
        })
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
        let gate_up = pack(
            &[of(Part::Gate, [inner, hidden])?, of(Part::Up, [inner, hidden])?],
            true,
        )?;
        Ok(plain(gate_up, pack(&[of(Part::Down, [hidden, inner])?], false)?, inner))
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
                let gate_up = Matrix::pack(&[Piece::new(gate), Piece::new(up)], true, None)?;
                let down = Matrix::pack(&[Piece::new(down.slice(expert)?)], false, None)?;
                Ok(plain(gate_up, down, inner))
            })
            .collect()
    }
}

fn plain(gate_up: Matrix, down: Matrix, inner: usize) -> Mlp {
    let linear = |weight| Linear { weight, bias: None };
    Mlp {
        gate_up: linear(gate_up),
        down: linear(down),
        inner,
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
