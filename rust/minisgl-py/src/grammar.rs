//! Grammars (structured output) and each request's state in its grammar, by the library llguidance.
//!
//! Invariants: building, compiling and `prepare` run without the GIL, so that no other thread waits; `try_fill` takes
//! little more than `LONGEST`, for any grammar; a panic of the library becomes an error, and nothing is printed; an
//! error is permanent; after the end of the sequence, which overlap exceeds by one step, only end tokens are allowed
//! and any token is accepted; mask bits beyond the engine's vocabulary are never set.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob};
use llguidance::{CancellationHandle, Matcher, ParserFactory};
use minisgl_cpu::sampling::{Grammar, SharedGrammar};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::Int32s;
use crate::grammar_tokens;

/// Token slice for strings that may grow by that many characters, between the library's own 10 and 30: most tokens are
/// shorter, so that a string near its `maxLength` leaves few to check one by one. Halves the mean time of a mask.
const SHORT_TEXT: &str = r#"[^"\\\x00-\x1F\x7F]{1,15}"#;

/// Tokenizer in llguidance's form, created once for a model.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct GrammarTokenizer {
    factory: ParserFactory,
    vocab_size: usize,
    eos_ids: Vec<u32>,
    max_time: Duration,
}

#[pymethods]
impl GrammarTokenizer {
    /// Builds the tokenizer. `max_time_s`: limit of processor time for all masks of a request, in seconds.
    #[new]
    #[pyo3(signature = (tokenizer_json, vocab_size, eos_ids, max_time_s=30.0))]
    fn new(
        py: Python<'_>,
        tokenizer_json: &str,
        vocab_size: usize,
        eos_ids: Vec<u32>,
        max_time_s: f64,
    ) -> PyResult<Self> {
        let max_time = Duration::try_from_secs_f64(max_time_s)
            .map_err(|error| PyValueError::new_err(format!("max_time_s: {max_time_s}: {error}")))?;
        let out_of = |id: &u32| *id as usize >= vocab_size;
        if eos_ids.is_empty() || eos_ids.iter().any(out_of) {
            return Err(PyValueError::new_err("eos_ids: empty, or outside the vocabulary"));
        }
        let build = || {
            // A tokenizer with more ids than the model keeps them; their bits are left out of the masks.
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
            max_time,
        })
    }
}

/// Time after which a mask computed inside a step with other requests is cancelled; it is recomputed outside of the
/// step.
const LONGEST: Duration = Duration::from_millis(10);
/// Time above which a mask counts as slow: the next ones are computed outside of the step.
const SLOW: Duration = Duration::from_millis(2);
/// Time up to which a mask is computed inline even if the step has spent its time on masks.
const QUICK: Duration = Duration::from_micros(100);
/// Maximum exponent of 2 for the number of masks computed outside of steps after slow ones.
const MAX_DOUBLINGS: u32 = 8;

/// Compiled grammar, and the mask of its first token. Each request gets an independent copy.
struct CompiledGrammar {
    matcher: Mutex<Matcher>,
    first: Vec<u32>,
    error: String,
    num_bytes: usize,
    vocab_size: usize,
    eos_ids: Vec<u32>,
    max_time: Duration,
}

impl CompiledGrammar {
    fn new(tokenizer: &GrammarTokenizer, grammar: &str) -> Self {
        let mut num_bytes = grammar.len();
        let mut compile = || {
            let init = TopLevelGrammar::from_lark_or_grammar_list(grammar)?;
            let parser = (tokenizer.factory).create_parser_from_init_default(GrammarInit::Serialized(init))?;
            num_bytes += parser.parser.lexer_stats().num_bytes;
            Ok(parser)
        };
        let made = || Ok(Matcher::new(compile()).into_cancellable());
        let mut matcher = catch_unwind(AssertUnwindSafe(made)).unwrap_or_else(|panic| Matcher::new(Err(panic)));
        let mask = matcher.compute_mask_or_eos();
        let error = mask.as_ref().err().map_or_else(String::new, |_| error_of(&matcher));
        let (vocab_size, eos_ids) = (tokenizer.vocab_size, tokenizer.eos_ids.clone());
        Self {
            first: mask.map_or_else(|_| Vec::new(), |mask| words(&mask, vocab_size)),
            matcher: Mutex::new(matcher),
            error,
            num_bytes,
            vocab_size,
            eos_ids,
            max_time: tokenizer.max_time,
        }
    }

