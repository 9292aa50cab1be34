//! How long an answer may become: `server/lengths.py`, which has the rule, in the same whole numbers.

use crate::config::Limits;
use crate::message::SamplingParams;

/// Limits of generated tokens.
#[derive(Debug, PartialEq, Eq)]
pub struct Lengths {
    /// In the order of the prompts.
    pub by_prompt: Vec<i64>,
    /// A busy server has cut the default.
    pub are_shortened: bool,
}

impl Lengths {
    /// `room`: tokens of the context that each prompt leaves. The client has `named` the length of `sampling`, else it is
    /// a default.
    pub fn new(
        room: impl Iterator<Item = i64>,
        sampling: &SamplingParams,
        limits: &Limits,
        named: bool,
        num_in_flight: usize,
    ) -> Lengths {
        let adaptive = limits
            .adaptive_max_tokens
            .as_ref()
            .filter(|one| !named && num_in_flight > one.threshold);
        let by_prompt = room.map(|left| {
            let whole = sampling.max_tokens.map_or(left, |most| most.min(left));
            if named {
                return whole;
            }
            let most = whole.min((left - limits.context_margin).max(1));
            let most = adaptive.map_or(most, |one| share(most, one.millionths));
            most.max(1).max(sampling.min_tokens.min(whole))
        });
        Lengths {
            by_prompt: by_prompt.collect(),
            are_shortened: adaptive.is_some(),
        }
    }

    /// Cuts those that the client has not `named` to what `most` log probabilities of one request leave; false: there would
    /// be more.
    pub fn fit_logprobs(&mut self, sampling: &SamplingParams, n: usize, named: bool, most: i64) -> bool {
        let Some(top) = sampling.logprobs else { return true };
        let (each, n) = (1 + top, n as i64);
        if !named {
            let longest = most / n / (each * self.by_prompt.len() as i64);
            for length in &mut self.by_prompt {
                *length = (*length).min(longest).max(1);
            }
        }
        n * each * self.by_prompt.iter().sum::<i64>() <= most
    }

    /// For a header.
    pub fn shown(&self) -> String {
        let texts: Vec<_> = self.by_prompt.iter().map(i64::to_string).collect();
        texts.join(",")
    }
}

fn share(length: i64, millionths: u32) -> i64 {
    let found = i128::from(length) * i128::from(millionths) / 1_000_000;
    i64::try_from(found).unwrap_or(length) // it is no more than the length
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use serde_json::json;

    fn found(max_tokens: Option<i64>, min_tokens: i64, margin: i64, named: bool, num_in_flight: usize) -> Vec<i64> {
        let mut limits = crate::answer::tests::config(json!({})).limits;
        limits.context_margin = margin;
        limits.adaptive_max_tokens =
            Some(serde_json::from_value(json!({"threshold": 2, "millionths": 290_000})).unwrap());
        let sampling = SamplingParams {
            max_tokens,
            min_tokens,
            ..SamplingParams::default()
        };
        Lengths::new([100, 10, 1].into_iter(), &sampling, &limits, named, num_in_flight).by_prompt
    }

    #[test]
    fn a_named_length_is_cut_to_the_context_only() {
        assert_eq!(found(Some(50), 0, 5, true, 99), [50, 10, 1]);
    }

    #[test]
    fn a_default_leaves_a_margin_and_is_shortened_above_the_threshold() {
        assert_eq!(found(None, 0, 5, false, 2), [95, 5, 1]);
        assert_eq!(found(Some(50), 0, 0, false, 2), [50, 10, 1]);
        assert_eq!(found(None, 0, 0, false, 3), [29, 2, 1]);
        assert_eq!(found(Some(1_000), 40, 5, false, 3), [40, 10, 1]);
        assert_eq!(found(Some(i64::MAX), 0, 0, false, 3), [29, 2, 1]);
    }

    #[test]
    fn log_probabilities_shorten_a_default_and_refuse_a_named_length() {
        let sampling = SamplingParams {
            logprobs: Some(4),
            ..SamplingParams::default()
        };
        let fitted = |named, most| {
            let mut found = Lengths {
                by_prompt: vec![100, 10],
                are_shortened: false,
            };
            let fits = found.fit_logprobs(&sampling, 2, named, most);
            (fits, found.by_prompt)
        };
        assert_eq!(fitted(true, 1_100), (true, vec![100, 10]));
        assert_eq!(fitted(true, 1_099), (false, vec![100, 10]));
        assert_eq!(fitted(false, 600), (true, vec![30, 10]));
        assert_eq!(fitted(false, 1), (false, vec![1, 1]));
    }
}
