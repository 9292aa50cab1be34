//! Errors of accepted requests, with the texts and shapes that the Python server configures
//! (`server/gateway_config.py`).
//!
//! Python reports all errors that it can find before a request is accepted.

use serde::Deserialize;
use serde_json::Value;

/// Error of a request that failed after it was accepted.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// The forward pass failed, with the engine's error text; the client may try again.
    Engine(String),
    /// The engine could not compile the grammar, with its error text.
    Grammar(String),
    /// The engine process has exited or does not respond, with the reason.
    EngineGone(String),
    /// The request exceeded the time limit.
    TooLate,
    /// A bug in the gateway.
    Internal,
}

/// An error response as Python configures it; its message is empty where the engine's error text is filled in.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ErrorResponse {
    /// HTTP status code of the error response.
    pub status: u16,
    /// Machine-readable error code of the error response.
    pub code: String,
    body: Value,
}

/// Error responses for each [`Failure`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Errors {
    /// Prefix of the engine's error text for a grammar that it cannot compile.
    grammar_refused: String,
    engine: ErrorResponse,
    grammar: ErrorResponse,
    engine_gone: ErrorResponse,
    too_late: ErrorResponse,
    bug: ErrorResponse,
}

impl Errors {
    /// Converts an engine's error text for a request to a failure.
    pub fn from_engine(&self, text: String) -> Failure {
        if text.starts_with(&self.grammar_refused) {
            Failure::Grammar(text)
        } else {
            Failure::Engine(text)
        }
    }

    /// Returns the error response, with status and code, for `failure`.
    pub fn response(&self, failure: &Failure) -> &ErrorResponse {
        match failure {
            Failure::Engine(_) => &self.engine,
            Failure::Grammar(_) => &self.grammar,
            Failure::EngineGone(_) => &self.engine_gone,
            Failure::TooLate => &self.too_late,
            Failure::Internal => &self.bug,
        }
    }

    /// Returns the response body in the shape of OpenAI's API, with the failure's own text if it has one.
    pub fn body(&self, failure: &Failure) -> Value {
        let mut body = self.response(failure).body.clone();
        if let Failure::Engine(text) | Failure::Grammar(text) | Failure::EngineGone(text) = failure {
            body["error"]["message"] = text.as_str().into();
        }
        body
    }
}
