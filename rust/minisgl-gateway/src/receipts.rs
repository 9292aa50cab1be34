//! Receipts of answers that asked for one: what the Python server has to know of an answer to make its receipt, and sign
//! it (`server/receipts.py`).
//!
//! Invariants: it is asked before anything is computed whether there can be a receipt, once for each adapter, and once
//! at the end of each answer.

use std::collections::HashSet;
use std::sync::Mutex;

use serde::Serialize;
use serde_json::json;

use crate::answer::logprobs::Scored;
use crate::message::SamplingParams;
use crate::python::{Python, lock};

/// An answer as it grows, and its receipt.
#[derive(Default)]
pub struct Receipt {
    sampling: SamplingParams,
    prompt: Vec<i32>,
    logprobs: Vec<f32>,
    /// JSON, once it has come.
    pub shown: Option<String>,
    is_seen: bool,
}

/// What is asked at its end. Arrays are their bytes, in base64.
#[derive(Serialize)]
struct Answer<'a> {
    sampling: &'a SamplingParams,
    prompt: String,
    tokens: String,
    logprobs: String,
    finish_reason: &'a str,
}

impl Receipt {
    /// It is for an answer to `prompt`, of which nothing has come. `sampling` is resolved.
    pub fn new(sampling: &SamplingParams, prompt: &[i32]) -> Receipt {
        Receipt {
            sampling: sampling.clone(),
            prompt: prompt.to_vec(),
            ..Receipt::default()
        }
    }

    /// These tokens came.
    pub fn add(&mut self, found: &[Scored]) {
        self.logprobs
            .extend(found.iter().map(|(_, one)| (one.logprob + 0.0) as f32)); // -0.0 is 0.0
    }

    /// Whether it has come, for the first time that this is asked.
    pub fn has_come(&mut self) -> bool {
        self.shown.is_some() && !std::mem::replace(&mut self.is_seen, true)
    }

    /// What is to be asked of the answer, which has ended.
    pub fn question(&self, tokens: &[i32], finish_reason: &str) -> String {
        let answer = Answer {
            sampling: &self.sampling,
            prompt: base64::encode(bytemuck::cast_slice(&self.prompt)),
            tokens: base64::encode(bytemuck::cast_slice(tokens)),
            logprobs: base64::encode(bytemuck::cast_slice(&self.logprobs)),
            finish_reason,
        };
        json!({"receipt": {"adapter": self.sampling.adapter, "answer": answer}}).to_string()
    }
}

/// Who makes them.
pub struct Receipts {
    python: Python,
    known: Mutex<HashSet<i64>>, // adapters, and 0, of which there can be some
}

impl Receipts {
    /// Asks `python`.
    pub fn new(python: Python) -> Receipts {
        Receipts {
            python,
            known: Mutex::new(HashSet::new()),
        }
    }

    /// Whether it is known that there can be some of this adapter; 0: of the model itself.
    pub fn has(&self, adapter: i64) -> bool {
        lock(&self.known).contains(&adapter)
    }

    /// Finds that out, which may take as long as reading the model. `name`: of the adapter.
    pub fn learn(&self, adapter: i64, name: Option<&str>) {
        let question = json!({"receipt": {"adapter": adapter, "name": name}}).to_string();
        if self.python.ask(&question).is_some() {
            lock(&self.known).insert(adapter);
        }
    }

    /// The answer to [`Receipt::question`]; None: Python has failed.
    pub fn make(&self, question: &str) -> Option<String> {
        self.python.ask(question)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::message::TokenLogprobs;

    #[test]
    fn what_cannot_be_is_asked_again() {
        let python = Python::new(Box::new(|question: &str| question.contains("\"a\"").then(String::new)));
        let receipts = Receipts::new(python.clone());
        receipts.learn(1, Some("a"));
        receipts.learn(2, Some("b"));
        assert!(receipts.has(1) && !receipts.has(2) && !receipts.has(0));
        assert!(receipts.make("\"a\"").is_some());
        python.close();
        assert!(receipts.make("\"a\"").is_none());
    }

    #[test]
    fn an_answer_is_asked_for_by_its_bits() {
        let mut receipt = Receipt::new(&SamplingParams::default(), &[1, -1]);
        let scored = [-0.0, 0.1, f64::NEG_INFINITY].map(|logprob| TokenLogprobs {
            index: 0,
            logprob,
            top_ids: Vec::new(),
            top_logprobs: Vec::new(),
        });
        receipt.add(&scored.map(|one| (5, one)));
        let question: serde_json::Value = serde_json::from_str(&receipt.question(&[7], "stop")).unwrap();
        let answer = &question["receipt"]["answer"];
        let bytes = |name: &str| base64::decode(answer[name].as_str().unwrap()).unwrap();
        assert_eq!(bytes("prompt"), [1, 0, 0, 0, 255, 255, 255, 255]);
        assert_eq!(bytes("tokens"), [7, 0, 0, 0]);
        let logprobs = [0.0_f32, 0.1, f32::NEG_INFINITY].map(f32::to_le_bytes).concat();
        assert_eq!(bytes("logprobs"), logprobs);
    }
}
