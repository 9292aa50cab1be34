//! `minisgl.sampling_params.SamplingParams.check`: what an engine process would not take from a pool either.

use std::collections::HashSet;
use std::fmt::Debug;

use super::SamplingParams;
use super::reader::{Read, malformed};

const MAX_STOP_STRINGS: usize = 4;
const MAX_N: i64 = 128;
const MAX_LOGPROBS: i64 = 20;
const MAX_LOGIT_BIAS: usize = 1024;
const MAX_BAD_WORDS: usize = 256;
const MAX_BAD_WORD_CHARS: usize = 256;

impl SamplingParams {
    /// The first field that is out of its range.
    pub(super) fn check(&self) -> Read<()> {
        let p = self;
        let most = p.max_tokens.unwrap_or(i64::MAX);
        need(most >= 1, "max_tokens", p.max_tokens, "must be at least 1")?;
        need(p.min_tokens >= 0, "min_tokens", p.min_tokens, "must be at least 0")?;
        need(
            p.min_tokens <= most,
            "min_tokens",
            p.min_tokens,
            "must not exceed max_tokens",
        )?;
        let between = |name: &str, value: f64, low: f64, high: f64| {
            let range = format!("must be between {low} and {high}");
            need((low..=high).contains(&value), name, value, &range)
        };
        between("temperature", p.temperature, 0.0, 2.0)?;
        let counts = p.top_k == -1 || p.top_k >= 1;
        need(counts, "top_k", p.top_k, "must be -1 (off) or at least 1")?;
        between("top_p", p.top_p, 0.0, 1.0)?;
        need((1..=MAX_N).contains(&p.n), "n", p.n, "must be between 1 and 128")?;
        let few = p.stop.len() <= MAX_STOP_STRINGS;
        need(few, "stop", p.stop.len(), "at most 4 stop strings")?;
        let full = p.stop.iter().all(|text| !text.is_empty());
        need(full, "stop", "", "stop strings must not be empty")?;
        ids("stop_token_ids", &p.stop_token_ids)?;
        for (name, value) in [("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs)] {
            let ok = value.is_none_or(|value| (0..=MAX_LOGPROBS).contains(&value));
            need(ok, name, value, "must be between 0 and 20")?;
        }
        between("min_p", p.min_p, 0.0, 1.0)?;
        between("frequency_penalty", p.frequency_penalty, -2.0, 2.0)?;
        between("presence_penalty", p.presence_penalty, -2.0, 2.0)?;
        let penalty = p.repetition_penalty;
        let ok = 0.0 < penalty && penalty <= 10.0;
        need(ok, "repetition_penalty", penalty, "must be above 0 and at most 10")?;
        if p.grammar.is_some() {
            need(
                !p.ignore_eos,
                "ignore_eos",
                true,
                "cannot stand beside a grammar: it ends there",
            )?;
            let reason = "cannot stand beside a grammar: it may end before";
            need(p.min_tokens == 0, "min_tokens", p.min_tokens, reason)?;
            let reason = "cannot stand beside a grammar: together they may leave no token";
            let none = p.allowed_token_ids.is_empty();
            need(none, "allowed_token_ids", &p.allowed_token_ids, reason)?;
        }
        let pooling = p.embedding.as_deref();
        let ok = pooling.is_none_or(|name| name == "mean" || name == "last");
        need(ok, "embedding", pooling, "must be 'mean' or 'last'")?;
        let ok = (0..1 << 31).contains(&p.adapter);
        need(ok, "adapter", p.adapter, "must be an unsigned 31-bit integer")?;
        self.check_lists()
    }

    fn check_lists(&self) -> Read<()> {
        let p = self;
        let number = p.logit_bias.len();
        need(number <= MAX_LOGIT_BIAS, "logit_bias", number, "at most 1024 token ids")?;
        let mut seen = HashSet::with_capacity(number);
        for &(token, bias) in &p.logit_bias {
            need(token >= 0, "logit_bias", token, "token ids must not be negative")?;
            need(seen.insert(token), "logit_bias", token, "a token id stands there twice")?;
            let ok = (-100.0..=100.0).contains(&bias);
            need(ok, "logit_bias", bias, "must be between -100 and 100")?;
        }
        ids("allowed_token_ids", &p.allowed_token_ids)?;
        let number = p.bad_words.len();
        need(number <= MAX_BAD_WORDS, "bad_words", number, "at most 256 words")?;
        for word in &p.bad_words {
            let length = word.chars().count();
            let ok = (1..=MAX_BAD_WORD_CHARS).contains(&length);
            need(ok, "bad_words", length, "must have 1 to 256 characters")?;
        }
        for sequence in &p.bad_token_ids {
            need(
                !sequence.is_empty(),
                "bad_token_ids",
                "[]",
                "must be sequences of token ids",
            )?;
            ids("bad_token_ids", sequence)?;
        }
        Ok(())
    }
}

fn ids(name: &str, ids: &[i64]) -> Read<()> {
    let least = ids.iter().min().copied().unwrap_or(0);
    need(least >= 0, name, least, "must not be negative")
}

fn need(ok: bool, name: &str, value: impl Debug, reason: &str) -> Read<()> {
    if ok {
        return Ok(());
    }
    Err(malformed(format!("{name}: {reason} (got {value:?})")))
}
