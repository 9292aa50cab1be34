//! `minisgl._rust.AnswerParser`: parsing of a model's output into content, reasoning and tool calls; and its formats.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use minisgl_text::answer::{
    self, AnswerParser as Parser, ContentScan as Scan, End, Part, THINKING, TOOL_FORMATS, Tools,
};
use minisgl_text::tools::{Callable, OutputGrammar};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Format in which models write tool calls. See `_rust.pyi`.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct ToolFormat {
    inner: &'static answer::ToolFormat,
}

#[pymethods]
impl ToolFormat {
    /// Finds a format by `name`, or by chat template and tokens if that is "auto".
    #[new]
    fn new(name: &str, template: &str, token_id: &Bound<'_, PyAny>) -> PyResult<Self> {
        let has_token = |text: &str| token_id.call1((text,)).is_ok_and(|found| !found.is_none());
        let inner = answer::ToolFormat::find(name, template, has_token)
            .ok_or_else(|| PyValueError::new_err(format!("unknown tool-call format: {name}")))?;
        Ok(Self { inner })
    }

    #[getter]
    fn name(&self) -> &'static str {
        self.inner.name
    }

    #[getter]
    fn place(&self) -> usize {
        let index = TOOL_FORMATS.iter().position(|one| std::ptr::eq(one, self.inner));
        index.unwrap_or(TOOL_FORMATS.len()) // always from the table; else the gateway reports an unknown format
    }

    #[getter]
    fn markers(&self) -> Vec<&'static str> {
        self.inner.markers()
    }

    fn explained(&self) -> String {
        self.inner.explained()
    }

    fn written(&self, name: &str, arguments: &str) -> String {
        self.inner.written(name, arguments)
    }

    #[staticmethod]
    fn names() -> Vec<&'static str> {
        all_names(TOOL_FORMATS.iter().map(|one| (one.name, one.aliases)))
    }
}

/// Returns all names and aliases, sorted.
fn all_names(named: impl Iterator<Item = (&'static str, &'static [&'static str])>) -> Vec<&'static str> {
    let names = named.flat_map(|(name, aliases)| aliases.iter().copied().chain([name]));
    let names: BTreeSet<_> = names.collect();
    names.into_iter().collect()
}

/// Format of a model's reasoning: the markers around it. See `_rust.pyi`.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct Thinking {
    inner: &'static answer::Thinking,
    #[pyo3(get)]
    is_open: Option<bool>,
}

#[pymethods]
impl Thinking {
    /// Finds a format by `name`, or by chat template for "auto". `None` for "none", or if the model has none.
    #[staticmethod]
    fn find(name: &str, template: &str) -> PyResult<Option<Self>> {
        let inner = match name {
            "none" => None,
            "auto" => answer::Thinking::detect(template),
            name => Some(
                answer::Thinking::named(name)
                    .ok_or_else(|| PyValueError::new_err(format!("unknown reasoning format: {name}")))?,
            ),
        };
        let is_open = inner.and_then(|one| one.is_open.then_some(true));
        Ok(inner.map(|inner| Self { inner, is_open }))
    }

    fn opened(&self, is_open: Option<bool>) -> Self {
        let inner = self.inner;
        Self { inner, is_open }
    }

    #[getter]
    fn name(&self) -> &'static str {
        self.inner.name
    }

    #[getter]
    fn markers(&self) -> &'static [&'static str] {
        self.inner.tokens
    }

    #[getter]
    fn begin(&self) -> &'static str {
        self.inner.begin
    }

    #[getter]
    fn end(&self) -> &'static str {
        self.inner.end
    }

    #[staticmethod]
    fn names() -> Vec<&'static str> {
        all_names(THINKING.iter().map(|one| (one.name, one.aliases)))
    }
}

/// Tools of a request, parsed once for all of its choices.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct AnswerTools {
    inner: Arc<Tools>,
}

#[pymethods]
impl AnswerTools {
    /// Parses `schemas`, a JSON object of parameter schemas by tool name.
    #[new]
    fn new(schemas: &str) -> PyResult<Self> {
        let schemas: HashMap<String, serde_json::Value> =
            serde_json::from_str(schemas).map_err(|error| PyValueError::new_err(format!("schemas: {error}")))?;
        Ok(Self {
            inner: Arc::new(Tools(schemas)),
        })
    }
}

/// Incremental parser of one model output. See `_rust.pyi`.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct AnswerParser {
    inner: Mutex<Parser>,
}

