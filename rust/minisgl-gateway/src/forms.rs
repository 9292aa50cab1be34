//! What the Python server makes of a request's tools and of the form that its answer is to have: the tools as the chat
//! template takes them, and a grammar; for templates that show no tools, a conversation that says what they are
//! (`server/gateway_forms.py`).
//!
//! Invariants: of tools and forms it is asked once for all requests that ask for the same; never by a thread that answers clients; what is
//! remembered is bounded.

use std::sync::{Arc, Mutex};

use minisgl_text::Recent;
use minisgl_text::answer::Tools;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::python::{Python, lock};

/// Most bytes of questions that are remembered.
const KNOWN_BYTES: usize = 4 << 20;

/// What is known of a question.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Form {
    /// For the chat template.
    pub tools: Vec<Value>,
    /// They may be called.
    pub calls: bool,
    /// The caller chose the tool.
    pub named_call: bool,
    /// The answer needs a grammar.
    pub needs_grammar: bool,
    /// It, unless it was asked for without.
    pub grammar: Option<String>,
    /// What the parser knows of the tools.
    #[serde(skip)]
    pub schemas: Arc<Tools>,
}

impl Form {
    fn read(text: &str) -> Option<Form> {
        let mut found: Form = serde_json::from_str(text).ok()?;
        let functions = found.tools.iter().map(|tool| &tool["function"]);
        let schemas = functions.filter_map(|one| {
            let schema = one
                .get("parameters")
                .cloned()
                .unwrap_or_else(|| Value::Object(Map::new()));
            Some((one["name"].as_str()?.to_owned(), schema))
        });
        found.schemas = Arc::new(Tools(schemas.collect()));
        Some(found)
    }
}

/// See the module.
pub struct Forms {
    python: Python,
    known: Mutex<Recent<Arc<Form>>>,
}

impl Forms {
    /// Asks `python`.
    pub fn new(python: Python) -> Forms {
        Forms {
            python,
            known: Mutex::new(Recent::new(KNOWN_BYTES)),
        }
    }

    /// What is known already.
    pub fn find(&self, question: &str) -> Option<Arc<Form>> {
        let mut found = None;
        lock(&self.known).get(question, |form| found = Some(Arc::clone(form)));
        found
    }

    /// Asks, which may take seconds; false: there is no answer.
    pub fn learn(&self, question: String) -> bool {
        let text = self.python.ask(&question);
        let Some(form) = text.and_then(|text| Form::read(&text)) else {
            return false;
        };
        lock(&self.known).put(&question, Arc::new(form), question.len());
        true
    }

    /// What becomes of a conversation for a template that shows no tools. Nothing of it is remembered.
    pub fn explain(&self, question: &str) -> Option<Vec<Value>> {
        #[derive(Deserialize)]
        struct Explained {
            messages: Vec<Value>,
        }
        let text = self.python.ask(question)?;
        serde_json::from_str::<Explained>(&text)
            .ok()
            .map(|found| found.messages)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    const ANSWER: &str = r#"{"tools": [], "calls": false, "named_call": false, "needs_grammar": true, "grammar": "g"}"#;

    fn forms(answer: Option<&'static str>) -> (Forms, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let ask = move |_: &str| {
            count.fetch_add(1, Relaxed);
            answer.map(str::to_owned)
        };
        (Forms::new(Python::new(Box::new(ask))), asked)
    }

    #[test]
    fn a_question_is_asked_once() {
        let (forms, asked) = forms(Some(ANSWER));
        assert!(forms.find("q").is_none() && forms.learn("q".into()));
        assert_eq!(forms.find("q").unwrap().grammar.as_deref(), Some("g"));
        assert_eq!(asked.load(Relaxed), 1);
        forms.python.close();
        assert!(!forms.learn("other".into()) && forms.find("q").is_some());
    }

    #[test]
    fn no_answer_is_not_remembered() {
        for answer in [None, Some("{}")] {
            let (forms, _) = forms(answer);
            assert!(!forms.learn("q".into()) && forms.find("q").is_none());
        }
    }

    #[test]
    fn what_is_remembered_is_bounded_and_what_is_used_stays() {
        let (forms, _) = forms(Some(ANSWER));
        let long = |number: usize| format!("{number}{}", "x".repeat(KNOWN_BYTES / 8));
        for number in 0..20 {
            assert!(forms.learn(long(number)));
            assert!(forms.find(&long(0)).is_some(), "{number}");
        }
        assert!((1..12).all(|number| forms.find(&long(number)).is_none()));
    }
}
