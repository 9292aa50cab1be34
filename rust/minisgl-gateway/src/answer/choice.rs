//! A choice of a request: its unhandled tokens from the engine, and its detokenized text (as
//! `frontend/output_processor.py` has it).
//!
//! Invariants: the text does not depend on how many tokens arrive at once.

use std::sync::Arc;
use std::time::Instant;

use minisgl_text::answer::ContentScan;
use minisgl_text::{TextStream, Tokenizer};
use serde_json::Value;

use crate::message::{SamplingParams, TokenLogprobs};

use super::logprobs::ScoredToken;

/// Finish reason of a request, as in `step.FinishReason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The request ended with a stop token or a stop string.
    Stop,
    /// The request reached its limit of generated tokens, or the end of the context.
    Length,
    /// The request was aborted: no client waits for it.
    Abort,
    /// The forward pass of the request failed.
    Error,
}

impl Finish {
    /// Converts the integer of an engine message. `None` for 0: the request continues. Unknown values are errors.
    pub fn from_reason(reason: i32) -> Option<Finish> {
        match reason {
            1 => Some(Finish::Stop),
            2 => Some(Finish::Length),
            3 => Some(Finish::Abort),
            0 => None,
            _ => Some(Finish::Error),
        }
    }

    /// Returns the name that clients see in `finish_reason`.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Abort => "abort",
            Finish::Error => "error",
        }
    }
}

/// End of a choice as a response shows it. `matched` is the stop that ended it, as JSON.
#[derive(Clone, Copy, Debug, Default)]
pub struct End<'a> {
    /// Finish reason of the choice; `None` while it continues.
    pub reason: Option<&'static str>,
    /// JSON of the stop string, or of the id of the stop token, which may be the model's EOS token.
    pub matched: Option<&'a str>,
}

/// Result of [`Choice::take`]: what is new since the last call.
#[derive(Debug, PartialEq)]
pub struct NewOutput {
    /// Finish reason, if the choice has ended; else `None`.
    pub finish: Option<Finish>,
    /// A stop string ended the choice: the engine does not know that yet.
    pub hit_stop: bool,
    /// Number of generated tokens since the last call.
    pub num_new: usize,
    /// New tokens of the text with their log probabilities, if the request asks for them.
    pub scored: Vec<ScoredToken>,
}

/// A choice of a request: tokens since the last `take`, and the state of its detokenized text.
pub struct Choice {
    /// Request id in the engine; -1 before submission.
    pub req_id: i64,
    /// Number of tokens of the choice's prompt.
    pub num_prompt: usize,
    /// Prompt tokens found in the prefix cache; `None` before the engine admits the request.
    pub cached_len: Option<i32>,
    /// Tokens that arrived since the last `take`; `scored` has their log probabilities.
    tokens: Vec<i32>,
    scored: Vec<TokenLogprobs>,
    reason: Option<Finish>,
    error: Option<String>,
    /// Generated tokens, including a stop token that ended the choice. `ids` has them only if the response shows them.
    pub num_generated: usize,
    ids: Option<Vec<i32>>,
    watched: Option<i32>,
    /// Generated tokens up to and including the first `watched` token; `None` if it has not been generated.
    pub num_watched: Option<usize>,
    /// Finish reason; `None` until the choice has ended.
    pub finish: Option<Finish>,
    matched: Option<String>,
    /// Time at which the choice's last tokens were handled.
    pub last_time: Option<Instant>,
    stream: TextStream,
}

impl Choice {
    /// Makes a choice without tokens. `min_tokens`: tokens before which no stop string ends it; `keeps_ids`: whether
    /// the response shows token ids; `shown`: special tokens that are kept in the text; `watched`: see `num_watched`.
    pub fn new(
        tokenizer: &Arc<Tokenizer>,
        sampling: &SamplingParams,
        min_tokens: i64,
        num_prompt: usize,
        keeps_ids: bool,
        shown: &[i32],
        watched: Option<i32>,
    ) -> Choice {
        Choice {
            req_id: -1,
            num_prompt,
            cached_len: None,
            tokens: Vec::new(),
            scored: Vec::new(),
            reason: None,
            error: None,
            num_generated: 0,
            ids: keeps_ids.then(Vec::new),
            watched,
            num_watched: None,
            finish: None,
            matched: None,
            last_time: None,
            stream: TextStream::new(tokenizer, &sampling.stop, shown, min_tokens),
        }
    }

    /// Restricts the search for stop strings to the content of the answer, without reasoning and tool calls.
    pub fn search_within(&mut self, scan: ContentScan) {
        self.stream.search_within(scan);
    }

    /// Adds the log probabilities of the next token that `add` adds.
    pub fn add_scored(&mut self, logprobs: TokenLogprobs) {
        self.scored.push(logprobs);
    }

    /// Adds a token of a step (negative: none), and the finish reason and error text if the request has ended.
    pub fn add(&mut self, token: i32, reason: Option<Finish>, error: Option<String>) {
        if token >= 0 {
            self.tokens.push(token);
        }
        if reason.is_some() {
            self.reason = reason;
            self.error = error;
        }
    }

    /// Returns the error text if the forward pass has failed, else `None`.
    pub fn take_error(&mut self) -> Option<String> {
        (self.reason == Some(Finish::Error)).then(|| {
            self.error
                .take()
                .unwrap_or_else(|| "the engine gave no reason".to_owned())
        })
    }

    /// Returns true if tokens or the end arrived since the last `take`.
    pub fn has_updates(&self) -> bool {
        self.finish.is_none() && (!self.tokens.is_empty() || self.reason.is_some())
    }

    /// Appends the text of the new tokens to `out`, and returns what else is new.
    pub fn take(&mut self, out: &mut String) -> NewOutput {
        let by_token = self.reason == Some(Finish::Stop);
        let num_new = self.stream.take(&self.tokens, self.reason.is_some(), by_token, out);
        let new = &self.tokens[..num_new];
        if let (Some(watched), None) = (self.watched, self.num_watched) {
            let at = new.iter().position(|&token| token == watched);
            self.num_watched = at.map(|at| self.num_generated + at + 1);
        }
        self.num_generated += num_new;
        if let Some(ids) = &mut self.ids {
            ids.extend_from_slice(new);
        }
        let hit_stop = self.stream.stopped();
        if hit_stop {
            self.reason = Some(Finish::Stop);
            self.matched = self.stream.matched_stop().map(|stop| Value::from(stop).to_string());
        } else if by_token {
            self.matched = new.last().map(ToString::to_string);
        }
        self.finish = self.reason;
        let num_shown = self.tokens.len().saturating_sub(usize::from(by_token)); // a stop token has no text
        let shown = new.iter().copied().take(num_shown);
        let scored = shown.zip(self.scored.drain(..)).collect();
        self.tokens.clear();
        NewOutput {
            finish: self.finish,
            hit_stop,
            num_new,
            scored,
        }
    }

    /// Returns the finish reason and the stop that matched.
    pub fn end(&self) -> End<'_> {
        End {
            reason: self.finish.map(Finish::name),
            matched: self.matched.as_deref(),
        }
    }

    /// Returns the generated token ids if the response shows them, else an empty slice.
    pub fn ids(&self) -> &[i32] {
        self.ids.as_deref().unwrap_or_default()
    }
}
