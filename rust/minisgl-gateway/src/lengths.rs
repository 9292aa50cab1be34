//! How long an answer may become: `server/lengths.py`, which has the rule, in the same whole numbers.

use crate::answer::plan::Plan;
use crate::config::Limits;

/// Limits of generated tokens.
#[derive(Debug, PartialEq, Eq)]
pub struct Lengths {
    /// In the order of the prompts.
    pub by_prompt: Vec<i64>,
    /// A busy server has cut the default.
    pub are_shortened: bool,
}

impl Lengths {
    /// `room`: tokens of the context that each prompt leaves. A length that the client has not named is a default.
    pub fn new(room: impl Iterator<Item = i64>, plan: &Plan, limits: &Limits, num_in_flight: usize) -> Lengths {
        let (sampling, named) = (&plan.sampling, plan.names_length);
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

    /// Cuts those that the client has not named to what `most` log probabilities of one request leave; false: there
    /// would be more.
    pub fn fit_logprobs(&mut self, plan: &Plan, most: i64) -> bool {
        let Some(top) = plan.sampling.logprobs else { return true };
        let (each, n) = (1 + top, plan.n as i64);
        if !plan.names_length {
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
    use super::*;

    #[test]
    fn log_probabilities_shorten_a_default_and_refuse_a_named_length() {
        let mut plan = Plan {
            n: 2,
            ..Plan::default()
        };
        plan.sampling.logprobs = Some(4);
        let mut fitted = |named, most| {
            plan.names_length = named;
            let mut found = Lengths {
                by_prompt: vec![100, 10],
                are_shortened: false,
            };
            let fits = found.fit_logprobs(&plan, most);
            (fits, found.by_prompt)
        };
        assert_eq!(fitted(true, 1_100), (true, vec![100, 10]));
        assert_eq!(fitted(true, 1_099), (false, vec![100, 10]));
        assert_eq!(fitted(false, 600), (true, vec![30, 10]));
        assert_eq!(fitted(false, 1), (false, vec![1, 1]));
    }
}
