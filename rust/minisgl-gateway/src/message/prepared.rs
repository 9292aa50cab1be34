//! What Python makes of a POST that the gateway asks it about: `minisgl.message.prepared`.
//!
//! Invariants: a message of another schema version is refused, as for the engine's messages.

use minisgl_text::answer::{TOOL_FORMATS, Thinking};
use serde::Deserialize;

use super::packed::{Numbers, bytes};
use super::types::SamplingParams;

/// The answer to a question of the gateway.
#[derive(Debug, PartialEq)]
pub enum Prepared {
    /// Text is to be generated, and the gateway writes the answer.
    Generation(Box<Generation>),
    /// The whole answer: an error.
    Whole(Whole),
    /// The Python server answers: the request goes on to it, unchanged.
    PassOn,
    /// The caller may send a large body.
    Read,
}

/// The shapes of answers that the gateway writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// `/v1/chat/completions`
    #[default]
    Chat,
    /// `/v1/completions`
    Completion,
    /// `/generate`
    Generate,
}

/// What is generated for one request, and how its answer is shown. The fields are described where Python fills them in.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[allow(missing_docs)]
pub struct Generation {
    pub shape: Shape,
    pub stream: bool,
    pub include_usage: bool,
    pub shows_logprobs: bool,
    pub id: String,
    pub created: i64,
    pub model: String,
    #[serde(deserialize_with = "prompts")]
    pub prompts: Vec<Vec<i32>>,
    pub sampling: SamplingParams,
    pub max_tokens: Vec<i64>,
    pub parts: Option<Parts>,
    pub priority: i64,
    pub key: usize,
    pub key_name: Option<String>,
    pub shortened_to: Option<String>,
    pub timeout_s: Option<f64>,
    pub request_id: String,
    pub headers: Vec<(String, String)>,
}

/// How an answer's text is taken apart into content, reasoning and calls.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[allow(missing_docs)]
pub struct Parts {
    pub tool_format: Option<usize>,
    pub thinking: Option<String>,
    pub is_open: Option<bool>,
    pub schemas: String,
    pub named_call: bool,
    pub shows_thoughts: bool,
    pub think_end: Option<i32>,
    pub shown: Vec<i32>,
}

/// An answer that is written as it is.
#[derive(Debug, PartialEq, Deserialize)]
#[allow(missing_docs)]
pub struct Whole {
    pub status: u16,
    pub content_type: String,
    pub headers: Vec<(String, String)>,
    #[serde(with = "bytes")]
    pub body: Vec<u8>,
}

impl Generation {
    /// Whether this side knows how its answers are taken apart; else why not.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Some(parts) = &self.parts else { return Ok(()) };
        if let Some(place) = parts.tool_format.filter(|&place| place >= TOOL_FORMATS.len()) {
            return Err(format!("no format of calls has the place {place}"));
        }
        match &parts.thinking {
            Some(name) if Thinking::named(name).is_none() => Err(format!("no format of reasoning has the name {name}")),
            _ => Ok(()),
        }
    }

    /// Choices in the engine.
    pub fn num_choices(&self) -> usize {
        self.prompts.len() * self.n()
    }

    /// Choices of each prompt.
    pub fn n(&self) -> usize {
        usize::try_from(self.sampling.n).unwrap_or(1).max(1)
    }

    /// Tokens of the prompts, each once.
    pub fn num_prompt_tokens(&self) -> usize {
        self.prompts.iter().map(Vec::len).sum()
    }
}

fn prompts<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<Vec<i32>>, D::Error> {
    let found = Vec::<Numbers<i32>>::deserialize(from)?;
    Ok(found.into_iter().map(|one| one.0).collect())
}