    fn copy(&self) -> Matcher {
        self.matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()
    }
}

/// State of one request in its grammar.
struct MatcherState {
    start: Arc<CompiledGrammar>,
    matcher: Option<Matcher>, // `None` after a cancelled mask: copied from the start again
    tokens: Vec<u32>,
    num_taken: usize,       // number of `tokens` that `matcher` has consumed
    mask: Option<Vec<u32>>, // mask after `tokens`, if computed
    has_ended: bool,
    error: String,
    last: Duration,   // time of the last mask
    num_outside: u32, // masks yet to be computed outside
    num_slow: u32,    // slow inline masks so far
    time: Duration,
}

/// Grammar state of a request: a `minisgl.grammar.slots.Matcher`. The CPU engine uses the inner state on its threads.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct GrammarMatcher {
    state: Arc<Mutex<MatcherState>>,
}

impl GrammarMatcher {
    pub fn shared(&self) -> SharedGrammar {
        Arc::clone(&self.state) as SharedGrammar
    }

    fn locked(&self) -> MutexGuard<'_, MatcherState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(start: Arc<CompiledGrammar>) -> Self {
        Self {
            state: Arc::new(Mutex::new(MatcherState::new(start))),
        }
    }

    /// Lets `fill` compute the mask of the next token, and copies it to `mask`.
    fn filled<T>(
        &self,
        py: Python<'_>,
        mask: &PyBuffer<i32>,
        fill: impl FnOnce(&mut MatcherState, &mut [u32]) -> T,
    ) -> PyResult<T> {
        let mut state = self.locked();
        let mut words = vec![0; state.start.vocab_size.div_ceil(32)];
        let done = fill(&mut state, &mut words);
        let words: Vec<i32> = words.into_iter().map(u32::cast_signed).collect();
        mask.copy_from_slice(py, &words)?;
        Ok(done)
    }
}

#[pymethods]
impl GrammarMatcher {
    #[new]
    fn new(py: Python<'_>, tokenizer: &GrammarTokenizer, grammar: &str) -> Self {
        Self::of(Arc::new(py.detach(|| CompiledGrammar::new(tokenizer, grammar))))
    }

    #[getter]
    fn error(&self) -> String {
        self.locked().error.clone()
    }

    #[getter]
    fn num_bytes(&self) -> usize {
        self.locked().start.num_bytes
    }

    fn copy(&self, py: Python<'_>) -> Self {
        py.detach(|| {
            let start = Arc::clone(&self.locked().start);
            Self::of(start)
        })
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
        self.filled(py, &mask, |state, words| {
            state.prepare();
            state.write(words);
        })
    }

    fn try_fill(&self, py: Python<'_>, mask: PyBuffer<i32>, left_s: f64) -> PyResult<bool> {
        let left = Duration::try_from_secs_f64(left_s).unwrap_or_default();
        self.filled(py, &mask, |state, words| state.try_fill(words, left))
    }

    fn prepare(&self, py: Python<'_>) {
        py.detach(|| self.locked().prepare());
    }

    fn consume(&self, token: i64) {
        // an invalid token becomes an id outside of every vocabulary
        self.locked().consume(u32::try_from(token).unwrap_or(u32::MAX));
    }
}

