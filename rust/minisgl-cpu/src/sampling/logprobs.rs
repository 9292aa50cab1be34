//! Log probabilities of tokens, from the model's own distribution.
//!
//! Invariants: natural logarithms; the most likely first, the lower id on ties.

use minisgl_kernels::{Isa, softmax};

/// Looked at together for any that belongs to the top.
const CHUNK: usize = 64;

/// Log probabilities of one token and of the most likely ones beside it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLogprobs {
    /// The log probability of the token itself.
    pub own: f32,
    /// The most likely tokens.
    pub top_ids: Vec<u32>,
    /// Theirs.
    pub top: Vec<f32>,
}

/// The log probabilities of `token` and of the `count` most likely ones of a row of `logits`, as the model put them out.
pub fn logprobs(isa: Isa, logits: &[f32], token: u32, count: usize) -> TokenLogprobs {
    let norm = softmax::log_sum_exp(isa, logits);
    let (top_ids, top) = most_likely(logits, count)
        .into_iter()
        .map(|(id, logit)| (id, logit - norm))
        .unzip();
    TokenLogprobs {
        own: logits
            .get(token as usize)
            .map_or(f32::NEG_INFINITY, |logit| logit - norm),
        top_ids,
        top,
    }
}

/// The `count` tokens of the largest logits, in order. `count` is small.
fn most_likely(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    if count == 0 {
        return top;
    }
    let mut start = 0;
    for chunk in logits.chunks(CHUNK) {
        let belongs = |top: &[(u32, f32)], x: f32| top.len() < count || x > top[count - 1].1;
        if belongs(&top, softmax::max(chunk)) {
            for (i, &x) in chunk.iter().enumerate() {
                if belongs(&top, x) {
                    let at = top.partition_point(|&(_, other)| other >= x);
                    top.insert(at, ((start + i) as u32, x));
                    top.truncate(count);
                }
            }
        }
        start += chunk.len();
    }
    top
}
