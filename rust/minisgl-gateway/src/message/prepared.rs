//! Results of Python for the POST requests that the gateway receives, as in `minisgl.message.prepared`.
//!
//! Invariants: a message of another schema version is refused, as for the engine's messages.

use minisgl_text::answer::{TOOL_FORMATS, Thinking};
use serde::Deserialize;

use super::packed::{PackedVec, bytes};
use super::types::SamplingParams;

/// Python's result for a request of the gateway.
#[derive(Debug, PartialEq)]
pub enum Prepared {
    /// A generation: the gateway runs it and writes the response.
    Generation(Box<Generation>),
    /// A whole response: an error.
    Whole(Whole),
    /// No result: the request is proxied to the Python server unchanged.
    PassOn,
    /// Permission: the caller may send a large body.
    Read,
}

/// Shapes of responses that the gateway can write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// Chat completions, for `/v1/chat/completions`.
    #[default]
    Chat,
    /// Text completions, for `/v1/completions`.
    Completion,
    /// SGLang's native shape, for `/generate`.
    Generate,
}

/// Prompts, sampling parameters and response shape of one request. `minisgl.message.prepared` describes the fields.
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

/// Parser settings that split an answer's text into content, reasoning and tool calls.
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

/// A whole HTTP response, which is sent unchanged.
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
    /// Checks that the tool call format and the reasoning format are known here. The error names the unknown one.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Some(parts) = &self.parts else { return Ok(()) };
        if let Some(index) = parts.tool_format.filter(|&index| index >= TOOL_FORMATS.len()) {
            return Err(format!("tool_format {index}: must be below {}", TOOL_FORMATS.len()));
        }
        match &parts.thinking {
            Some(name) if Thinking::named(name).is_none() => Err(format!("thinking {name}: unknown reasoning format")),
            _ => Ok(()),
        }
    }

    /// Returns the number of requests in the engine: one for each choice of each prompt.
    pub fn num_choices(&self) -> usize {
        self.prompts.len() * self.n()
    }

    /// Returns the number of choices of each prompt.
    pub fn n(&self) -> usize {
        usize::try_from(self.sampling.n).unwrap_or(1).max(1)
    }

    /// Returns the total number of prompt tokens, each prompt counted once.
    pub fn num_prompt_tokens(&self) -> usize {
        self.prompts.iter().map(Vec::len).sum()
    }
}

fn prompts<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<Vec<i32>>, D::Error> {
    let found = Vec::<PackedVec<i32>>::deserialize(from)?;
    Ok(found.into_iter().map(|one| one.0).collect())
}
