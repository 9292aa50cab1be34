//! Grammars and requests' places in them, by the library llguidance; `minisgl/grammar/matcher.py` is the same on its
//! Python package.
//!
//! Invariants: building and compiling run without the GIL, so that nobody waits for them; a panic of the library is an
//! error, and nothing is printed; an error stays; behind the end of the sequence, which overlap runs one step beyond,
//! ends alone are allowed and anything is taken; bits beyond the engine's vocabulary are never set.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob};
use llguidance::{Matcher, ParserFactory};
use minisgl_cpu::sampling::{Grammar, SharedGrammar};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::Int32s;
use crate::grammar_tokens;

/// Tokens that are allowed together where a text may still grow by so many characters, between the library's own 10 and
/// 30: most tokens have fewer, so that a text near its `maxLength` leaves few to be looked at one by one. This halves
/// the mean time of a mask.
const SHORT_TEXT: &str = r#"[^"\\\x00-\x1F\x7F]{1,15}"#;

/// A tokenizer as the library wants it: once for a model.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct GrammarTokenizer {
    factory: ParserFactory,
    vocab_size: usize,
    eos_ids: Vec<u32>,
}

#[pymethods]
impl GrammarTokenizer {
    #[new]
    fn new(py: Python<'_>, tokenizer_json: &str, vocab_size: usize, eos_ids: Vec<u32>) -> PyResult<Self> {
        let out_of = |id: &u32| *id as usize >= vocab_size;
        if eos_ids.is_empty() || eos_ids.iter().any(out_of) {
            return Err(PyValueError::new_err("eos_ids: none, or beyond the vocabulary"));
        }
        let build = || {
            // One with more ids than the model keeps them: their bits are left out of the masks.
            let tokens = grammar_tokens::read(tokenizer_json, vocab_size, &eos_ids).map_err(anyhow::Error::msg)?;
            let mut slices = SlicedBiasComputer::general_slices();
            slices.push(SHORT_TEXT.to_owned());
            let mut factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &slices)?;
            factory.quiet().limits_mut().verbose_errors = false;
            Ok(factory)
        };
        let factory = py
            .detach(|| catch_unwind(AssertUnwindSafe(build)))
            .map_err(|error| PyValueError::new_err(first_line(&error.to_string())))?;
        Ok(Self {
            factory,
            vocab_size,
            eos_ids,
        })
    }
}

/// A request's place in its grammar.
struct Place {
    matcher: Matcher,
    error: String,
    num_consumed: usize,
    has_ended: bool,
    vocab_size: usize,
    eos_ids: Vec<u32>,
}

/// A `minisgl.grammar.slots.Matcher`; the CPU engine takes the place out of it and asks that, on its own threads.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct GrammarMatcher {
    place: Arc<Mutex<Place>>,
}

impl GrammarMatcher {
    pub fn shared(&self) -> SharedGrammar {
        Arc::clone(&self.place) as SharedGrammar
    }

    fn locked(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl GrammarMatcher {
    #[new]
    fn new(py: Python<'_>, tokenizer: &GrammarTokenizer, grammar: &str) -> Self {
        let factory = &tokenizer.factory;
        let matcher = py.detach(|| {
            let compile = || {
                let init = TopLevelGrammar::from_lark_or_grammar_list(grammar)?;
                factory.create_parser_from_init_default(GrammarInit::Serialized(init))
            };
            let made = || Ok(Matcher::new(compile()));
            catch_unwind(AssertUnwindSafe(made)).unwrap_or_else(|panic| Matcher::new(Err(panic)))
        });
        let mut place = Place {
            matcher,
            error: String::new(),
            num_consumed: 0,
            has_ended: false,
            vocab_size: tokenizer.vocab_size,
            eos_ids: tokenizer.eos_ids.clone(),
        };
        if place.matcher.is_error() {
            place.fail();
        }
        Self {
            place: Arc::new(Mutex::new(place)),
        }
    }

    #[getter]
    fn error(&self) -> String {
        self.locked().error.clone()
    }

    fn restart(&self, generated: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids: Vec<i32> = match generated.extract::<Int32s<'_>>() {
            Ok(ids) => ids.as_slice().to_vec(),
            Err(_) => generated.extract()?,
        };
        self.locked().restart(&ids);
        Ok(())
    }

    fn fill(&self, py: Python<'_>, mask: PyBuffer<i32>) -> PyResult<()> {
        let mut place = self.locked();
        let mut words = vec![0; place.vocab_size.div_ceil(32)];
        place.fill(&mut words);
        let words: Vec<i32> = words.into_iter().map(u32::cast_signed).collect();
        mask.copy_from_slice(py, &words)
    }

    fn consume(&self, token: i64) {
        // one of no vocabulary is of none here
        self.locked().consume(u32::try_from(token).unwrap_or(u32::MAX));
    }
}

impl Grammar for Place {
    fn restart(&mut self, generated: &[i32]) {
        if !self.error.is_empty() {
            return;
        }
        if self.num_consumed > 0 {
            (self.num_consumed, self.has_ended) = (0, false);
            if self.matcher.reset().is_err() {
                self.fail();
            }
        }
        for id in generated {
            self.consume(u32::try_from(*id).unwrap_or(u32::MAX));
        }
    }

