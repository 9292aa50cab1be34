//! Log probabilities of tokens under the model's own distribution.
//!
//! Invariants: natural logarithms; the most likely token first, the lower id on ties.

use minisgl_kernels::{Isa, softmax};

/// Logits that are checked at once against the current top.
const CHUNK: usize = 64;

/// Log probabilities of one token and of the most likely tokens at its position.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenLogprobs {
    /// Log probability of the token itself.
    pub own: f32,
    /// Ids of the most likely tokens, in order.
    pub top_ids: Vec<u32>,
    /// Log probabilities of `top_ids`.
    pub top: Vec<f32>,
}

/// Returns the log probability of `token` and the `count` most likely tokens for a row of unchanged `logits`.
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

/// Returns the `count` largest logits as (id, logit), in order. Efficient for a small `count`.
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
