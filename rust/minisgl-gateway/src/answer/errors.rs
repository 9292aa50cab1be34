//! Errors after a request was accepted, in the words and shapes that the Python server told (`server/gateway_config.py`).
//!
//! Everything that can be wrong before that is passed on; the Python server finds the words.

use serde::Deserialize;
use serde_json::Value;

/// Why a request that was accepted cannot be answered.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// Its forward failed; the client may try again.
    Engine(String),
    /// The engine could not compile its grammar.
    Grammar(String),
    /// The engine process is gone.
    EngineGone(String),
    /// The engine gave no embedding.
    NoEmbedding,
    /// An embedding has fewer numbers than were asked for.
    Dimensions {
        /// What was asked for.
        asked: usize,
        /// What there is.
        has: usize,
    },
    /// It took longer than the limit.
    TooLate,
    /// A bug.
    Internal,
}

/// One error, with a body in each API's shape: the message is empty where the engine has the words.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Told {
    /// HTTP has it.
    pub status: u16,
    /// The machine-readable reason.
    pub code: String,
    openai: Value,
    anthropic: Value,
}

/// The errors by [`Failure`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Errors {
    /// So the engine's words for a grammar begin that it cannot compile.
    grammar_refused: String,
    engine: Told,
    grammar: Told,
    engine_gone: Told,
    no_embedding: Told,
    dimensions: Told,
    too_late: Told,
    bug: Told,
}

impl Errors {
    /// What the engine says of a request.
    pub fn of_engine(&self, text: String) -> Failure {
        if text.starts_with(&self.grammar_refused) {
            Failure::Grammar(text)
        } else {
            Failure::Engine(text)
        }
    }

    /// Status and code.
    pub fn of(&self, failure: &Failure) -> &Told {
        match failure {
            Failure::Engine(_) => &self.engine,
            Failure::Grammar(_) => &self.grammar,
            Failure::EngineGone(_) => &self.engine_gone,
            Failure::NoEmbedding => &self.no_embedding,
            Failure::Dimensions { .. } => &self.dimensions,
            Failure::TooLate => &self.too_late,
            Failure::Internal => &self.bug,
        }
    }

    /// The body in the shape of OpenAI's API, or of Anthropic's.
    pub fn body(&self, failure: &Failure, is_anthropic: bool) -> Value {
        let told = self.of(failure);
        let mut found = if is_anthropic { &told.anthropic } else { &told.openai }.clone();
        let message = &mut found["error"]["message"];
        match failure {
            Failure::Engine(text) | Failure::Grammar(text) | Failure::EngineGone(text) => {
                *message = text.as_str().into()
            }
            Failure::Dimensions { asked, has } => {
                let text = message
                    .as_str()
                    .unwrap_or_default()
                    .replace("{asked}", &asked.to_string());
                *message = text.replace("{has}", &has.to_string()).into();
            }
            _ => {}
        }
        found
    }
}
