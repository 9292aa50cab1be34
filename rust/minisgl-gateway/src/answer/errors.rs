//! Errors after a request was accepted, in the words and shapes that the Python server told (`server/gateway_config.py`).
//!
//! Python finds everything that can be wrong before that.

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
    /// It took longer than the limit.
    TooLate,
    /// A bug.
    Internal,
}

/// One error with its body: the message is empty where the engine has the words.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Told {
    /// HTTP has it.
    pub status: u16,
    /// The machine-readable reason.
    pub code: String,
    body: Value,
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
            Failure::TooLate => &self.too_late,
            Failure::Internal => &self.bug,
        }
    }

    /// The body in the shape of OpenAI's API.
    pub fn body(&self, failure: &Failure) -> Value {
        let mut found = self.of(failure).body.clone();
        if let Failure::Engine(text) | Failure::Grammar(text) | Failure::EngineGone(text) = failure {
            found["error"]["message"] = text.as_str().into();
        }
        found
    }
}