    fn fill(&mut self, mask: &mut [u32]) {
        mask.fill(0);
        if let Some(allowed) = self.allowed() {
            for (to, word) in mask.iter_mut().zip(allowed.as_slice()) {
                *to = *word;
            }
            if let (Some(last), rest @ 1..) = (mask.last_mut(), self.vocab_size % 32) {
                *last &= (1 << rest) - 1;
            }
        } else {
            for id in self.eos_ids.iter().map(|id| *id as usize) {
                mask[id / 32] |= 1 << (id % 32);
            }
        }
    }

    fn consume(&mut self, token: u32) {
        if !self.error.is_empty() || self.has_ended {
            return;
        }
        self.num_consumed += 1;
        let is_end = self.eos_ids.contains(&token);
        if is_end && self.matcher.is_stopped() {
            self.has_ended = true; // the grammar left nothing else
        } else if self.matcher.consume_token(token).is_err() {
            self.fail();
        } else if is_end {
            self.has_ended = self.matcher.is_stopped();
        }
    }

    fn error(&self) -> Option<String> {
        (!self.error.is_empty()).then(|| self.error.clone())
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Place behind {} tokens", self.num_consumed)
    }
}

impl Place {
    /// None: an end of sequence alone.
    fn allowed(&mut self) -> Option<SimpleVob> {
        if !self.error.is_empty() || self.has_ended {
            return None;
        }
        let found = self.matcher.compute_mask_or_eos().ok();
        if found.is_none() {
            self.fail();
        }
        found
    }

    fn fail(&mut self) {
        let text = self.matcher.get_error().unwrap_or_default();
        self.error = first_line(&text);
        if self.error.is_empty() {
            "its matcher has failed".clone_into(&mut self.error);
        }
    }
}

/// Why the library does not take a grammar, in its words; empty if it does. It is read, and `num_steps` bytes of an
/// answer are begun with it, each one of `first` if that may come. `lexer_fuel`: see `ParserLimits`.
#[pyfunction]
pub(crate) fn check_grammar(py: Python<'_>, grammar: &str, lexer_fuel: u64, num_steps: usize, first: &[u8]) -> String {
    let limits = ParserLimits {
        initial_lexer_fuel: lexer_fuel,
        verbose_errors: false,
        ..ParserLimits::default()
    };
    let check = || {
        let read = TopLevelGrammar::from_lark_or_grammar_list(grammar)?;
        let (rules, lexemes) = GrammarInit::Serialized(read).to_internal(None, limits.clone())?;
        if (lexemes.render_warnings().iter()).any(|text| text.contains("no tokenizer")) {
            return Ok(String::new()); // it names special tokens: the engine knows them
        }
        let tokens = ApproximateTokEnv::single_byte_env();
        let mut factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &[])?;
        factory.quiet();
        *factory.limits_mut() = limits;
        let read = GrammarInit::Internal(rules, lexemes);
        let mut matcher = Matcher::new(factory.create_parser_from_init_default(read));
        for _ in 0..num_steps {
            let Ok(mask) = matcher.compute_mask_or_eos() else {
                break;
            };
            let may_come = |byte: &u32| mask.is_allowed(*byte);
            let leads = |byte: &u32| first.iter().any(|one| u32::from(*one) == *byte);
            let found = (0..256).filter(may_come).find(leads);
            let Some(next) = found.or_else(|| (0..256).rev().find(may_come)) else {
                break;
            };
            if matcher.is_stopped() || matcher.consume_token(next).is_err() {
                break;
            }
        }
        Ok(matcher.get_error().unwrap_or_default())
    };
    py.detach(|| catch_unwind(AssertUnwindSafe(check)))
        .unwrap_or_else(|error| error.to_string())
}

/// The library appends what its parser holds: the client's own text.
fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim().to_owned()
}
