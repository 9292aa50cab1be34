//! `minisgl._rust.GatewayText`: the gateway's text module, for comparing it with Python's.

use std::collections::BTreeMap;
use std::sync::Arc;

use minisgl_text::{
    ChatTemplate, ChatTemplateSource, ContentShape, Decoder, TextError, TextStream, Tokenizer, TokenizerSource,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

fn to_python(error: TextError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// See `_rust.pyi`.
#[pyfunction]
pub(crate) fn without_billing_header(system: &str) -> &str {
    minisgl_text::without_billing_header(system)
}

/// See `_rust.pyi`.
#[pyclass(frozen)]
pub(crate) struct GatewayText {
    tokenizer: Arc<Tokenizer>,
}

#[pymethods]
impl GatewayText {
    #[new]
    #[pyo3(signature = (file=None, text=None, cache_bytes=64 << 20))]
    fn new(file: Option<&str>, text: Option<&str>, cache_bytes: usize) -> PyResult<Self> {
        let source = match (file, text) {
            (Some(file), None) => TokenizerSource::File(file.into()),
            (None, Some(text)) => TokenizerSource::Text(text.to_owned()),
            _ => return Err(PyValueError::new_err("either a file or a text")),
        };
        let tokenizer = Tokenizer::new(&source, cache_bytes).map_err(to_python)?;
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
        })
    }

    #[pyo3(signature = (text, add_special_tokens=true, most=usize::MAX))]
    fn encode(&self, py: Python<'_>, text: &str, add_special_tokens: bool, most: usize) -> PyResult<Vec<u32>> {
        py.detach(|| self.tokenizer.encode(text, add_special_tokens, most))
            .map_err(to_python)
    }

    fn token_bytes<'py>(&self, py: Python<'py>, token_id: u32) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.tokenizer.token_bytes(token_id))
    }

    #[getter]
    fn num_ids(&self) -> usize {
        self.tokenizer.num_ids()
    }

    #[getter]
    fn caches(&self) -> bool {
        self.tokenizer.caches()
    }

    fn cache_stats(&self) -> BTreeMap<&'static str, u64> {
        let stats = self.tokenizer.cache_stats();
        BTreeMap::from([
            ("hits", stats.hits),
            ("misses", stats.misses),
            ("bytes_hit", stats.bytes_hit),
            ("bytes_encoded", stats.bytes_encoded),
            ("bytes_held", stats.bytes_held),
        ])
    }

    #[pyo3(signature = (skip_special_tokens=true))]
    fn decoder(&self, skip_special_tokens: bool) -> GatewayDecoder {
        GatewayDecoder {
            inner: self.tokenizer.decoder(skip_special_tokens),
        }
    }

    #[allow(clippy::needless_pass_by_value)] // what Python gives
    #[pyo3(signature = (stop, shown=Vec::new()))]
    fn stream(&self, stop: Vec<String>, shown: Vec<i32>) -> GatewayStream {
        GatewayStream {
            inner: TextStream::new(&self.tokenizer, &stop, &shown),
        }
    }
}

/// See `_rust.pyi`.
#[pyclass]
pub(crate) struct GatewayDecoder {
    inner: Decoder,
}

#[pymethods]
impl GatewayDecoder {
    #[allow(clippy::needless_pass_by_value)] // what Python gives
    fn push(&mut self, ids: Vec<i32>) -> String {
        let mut out = String::new();
        self.inner.push(&ids, &mut out);
        out
    }

    fn place(&mut self, token_id: i32) -> (usize, String) {
        let mut out = String::new();
        let before = self.inner.place(token_id, &mut out);
        (before, out)
    }

    fn flush(&mut self) -> String {
        let mut out = String::new();
        self.inner.flush(&mut out);
        out
    }
}

/// See `_rust.pyi`.
#[pyclass]
pub(crate) struct GatewayStream {
    inner: TextStream,
}

#[pymethods]
impl GatewayStream {
    #[allow(clippy::needless_pass_by_value)] // what Python gives
    #[pyo3(signature = (ids, may_stop=true))]
    fn push(&mut self, ids: Vec<i32>, may_stop: bool) -> String {
        let mut out = String::new();
        self.inner.push(&ids, may_stop, &mut out);
        out
    }

    #[getter]
    fn stopped(&self) -> bool {
        self.inner.stopped()
    }

    fn finish(&mut self) -> String {
        let mut out = String::new();
        self.inner.finish(&mut out);
        out
    }
}

/// See `_rust.pyi`.
#[pyclass(frozen)]
pub(crate) struct GatewayTemplate {
    inner: ChatTemplate,
}

#[pymethods]
impl GatewayTemplate {
    #[new]
    #[pyo3(signature = (source, content, special_tokens=BTreeMap::new()))]
    #[allow(clippy::needless_pass_by_value)] // what Python gives
    fn new(source: String, content: &str, special_tokens: BTreeMap<String, String>) -> PyResult<Self> {
        let content = match content {
            "string" => ContentShape::String,
            "parts" => ContentShape::Parts,
            "either" => ContentShape::Either,
            other => return Err(PyValueError::new_err(format!("content: {other}"))),
        };
        let source = ChatTemplateSource { source, content };
        let inner = ChatTemplate::new(&source, &special_tokens).map_err(to_python)?;
        Ok(Self { inner })
    }

    /// `messages` and `variables` are JSON.
    fn render(&self, py: Python<'_>, messages: &str, variables: &str, add_generation_prompt: bool) -> PyResult<String> {
        let json = |error: serde_json::Error| PyValueError::new_err(format!("not JSON: {error}"));
        let messages: Vec<serde_json::Value> = serde_json::from_str(messages).map_err(json)?;
        let variables = serde_json::from_str(variables).map_err(json)?;
        py.detach(|| self.inner.render(&messages, &variables, add_generation_prompt))
            .map_err(to_python)
    }
}
