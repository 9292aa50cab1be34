//! One choice of a request: what came for it from the engine, and its text so far (`frontend/output_processor.py`).
//!
//! Invariants: the text does not depend on how many of its tokens come at once.

use std::sync::Arc;
use std::time::Instant;

use minisgl_text::answer::ContentScan;
use minisgl_text::{TextStream, Tokenizer};
use serde_json::Value;

use crate::message::{SamplingParams, TokenLogprobs};

use super::logprobs::Scored;

/// Why a request ended, in the numbers of `step.FinishReason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token or a stop string.
    Stop,
    /// As many tokens as asked for, or the end of the context.
    Length,
    /// Nobody waits for it.
    Abort,
    /// Its forward failed.
    Error,
}

impl Finish {
    /// None for 0: it goes on.
    pub fn of(reason: i32) -> Option<Finish> {
        match reason {
            1 => Some(Finish::Stop),
            2 => Some(Finish::Length),
            3 => Some(Finish::Abort),
            0 => None,
            _ => Some(Finish::Error),
        }
    }

    /// As clients see it.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Abort => "abort",
            Finish::Error => "error",
        }
    }
}

/// The end of a choice, as it is shown; `matched`: the stop that ended it, as JSON.
#[derive(Clone, Copy, Debug, Default)]
pub struct End<'a> {
    /// None: it goes on.
    pub reason: Option<&'static str>,
    /// A stop string, or the id of a stop token, which may be the model's own end of text.
    pub matched: Option<&'a str>,
}

/// What `take` found.
#[derive(Debug, PartialEq)]
pub struct Taken {
    /// The choice has ended.
    pub finish: Option<Finish>,
    /// A stop string ended it: the engine does not know.
    pub found_stop: bool,
    /// Tokens of the answer that came since the last time.
    pub num_new: usize,
    /// Those of the text with log probabilities, if the request asks for them.
    pub scored: Vec<Scored>,
}

/// See the module.
pub struct Choice {
    /// In the engine.
    pub req_id: i64,
    /// Its prompt's.
    pub num_prompt: usize,
    /// How many of these were in the cache; None before it has a row.
    pub cached_len: Option<i32>,
    /// Came and not taken yet, as the next one.
    tokens: Vec<i32>,
    scored: Vec<TokenLogprobs>,
    reason: Option<Finish>,
    error: Option<String>,
    /// Ids of the answer, the stop token that ended it included; all of them only if they are to be shown.
    pub num_generated: usize,
    ids: Option<Vec<i32>>,
    watched: Option<i32>,
    /// How many there were with the first that is watched for.
    pub num_watched: Option<usize>,
    /// Set once it has ended.
    pub finish: Option<Finish>,
    matched: Option<String>,
    /// When its tokens came last.
    pub last_time: Option<Instant>,
    stream: TextStream,
}

impl Choice {
    /// `min_tokens` fit into its length; `keeps_ids`: they are part of the answer; `shown`: special tokens that are
    /// text; `watched`: see `num_watched`.
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

    /// Looks for stop strings in the content alone of an answer that is taken apart.
    pub fn search_within(&mut self, scan: ContentScan) {
        self.stream.search_within(scan);
    }

    /// A step brought this for the next token that it adds.
    pub fn add_scored(&mut self, found: TokenLogprobs) {
        self.scored.push(found);
    }

    /// A step brought this.
    pub fn add(&mut self, token: i32, reason: Option<Finish>, error: Option<String>) {
        if token >= 0 {
            self.tokens.push(token);
        }
        if reason.is_some() {
            self.reason = reason;
            self.error = error;
        }
    }

    /// Why its forward failed, if that has come.
    pub fn failed(&mut self) -> Option<String> {
        (self.reason == Some(Finish::Error)).then(|| {
            self.error
                .take()
                .unwrap_or_else(|| "the engine gave no reason".to_owned())
        })
    }

    /// Whether anything came since the last time.
    pub fn has_news(&self) -> bool {
        self.finish.is_none() && (!self.tokens.is_empty() || self.reason.is_some())
    }

    /// Appends the text of what came since the last time.
    pub fn take(&mut self, out: &mut String) -> Taken {
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
        let found_stop = self.stream.stopped();
        if found_stop {
            self.reason = Some(Finish::Stop);
            self.matched = self.stream.matched_stop().map(|stop| Value::from(stop).to_string());
        } else if by_token {
            self.matched = new.last().map(ToString::to_string);
        }
        self.finish = self.reason;
        let num_shown = self.tokens.len().saturating_sub(usize::from(by_token)); // a stop token is no text
        let shown = new.iter().copied().take(num_shown);
        let scored = shown.zip(self.scored.drain(..)).collect();
        self.tokens.clear();
        Taken {
            finish: self.finish,
            found_stop,
            num_new,
            scored,
        }
    }

    /// How it has ended.
    pub fn end(&self) -> End<'_> {
        End {
            reason: self.finish.map(Finish::name),
            matched: self.matched.as_deref(),
        }
    }

    /// Ids of the answer, if they are part of it.
    pub fn ids(&self) -> &[i32] {
        self.ids.as_deref().unwrap_or_default()
    }
}
