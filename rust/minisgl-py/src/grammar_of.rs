//! Grammars for the CPU engine: the state inside a `GrammarMatcher`, or any Python object, called with the GIL.
//!
//! Invariants: an object that raises becomes a grammar with an error.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use minisgl_cpu::sampling::{Grammar, SharedGrammar};
use pyo3::prelude::*;

use crate::arrays::to_numpy;
use crate::grammar::GrammarMatcher;

/// Returns the grammar of a `minisgl.grammar.slots.Matcher`, or `None` for None.
pub(crate) fn grammar_of(matcher: &Bound<'_, PyAny>) -> PyResult<Option<SharedGrammar>> {
    if matcher.is_none() {
        return Ok(None);
    }
    if let Ok(own) = matcher.cast::<GrammarMatcher>() {
        return Ok(Some(own.get().shared()));
    }
    Ok(Some(Arc::new(Mutex::new(PythonMatcher {
        matcher: matcher.clone().unbind(),
        raised: None,
    }))))
}

/// Matcher that is implemented in Python.
#[derive(Debug)]
struct PythonMatcher {
    matcher: Py<PyAny>,
    raised: Option<String>,
}

impl PythonMatcher {
    fn call(&mut self, work: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<()>) {
        if let Err(error) = Python::attach(|py| work(self.matcher.bind(py))) {
            self.raised.get_or_insert(error.to_string());
        }
    }
}

impl Grammar for PythonMatcher {
    fn restart(&mut self, generated: &[i32]) {
        self.call(|matcher| matcher.call_method1("restart", (generated,)).map(drop));
    }

    fn try_fill(&mut self, mask: &mut [u32], left: Duration) -> bool {
        let mut is_filled = true;
        self.call(|matcher| {
            let words = to_numpy(matcher.py(), vec![0; mask.len()].into_iter())?;
            let done = matcher.call_method1("try_fill", (&words, left.as_secs_f64()))?;
            is_filled = done.is_truthy()?;
            let filled: Vec<i64> = words.call_method0("tolist")?.extract()?;
            for (to, word) in mask.iter_mut().zip(filled) {
                *to = word as u32; // the low half of an int32
            }
            Ok(())
        });
        if self.raised.is_some() {
            mask.fill(u32::MAX); // any sampled token then ends the request
        }
        is_filled
    }

    fn consume(&mut self, token: u32) {
        if self.error().is_none() {
            self.call(|matcher| matcher.call_method1("consume", (token,)).map(drop));
        }
    }

    fn error(&self) -> Option<String> {
        let told = || {
            let found = Python::attach(|py| {
                let text = self.matcher.bind(py).getattr("error")?;
                text.extract::<String>()
            });
            let text = found.unwrap_or_else(|error| error.to_string());
            (!text.is_empty()).then_some(text)
        };
        self.raised.clone().or_else(told)
    }
}