impl Grammar for MatcherState {
    fn restart(&mut self, generated: &[i32]) {
        if !self.error.is_empty() {
            return;
        }
        let ids = || generated.iter().map(|id| u32::try_from(*id).unwrap_or(u32::MAX));
        let known = self.tokens.len();
        if known > generated.len() || !ids().zip(&self.tokens).all(|(id, known)| id == *known) {
            let time = self.time;
            *self = Self::new(Arc::clone(&self.start));
            self.time = time;
        }
        for id in ids().skip(self.tokens.len()) {
            self.consume(id);
        }
    }

    fn try_fill(&mut self, mask: &mut [u32], left: Duration) -> bool {
        let is_known = self.mask.is_some() || self.has_ended || !self.error.is_empty();
        let is_late = !is_known
            && (self.num_outside > 0
                || self.matcher.is_none()
                || (left.is_zero() && self.last > QUICK)
                || !self.compute_mask(Some(LONGEST)));
        self.write(mask);
        !is_late
    }

    fn consume(&mut self, token: u32) {
        if !self.error.is_empty() || self.has_ended {
            return;
        }
        self.mask = None;
        self.tokens.push(token);
        if self.start.eos_ids.contains(&token) {
            self.end();
        }
    }

    fn error(&self) -> Option<String> {
        (!self.error.is_empty()).then(|| self.error.clone())
    }
}

impl fmt::Debug for MatcherState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "MatcherState after {} tokens", self.tokens.len())
    }
}

impl MatcherState {
    fn new(start: Arc<CompiledGrammar>) -> Self {
        Self {
            matcher: Some(start.copy()),
            tokens: Vec::new(),
            num_taken: 0,
            mask: Some(start.first.clone()),
            has_ended: false,
            error: start.error.clone(),
            last: Duration::ZERO,
            num_outside: 0,
            num_slow: 0,
            time: Duration::ZERO,
            start,
        }
    }

    /// Computes the next mask, however long that takes.
    fn prepare(&mut self) {
        if self.mask.is_none() && !self.has_ended && self.error.is_empty() {
            self.compute_mask(None);
        }
    }

    /// Writes the computed mask, or one that allows only end tokens.
    fn write(&self, mask: &mut [u32]) {
        mask.fill(0);
        match &self.mask {
            Some(found) if self.error.is_empty() && !self.has_ended => mask.copy_from_slice(found),
            _ => {
                for id in self.start.eos_ids.iter().map(|id| *id as usize) {
                    mask[id / 32] |= 1 << (id % 32);
                }
            }
        }
    }

    /// Computes the mask after `tokens`, or sets the error. Returns false if it was cancelled after `limit`.
    fn compute_mask(&mut self, limit: Option<Duration>) -> bool {
        let began = Instant::now();
        let cpu = limit.is_none().then(processor_time).flatten();
        let mut matcher = self.matcher.take().unwrap_or_else(|| self.start.copy());
        let alarm = limit.map(|limit| Alarm::new(&matcher, began + limit));
        let consumed = (self.tokens[self.num_taken..].iter()).try_for_each(|token| matcher.consume_token(*token));
        let mask = consumed.and_then(|()| matcher.compute_mask_or_eos());
        drop(alarm);
        self.last = began.elapsed();
        let used = cpu.and_then(|before| processor_time()?.checked_sub(before));
        self.time += used.unwrap_or(self.last);
        let is_given_up = matcher.is_cancelled();
        if limit.is_none() {
            self.num_outside -= u32::from(self.num_outside > 0 && self.last <= SLOW);
        } else if is_given_up || self.last > SLOW {
            self.num_slow = MAX_DOUBLINGS.min(self.num_slow + 1);
            self.num_outside = 1 << self.num_slow;
        }
        if is_given_up {
            self.num_taken = 0;
            return false;
        }
        match mask {
            Ok(mask) => self.mask = Some(words(&mask, self.start.vocab_size)),
            Err(_) => self.error = error_of(&matcher),
        }
        if self.error.is_empty() && self.time > self.start.max_time {
            let limit = self.start.max_time.as_secs_f64();
            self.error = format!("its grammar took more than {limit} s of processor time, the limit of a request");
        }
        self.num_taken = self.tokens.len();
        self.matcher = Some(matcher);
        true
    }

