//! Embeddings and scores of prompts: hidden states, pooled over the steps that compute them, pass through a head.
//!
//! Invariants: results do not depend on the split of a prompt into steps, nor on the instruction set; `bind` resets a
//! slot.

use minisgl_kernels::{Isa, plain};

use crate::error::{Error, Result};
use crate::sampling::{Binding, Pooling};
use crate::step::Embedding;

/// Pools of hidden states, by request slot.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    slots: Vec<Option<Pool>>,
    count: usize,
    keeps_prompts: bool,
    heads: Heads,
}

/// Heads that pooled hidden states pass through.
#[derive(Debug, Default)]
pub struct Heads {
    /// Steps of the embedding head.
    pub embedding: Vec<HeadStep>,
    /// Pooling and steps of the score head; `None` if the model gives no scores.
    pub score: Option<(Pooling, Vec<HeadStep>)>,
}

/// Step of a head: one layer or activation function.
#[derive(Debug)]
pub enum HeadStep {
    /// Linear layer: weight [outputs, inputs] and bias [outputs], empty if there is none.
    Linear(Vec<f32>, Vec<f32>),
    /// Layer norm: weight, bias (empty if there is none), epsilon.
    LayerNorm(Vec<f32>, Vec<f32>, f32),
    /// Elementwise tanh.
    Tanh,
    /// Elementwise exact GELU (by the error function).
    GeluErf,
}

#[derive(Debug)]
struct Pool {
    req_id: i64,
    kind: Pooling,
    is_scored: bool,
    num_prompt: usize,
    sum: Vec<f32>,
    /// Whole prompt (encoders only).
    tokens: Vec<u32>,
}

impl Pools {
    /// Creates empty pools. `keeps_prompts`: store prompts for [`Self::prompt`].
    pub fn new(num_slots: usize, keeps_prompts: bool) -> Self {
        Self {
            slots: (0..num_slots).map(|_| None).collect(),
            count: 0,
            keeps_prompts,
            heads: Heads::default(),
        }
    }

    /// Sets the heads of all later results.
    pub fn set_heads(&mut self, heads: Heads) {
        self.heads = heads;
    }

    /// Resets the slot for a new request. A score request gets no result if the model has no score head.
    pub fn bind(&mut self, slot: usize, binding: &Binding) {
        let is_scored = binding.params.embedding == Some(Pooling::Score);
        let of_score = self.heads.score.as_ref().map(|(kind, _)| *kind);
        let kind = if is_scored { of_score } else { binding.params.embedding };
        let pool = kind.map(|kind| Pool {
            req_id: binding.req_id,
            kind,
            is_scored,
            num_prompt: binding.num_prompt,
            sum: Vec::new(),
            tokens: if self.keeps_prompts {
                binding.tokens.iter().map(|id| *id as u32).collect()
            } else {
                Vec::new()
            },
        });
        self.count += usize::from(pool.is_some());
        self.count -= usize::from(self.slots[slot].is_some());
        self.slots[slot] = pool;
    }

    /// Returns true if no slot needs an embedding or score.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns true if the hidden state at `position` is part of the slot's pool.
    pub fn wants(&self, slot: usize, position: usize) -> bool {
        self.slots[slot].as_ref().is_some_and(|pool| match pool.kind {
            Pooling::Mean => position < pool.num_prompt,
            Pooling::Last => position + 1 == pool.num_prompt,
            Pooling::First | Pooling::Score => position == 0 || position + 1 == pool.num_prompt,
        })
    }

    /// Returns the stored prompt of the slot's embedding request, if any, and whether it wants a score.
    pub fn prompt(&self, slot: usize) -> Option<(&[u32], bool)> {
        let pool = self.slots.get(slot)?.as_ref()?;
        Some((pool.tokens.get(..pool.num_prompt)?, pool.is_scored))
    }