#[pymethods]
impl AnswerParser {
    #[new]
    fn new(
        format: Option<&ToolFormat>,
        thinking: Option<&Thinking>,
        tools: Option<&AnswerTools>,
        new_id: Py<PyAny>,
    ) -> Self {
        let draw = move |len: usize, alphabet: &str| {
            Python::attach(|py| {
                let drawn = new_id
                    .call1(py, (len, alphabet))
                    .and_then(|id| id.extract::<String>(py));
                drawn.unwrap_or_else(|error| {
                    error.write_unraisable(py, None);
                    String::new()
                })
            })
        };
        let inner = Parser::new(
            format.map(|one| one.inner),
            thinking.map(|one| (one.inner, one.is_open)),
            tools.map_or_else(Arc::default, |one| Arc::clone(&one.inner)),
            Box::new(draw),
        );
        Self {
            inner: Mutex::new(inner),
        }
    }

    fn push<'py>(&self, py: Python<'py>, text: &str) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let parts = self.inner.lock().unwrap_or_else(PoisonError::into_inner).push(text);
        to_python(py, parts)
    }

    #[getter]
    fn broken(&self) -> Vec<usize> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).broken()
    }

    #[pyo3(signature = (cut=false))]
    fn finish<'py>(&self, py: Python<'py>, cut: bool) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let end = if cut { End::Cut } else { End::Whole };
        let parts = self.inner.lock().unwrap_or_else(PoisonError::into_inner).finish(end);
        to_python(py, parts)
    }
}

/// Formats by which an output is parsed: tool calls, reasoning, and the request's tools.
pub(crate) type Formats<'py> = (
    Option<PyRef<'py, ToolFormat>>,
    Option<PyRef<'py, Thinking>>,
    Option<PyRef<'py, AnswerTools>>,
);

pub(crate) fn scan((format, thinking, tools): &Formats<'_>) -> Scan {
    let none = Arc::default();
    Scan::new(
        format.as_ref().map(|one| one.inner),
        thinking.as_ref().map(|one| (one.inner, one.is_open)),
        tools.as_ref().map_or(&none, |one| &one.inner),
    )
}

/// Incremental split of one output into content and the rest. See `_rust.pyi`.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct ContentScan {
    inner: Mutex<Scan>,
}

#[pymethods]
impl ContentScan {
    #[new]
    fn new(formats: Formats<'_>) -> Self {
        let inner = Mutex::new(scan(&formats));
        Self { inner }
    }

    fn push(&self, text: &str, ended: bool) -> Vec<(String, bool)> {
        let mut scan = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        scan.push(text, ended)
    }
}

/// Converts parts of an output to the classes of `minisgl.parsers.api`.
fn to_python(py: Python<'_>, parts: Vec<Part>) -> PyResult<Vec<Bound<'_, PyAny>>> {
    static CLASSES: PyOnceLock<[Py<PyAny>; 4]> = PyOnceLock::new();
    if parts.is_empty() {
        return Ok(Vec::new());
    }
    let classes = CLASSES.get_or_try_init(py, || {
        let module = py.import("minisgl.parsers.api")?;
        let class = |name: &str| Ok::<_, PyErr>(module.getattr(name)?.unbind());
        Ok::<_, PyErr>([
            class("Text")?,
            class("Reasoning")?,
            class("CallBegun")?,
            class("CallArguments")?,
        ])
    })?;
    let [content, reasoning, begun, arguments] = classes.each_ref().map(|one| one.bind(py));
    let made = parts.into_iter().map(|part| match part {
        Part::Text(text) => content.call1((text,)),
        Part::Reasoning(text) => reasoning.call1((text,)),
        Part::CallBegun { index, id, name } => begun.call1((index, id, name)),
        Part::CallArguments(index, text) => arguments.call1((index, text)),
    });
    made.collect()
}

/// Returns the grammar rules of an output that may call tools. See `_rust.pyi`.
#[pyfunction]
#[allow(clippy::too_many_arguments)] // arguments from Python
pub(crate) fn answer_rules(
    format: Option<&ToolFormat>,
    thinking: Option<&Thinking>,
    token_id: &Bound<'_, PyAny>,
    body: Option<&str>,
    tools: Option<Vec<(String, String, Option<String>)>>,
    required: bool,
    many: bool,
    budget: Option<u32>,
) -> PyResult<String> {
    let mut callable = Vec::new();
    for (name, arguments, schema) in tools.iter().flatten() {
        let schema = schema.as_deref().map(serde_json::from_str).transpose();
        callable.push(Callable {
            name: name.clone(),
            arguments: arguments.clone(),
            schema: schema.map_err(|error| PyValueError::new_err(format!("{name}: {error}")))?,
        });
    }
    let number = |text: &str| token_id.call1((text,)).ok()?.extract::<Option<u32>>().ok()?;
    let answers = OutputGrammar {
        format: format.map(|one| one.inner),
        thinking: thinking.map(|one| (one.inner, one.is_open)),
        token_id: &number,
        body,
        tools: tools.is_some().then_some(callable.as_slice()),
        required,
        many,
        budget,
    };
    Ok(answers.rules())
}
