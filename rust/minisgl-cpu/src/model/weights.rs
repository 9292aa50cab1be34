//! A decoder's weights as they are held, and how they get there.
//!
//! Invariants: every layer is loaded by one thread, all threads load at once; what does not fit the config is an error
//! that names the tensor.

use std::sync::Mutex;

use crate::error::{Error, Result};
use crate::model::config::ModelConfig;
use crate::model::loading::{Loader, load_norm, load_tables, padded};
use crate::model::names::Global;
use crate::model::tensors::Tensors;
use crate::threads::{Counter, Pool};
use crate::weights::{Form, Matrix};

/// A matrix, perhaps with a bias. Both are padded to whole panels.
pub struct Linear {
    /// [outputs, inputs]
    pub weight: Matrix,
    /// [outputs]
    pub bias: Option<Vec<f32>>,
}

/// down(activation(gate(x)) * up(x)).
pub struct Mlp {
    /// Panels of both in turns: gate, up, gate, up.
    pub gate_up: Linear,
    /// Back to the hidden size.
    pub down: Linear,
    /// Numbers between the two.
    pub inner: usize,
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
    /// Of all three, in the order of the columns.
    pub qkv_bias: Option<Vec<f32>>,
    /// Of each head of queries and of keys.
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
        let of_mlp = |mlp: &Mlp| mlp.gate_up.weight.bytes() + mlp.down.weight.bytes();
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
    pub fn forms(&self) -> Vec<(Form, usize)> {
        let mut found: Vec<(Form, usize)> = Vec::new();
        let mut add = |matrix: &Matrix| match found.iter_mut().find(|(form, _)| *form == matrix.form()) {
            Some((_, bytes)) => *bytes += matrix.bytes(),
            None => found.push((matrix.form(), matrix.bytes())),
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
            for mlp in mlps {
                add(&mlp.gate_up.weight);
                add(&mlp.down.weight);
            }
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
