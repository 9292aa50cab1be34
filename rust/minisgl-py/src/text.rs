//! `minisgl._rust.TextTokenizer` and its streams: text processing for Python.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use minisgl_text::{Decoder, TextError, TextStream as Stream, Tokenizer, TokenizerSource};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::answer::{Formats, scan};
use crate::arrays::to_numpy;

/// Default size of the encoding cache, in bytes, which speeds up the next turn of a conversation.
const CACHE_BYTES: usize = 64 << 20;

/// Maximum number of ids that are decoded with the GIL held.
const SHORT: usize = 1024;

/// Converts an error to the exceptions of `minisgl.tokenizer.tokenizer`.
fn to_python(py: Python<'_>, error: &TextError) -> PyErr {
    let named = |name: &str| py.import("minisgl.tokenizer.tokenizer")?.getattr(name);
    let made = match error {
        TextError::TooMany { count, at_least } => {
            named("TooManyTokens").and_then(|class| class.call1((count, at_least)))
        }
        TextError::NotEncodable(_) => named("NotEncodable").and_then(|class| class.call1((error.to_string(),))),
        other => return PyValueError::new_err(other.to_string()),
    };
    made.map_or_else(|error| error, PyErr::from_value)
}

/// Runs `work`, without the GIL if it takes long; regaining the GIL is not worth it for a short call.
fn detach_if<T: Send>(py: Python<'_>, takes_long: bool, work: impl FnOnce() -> T + Send) -> T {
    if takes_long { py.detach(work) } else { work() }
}

fn array(py: Python<'_>, ids: Vec<u32>) -> PyResult<Bound<'_, PyAny>> {
    to_numpy(py, ids.into_iter().map(u32::cast_signed))
}

/// Converts ascending character offsets to byte offsets.
fn bytes_of_chars(text: &str, mut offsets: Vec<usize>) -> Vec<usize> {
    if !text.is_ascii() {
        let (mut chars, mut at) = (text.char_indices(), 0);
        for offset in &mut offsets {
            let byte = chars
                .nth(offset.saturating_sub(at))
                .map_or(text.len(), |(byte, _)| byte);
            (at, *offset) = (*offset + 1, byte);
        }
    }
    offsets
}

/// Nesting depth beyond which a value counts as having markers: Python checks it and can report that it is too deep.
const MAX_DEPTH: usize = 1000;

/// Returns true if a string in `value`, as a key or a value, contains a marker.
fn has_markers(tokenizer: &Tokenizer, value: &Bound<'_, PyAny>, depth: usize) -> PyResult<bool> {
    if depth == 0 {
        return Ok(true);
    }
    let within = |value: &Bound<'_, PyAny>| has_markers(tokenizer, value, depth - 1);
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(text.to_str().is_ok_and(|text| tokenizer.has_markers(text))); // invalid Unicode cannot be encoded
    }
    if let Ok(items) = value.cast::<PyDict>() {
        for (key, value) in items {
            if within(&key)? || within(&value)? {
                return Ok(true);
            }
        }
    } else if let Ok(items) = value.cast::<PyList>() {
        for value in items {
            if within(&value)? {
                return Ok(true);
            }
        }
    } else if let Ok(items) = value.cast::<PyTuple>() {
        for value in items {
            if within(&value)? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Returns the text that `write` appends to an empty string.
fn written(write: impl FnOnce(&mut String)) -> String {
    let mut out = String::new();
    write(&mut out);
    out
}

/// Tokenizer of a model. See `_rust.pyi`.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct TextTokenizer {
    pub inner: Arc<Tokenizer>,
}

#[pymethods]
impl TextTokenizer {
    #[new]
    #[pyo3(signature = (file=None, text=None, cache_bytes=CACHE_BYTES))]
    fn new(py: Python<'_>, file: Option<PathBuf>, text: Option<String>, cache_bytes: usize) -> PyResult<Self> {
        let source = match (file, text) {
            (Some(file), None) => TokenizerSource::File(file),
            (None, Some(text)) => TokenizerSource::Text(text),
            _ => return Err(PyValueError::new_err("exactly one of file and text is required")),
        };
        let tokenizer = py.detach(|| Tokenizer::new(&source, cache_bytes));
        Ok(Self {
            inner: Arc::new(tokenizer.map_err(|error| to_python(py, &error))?),
        })
    }

    #[pyo3(signature = (text, add_special_tokens=true, most=None, guards=Vec::new()))]
    fn encode<'py>(
        &self,
        py: Python<'py>,
        text: &str,
        add_special_tokens: bool,
        most: Option<usize>,
        guards: Vec<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let most = most.unwrap_or(usize::MAX);
        let ids = py.detach(|| {
            let guards = bytes_of_chars(text, guards);
            self.inner.encode_guarded(text, &guards, add_special_tokens, most)
        });
        array(py, ids.map_err(|error| to_python(py, &error))?)
    }

    fn has_markers(&self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        has_markers(&self.inner, value, MAX_DEPTH)
    }

    fn guarded(&self, text: &str, guard: &str, kept: Vec<String>) -> String {
        let (mut found, mut end) = (String::with_capacity(text.len()), 0);
        for at in self.inner.guards(text, &kept) {
            found.push_str(&text[end..at]);
            found.push_str(guard);
            end = at;
        }
        found.push_str(&text[end..]);
        found
    }

    #[pyo3(signature = (texts, add_special_tokens=true, most=None))]
    fn encode_batch<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<String>,
        add_special_tokens: bool,
        most: Option<usize>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let most = most.unwrap_or(usize::MAX);
        let batches = py.detach(|| self.inner.encode_batch(&texts, add_special_tokens, most));
        let batches = batches.map_err(|error| to_python(py, &error))?;
        batches.into_iter().map(|ids| array(py, ids)).collect()
    }

    fn encode_pair<'py>(&self, py: Python<'py>, one: &str, other: &str) -> PyResult<Bound<'py, PyAny>> {
        let ids = py.detach(|| self.inner.encode_pair(one, other));
        array(py, ids.map_err(|error| to_python(py, &error))?)
    }

    fn min_tokens(&self, py: Python<'_>, text: &str, most: usize) -> usize {
        detach_if(py, text.len() > most, || self.inner.min_tokens(text, most))
    }

    fn pieces<'a>(&self, text: &'a str, size: usize) -> Vec<&'a str> {
        self.inner.pieces(text, size).collect()
    }

    #[pyo3(signature = (ids, skip_special_tokens=true))]
    fn decode(&self, py: Python<'_>, ids: Vec<i32>, skip_special_tokens: bool) -> PyResult<String> {
        let ids: Vec<u32> = ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect();
        let text = detach_if(py, ids.len() > SHORT, || self.inner.decode(&ids, skip_special_tokens));
        text.map_err(|error| to_python(py, &error))
    }

    fn token_bytes<'py>(&self, py: Python<'py>, token_id: i32) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.inner.token_bytes(token_id))
    }

    fn token_id(&self, text: &str) -> Option<i32> {
        self.inner.token_id(text)
    }

    #[getter]
    fn num_ids(&self) -> usize {
        self.inner.num_ids()
    }

    #[getter]
    fn special_ids(&self) -> Vec<usize> {
        self.inner.special_ids().collect()
    }

    #[getter]
    fn leading_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        array(py, self.inner.leading_ids().to_vec())
    }

    #[getter]
    fn caches(&self) -> bool {
        self.inner.caches()
    }

    fn cache_stats(&self) -> BTreeMap<&'static str, u64> {
        let stats = self.inner.cache_stats();
        BTreeMap::from([
            ("hits", stats.hits),
            ("misses", stats.misses),
            ("bytes_hit", stats.bytes_hit),
            ("bytes_encoded", stats.bytes_encoded),
            ("bytes_held", stats.bytes_held),
        ])
    }

    #[pyo3(signature = (skip_special_tokens=true))]
    fn decoder(&self, skip_special_tokens: bool) -> TextDecoder {
        TextDecoder {
            inner: self.inner.decoder(skip_special_tokens),
        }
    }

    #[pyo3(signature = (stop, shown, min_tokens, formats=None))]
    fn stream(&self, stop: Vec<String>, shown: Vec<i32>, min_tokens: i64, formats: Option<Formats<'_>>) -> TextStream {
        let mut inner = Stream::new(&self.inner, &stop, &shown, min_tokens);
        if let Some(formats) = formats.filter(|_| !stop.is_empty()) {
            inner.search_within(scan(&formats));
        }
        TextStream { inner }
    }
}