    /// Handles the end of the sequence, which is the last of `tokens`.
    fn end(&mut self) {
        let mut matcher = self.matcher.take().unwrap_or_else(|| self.start.copy());
        for token in &self.tokens[self.num_taken..] {
            if matcher.is_stopped() {
                break; // the grammar allows nothing else
            }
            if matcher.consume_token(*token).is_err() {
                self.error = error_of(&matcher);
                break;
            }
        }
        self.num_taken = self.tokens.len();
        self.has_ended = self.error.is_empty() && matcher.is_stopped();
        self.matcher = Some(matcher);
    }
}

/// Returns the mask words, limited to the engine's vocabulary.
fn words(found: &SimpleVob, vocab_size: usize) -> Vec<u32> {
    let mut words = vec![0; vocab_size.div_ceil(32)];
    for (to, word) in words.iter_mut().zip(found.as_slice()) {
        *to = *word;
    }
    if let (Some(last), rest @ 1..) = (words.last_mut(), vocab_size % 32) {
        *last &= (1 << rest) - 1;
    }
    words
}

fn error_of(matcher: &Matcher) -> String {
    let message = first_line(&matcher.get_error().unwrap_or_default());
    if message.is_empty() {
        return "its grammar matcher failed".to_owned();
    }
    message
}

/// Returns the processor time of this thread, or `None` if the system does not report it.
fn processor_time() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}

/// Guard that cancels a matcher at a given time, unless it is dropped before.
struct Alarm(Option<u64>);

/// All alarms that are set, and the thread that checks them.
#[derive(Default)]
struct Alarms {
    set: Mutex<Vec<(u64, Instant, CancellationHandle)>>,
    last: AtomicU64,
    thread: OnceLock<Option<Thread>>,
}

static ALARMS: LazyLock<Alarms> = LazyLock::new(Alarms::default);

impl Alarms {
    /// Interval of the checks: masks are short, and no thread is woken for a single one.
    const EVERY: Duration = Duration::from_millis(2);
    /// Number of checks without any alarm after which the thread sleeps.
    const IDLE: u32 = 500;

    fn locked(&self) -> MutexGuard<'_, Vec<(u64, Instant, CancellationHandle)>> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self) {
        let mut idle = 0;
        loop {
            let now = Instant::now();
            let set = self.locked();
            for (_, _, matcher) in set.iter().filter(|(_, at, _)| *at <= now) {
                matcher.cancel();
            }
            idle = if set.is_empty() { idle + 1 } else { 0 };
            drop(set);
            if idle < Self::IDLE {
                std::thread::sleep(Self::EVERY);
            } else {
                std::thread::park();
                idle = 0;
            }
        }
    }
}

impl Alarm {
    fn new(matcher: &Matcher, at: Instant) -> Self {
        let start = || {
            let thread = std::thread::Builder::new().name("grammar-alarm".to_owned());
            let spawned = thread.spawn(|| ALARMS.watch());
            spawned.ok().map(|handle| handle.thread().clone())
        };
        Self(matcher.cancellation_handle().map(|handle| {
            let number = ALARMS.last.fetch_add(1, Ordering::Relaxed);
            ALARMS.locked().push((number, at, handle));
            if let Some(thread) = ALARMS.thread.get_or_init(start) {
                thread.unpark();
            }
            number
        }))
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Some(number) = self.0 {
            ALARMS.locked().retain(|one| one.0 != number);
        }
    }
}

/// Returns llguidance's error for a grammar; empty if it is accepted. Compiles it and generates `num_steps` bytes,
/// preferring one of `first`. `lexer_fuel`: see `ParserLimits`.
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
            return Ok(String::new()); // special tokens are checked by the engine
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
            let preferred = (0..256).filter(may_come).find(leads);
            let Some(next) = preferred.or_else(|| (0..256).rev().find(may_come)) else {
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

/// Returns the first line of a library error. The rest has parser state, with the client's own text.
fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim().to_owned()
}
