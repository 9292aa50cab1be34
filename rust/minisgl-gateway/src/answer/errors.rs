//! Errors after a request was accepted, as clients see them: `server/errors.py`.
//!
//! Everything that can be wrong before that is passed on; the Python server finds the words.

use serde_json::json;

/// So the engine's words for a grammar begin that it cannot compile: `minisgl.message.GRAMMAR_REFUSED`.
const GRAMMAR_REFUSED: &str = "grammar: ";

/// Why a request that was accepted cannot be answered.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// Its forward failed; the client may try again.
    Engine(String),
    /// The engine could not compile its grammar.
    Grammar(String),
    /// The engine process is gone.
    EngineGone(String),
    /// It took longer than so many seconds.
    TooLate(f64),
    /// A bug.
    Internal,
}

impl Failure {
    /// What the engine says of a request.
    pub fn of_engine(text: String) -> Failure {
        if text.starts_with(GRAMMAR_REFUSED) {
            Failure::Grammar(text)
        } else {
            Failure::Engine(text)
        }
    }

    /// The HTTP status.
    pub fn status(&self) -> u16 {
        match self {
            Failure::Engine(_) | Failure::Internal => 500,
            Failure::Grammar(_) => 400,
            Failure::EngineGone(_) => 503,
            Failure::TooLate(_) => 504,
        }
    }

    /// The machine-readable reason.
    pub fn code(&self) -> &'static str {
        match self {
            Failure::Engine(_) => "engine_error",
            Failure::Grammar(_) => "invalid_value",
            Failure::EngineGone(_) => "engine_unavailable",
            Failure::TooLate(_) => "request_timeout",
            Failure::Internal => "internal_error",
        }
    }

    /// OpenAI's shape.
    pub fn body(&self) -> Vec<u8> {
        let message = match self {
            Failure::Engine(text) | Failure::Grammar(text) | Failure::EngineGone(text) => text.clone(),
            Failure::TooLate(seconds) => {
                format!(
                    "the request took longer than {} s (--request-timeout)",
                    general(*seconds)
                )
            }
            Failure::Internal => "internal error: panic".to_owned(),
        };
        let (kind, param) = match self {
            Failure::Grammar(_) => ("invalid_request_error", Some("response_format")),
            _ => ("server_error", None),
        };
        let error = json!({"message": message, "type": kind, "param": param, "code": self.code()});
        json!({ "error": error }).to_string().into_bytes()
    }
}

/// A number as Python's `:g` writes it, for those that a command line has.
fn general(value: f64) -> String {
    if value != 0.0 && !(1e-4..1e6).contains(&value) {
        return format!("{value:e}");
    }
    let digits = 5 - value.abs().max(1e-4).log10().floor() as i32;
    let text = format!("{value:.*}", digits.max(0) as usize);
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_seconds_reads_as_in_python() {
        for (value, text) in [
            (0.5, "0.5"),
            (30.0, "30"),
            (0.25, "0.25"),
            (300.0, "300"),
            (1.23456789, "1.23457"),
        ] {
            assert_eq!(general(value), text);
        }
    }
}