/// Incremental decoder of one stream of token ids. See `_rust.pyi`.
#[pyclass(module = "minisgl._rust")]
pub(crate) struct TextDecoder {
    inner: Decoder,
}

#[pymethods]
impl TextDecoder {
    fn push(&mut self, py: Python<'_>, ids: Vec<i32>) -> String {
        written(|out| detach_if(py, ids.len() > SHORT, || self.inner.push(&ids, out)))
    }

    fn place(&mut self, token_id: i32) -> (usize, String) {
        let mut out = String::new();
        let before = self.inner.place(token_id, &mut out);
        (before, out)
    }

    fn flush(&mut self) -> String {
        written(|out| self.inner.flush(out))
    }
}

/// Text of one output as its ids arrive, truncated at the first stop string. See `_rust.pyi`.
#[pyclass(module = "minisgl._rust")]
pub(crate) struct TextStream {
    inner: Stream,
}

#[pymethods]
impl TextStream {
    fn push(&mut self, py: Python<'_>, ids: Vec<i32>) -> String {
        written(|out| _ = detach_if(py, ids.len() > SHORT, || self.inner.push(&ids, out)))
    }

    fn take(&mut self, py: Python<'_>, ids: Vec<i32>, ended: bool, by_token: bool) -> (String, usize) {
        let mut out = String::new();
        let num_used = detach_if(py, ids.len() > SHORT, || {
            self.inner.take(&ids, ended, by_token, &mut out)
        });
        (out, num_used)
    }

    #[getter]
    fn stopped(&self) -> bool {
        self.inner.stopped()
    }

    #[getter]
    fn matched_stop(&self) -> Option<&str> {
        self.inner.matched_stop()
    }
}