    /// Adds a prompt token's hidden state to the slot's pool. Returns the embedding after the prompt's last token.
    pub fn add(&mut self, slot: usize, position: usize, hidden: &[f32]) -> Option<Embedding> {
        let pool = self.slots[slot].as_mut()?;
        pool.sum.resize(hidden.len(), 0.0);
        if pool.kind != Pooling::First || position == 0 {
            for (sum, number) in pool.sum.iter_mut().zip(hidden) {
                *sum += number;
            }
        }
        if position + 1 < pool.num_prompt {
            return None;
        }
        let count = match pool.kind {
            Pooling::Mean => pool.num_prompt as f32,
            _ => 1.0,
        };
        let mut numbers: Vec<f32> = pool.sum.drain(..).map(|sum| sum / count).collect();
        let of_score = self.heads.score.as_ref().filter(|_| pool.is_scored);
        for step in of_score.map_or(&self.heads.embedding, |(_, steps)| steps) {
            numbers = step.apply(&numbers);
        }
        Some(Embedding {
            req_id: pool.req_id,
            numbers,
        })
    }
}

impl Heads {
    /// Checks that each step fits the output of the previous one, starting from `size` elements.
    pub fn check(&self, size: usize) -> Result<()> {
        let of_score = self.score.iter().map(|(_, steps)| steps);
        for steps in of_score.chain([&self.embedding]) {
            let mut width = size;
            for step in steps {
                let next = step.width(width);
                width = next.ok_or_else(|| {
                    Error::unsupported(format!("head: a step does not fit its input of {width} elements"))
                })?;
            }
        }
        Ok(())
    }
}

impl HeadStep {
    /// Returns the output size for `inputs` elements, `None` if the step does not fit.
    fn width(&self, inputs: usize) -> Option<usize> {
        match self {
            Self::Linear(weight, bias) => {
                let outputs = weight.len() / inputs.max(1);
                let fits = outputs > 0 && outputs * inputs == weight.len() && [0, outputs].contains(&bias.len());
                fits.then_some(outputs)
            }
            Self::LayerNorm(weight, bias, _) => {
                (weight.len() == inputs && [0, inputs].contains(&bias.len())).then_some(inputs)
            }
            Self::Tanh | Self::GeluErf => Some(inputs),
        }
    }

    fn apply(&self, numbers: &[f32]) -> Vec<f32> {
        match self {
            Self::Linear(weight, bias) => (weight.chunks_exact(numbers.len()).enumerate())
                .map(|(row, weight)| plain::dot(weight, numbers) + bias.get(row).copied().unwrap_or_default())
                .collect(),
            Self::LayerNorm(weight, bias, eps) => {
                let bias = (!bias.is_empty()).then_some(bias.as_slice());
                let mut normed = numbers.to_vec();
                plain::layer_norm(Isa::Scalar, &mut normed, weight, bias, *eps);
                normed
            }
            Self::Tanh => numbers.iter().map(|x| plain::tanh(*x)).collect(),
            Self::GeluErf => numbers.iter().map(|x| plain::gelu_erf(*x)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_applies_its_steps_in_order() {
        let steps = [
            HeadStep::Linear(vec![1.0, 2.0, -1.0, 0.5, 0.0, 3.0], vec![0.5, -0.5, 0.0]),
            HeadStep::Tanh,
            HeadStep::Linear(vec![1.0, 1.0, 1.0], Vec::new()),
        ];
        let found = steps.iter().fold(vec![0.2, -0.4], |numbers, step| step.apply(&numbers));
        let wanted = (-0.1_f64).tanh() + (-0.9_f64).tanh() + (-1.2_f64).tanh();
        assert!(
            (f64::from(found[0]) - wanted).abs() < 1e-6 && found.len() == 1,
            "{found:?} {wanted}"
        );
    }

    #[test]
    fn check_rejects_steps_with_other_sizes() {
        let heads = |steps| Heads {
            score: Some((Pooling::First, steps)),
            ..Heads::default()
        };
        let linear = |weights: usize, bias: usize| HeadStep::Linear(vec![0.0; weights], vec![0.0; bias]);
        assert!(heads(vec![linear(8, 2), HeadStep::Tanh, linear(2, 1)]).check(4).is_ok());
        for steps in [
            vec![linear(9, 0)],
            vec![linear(0, 0)],
            vec![linear(8, 1)],
            vec![linear(8, 0), linear(3, 0)],
            vec![HeadStep::LayerNorm(vec![0.0; 3], Vec::new(), 0.0)],
        ] {
            assert!(heads(steps).check(4).is_err());
        }
    }
}
