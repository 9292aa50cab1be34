//! `minisgl._rust.CpuEngine`: the CPU engine behind one call for each step.
//!
//! Invariants: arrays are read while the GIL is held, forward passes run without it; one step at a time.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use minisgl_cpu::error::Fault;
use minisgl_cpu::load::{Settings, load, operations};
use minisgl_cpu::model::PARTS;
use minisgl_cpu::sampling::{Pooling, TokenLogprobs};
use minisgl_cpu::threads::beside_others;
use minisgl_cpu::weights::Keeping;
use minisgl_cpu::{Adapter, Ahead, Engine, Error, Features, HeadStep, Heads, Pair, Sampled, Step};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{IntoPyDict, PyBytes, PyDict, PyList};

use crate::arrays::{Int32s, to_numpy};
use crate::page_store::PageStore;
use crate::sampling::{binding_from_python, image_from_python, images_from_python};

/// CPU engine with a loaded model.
#[pyclass(module = "minisgl._rust")]
pub(crate) struct CpuEngine {
    /// The engine; `None` once closed. Boxed, because Python aligns objects to 16 bytes, and an engine needs 128.
    inner: Mutex<Option<Box<Engine>>>,
    keeping: Mutex<Option<Keeping>>,
    closing: AtomicBool,
    mapped: bool,
}

/// Converts an engine error: a failed step to `RuntimeError`, others to `ValueError` with the arguments (fault, text).
pub(crate) fn to_python(error: &Error) -> PyErr {
    let fault = match error.fault {
        Fault::Step => return PyRuntimeError::new_err(error.to_string()),
        Fault::Unsupported => "unsupported",
        Fault::File => "file",
        Fault::Setting => "setting",
    };
    PyValueError::new_err((fault, error.to_string()))
}

/// Returns the value of `result`, or its error as a Python exception.
fn checked<T>(result: Result<T, Error>) -> PyResult<T> {
    result.map_err(|error| to_python(&error))
}

impl CpuEngine {
    fn locked(&self) -> MutexGuard<'_, Option<Box<Engine>>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, work: impl FnOnce(&mut Engine) -> T) -> PyResult<T> {
        self.locked().as_deref_mut().map(work).ok_or_else(closed)
    }

    fn waiting(&self) -> MutexGuard<'_, Option<Keeping>> {
        self.keeping.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn closed() -> PyErr {
    PyRuntimeError::new_err("the engine is closed")
}

/// Features of an image, which stay in the cache of the CPU engine while this object lives.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct ImageFeatures(
    /// Held, never read.
    #[expect(dead_code)]
    Features,
);

/// LoRA adapter, prepared for the CPU engine.
#[pyclass(module = "minisgl._rust")]
pub(crate) struct CpuAdapter {
    inner: Mutex<Option<Adapter>>,
}

impl CpuAdapter {
    fn take(&self) -> Option<Adapter> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl CpuAdapter {
    /// Prepares an adapter for the model of `settings` (see `CpuEngine`). `pairs`: layer, module such as "q_proj", A
    /// and B as bytes of float32.
    #[new]
    fn new(
        py: Python<'_>,
        settings: &str,
        pairs: Vec<(usize, String, PyBackedBytes, PyBackedBytes)>,
    ) -> PyResult<Self> {
        let settings = checked(Settings::parse(settings))?;
        let made = py.detach(|| {
            let pairs: Vec<Pair> = pairs
                .into_iter()
                .map(|(layer, part, a, b)| Pair {
                    layer,
                    part,
                    a: float32s(&a),
                    b: float32s(&b),
                })
                .collect();
            Adapter::new(&settings.model, &pairs)
        });
        let inner = Mutex::new(Some(checked(made)?));
        Ok(Self { inner })
    }
}

fn float32s(bytes: &[u8]) -> Vec<f32> {
    let (numbers, _) = bytes.as_chunks::<4>();
    numbers.iter().map(|one| f32::from_le_bytes(*one)).collect()
}

/// Step of an output head: kind, weight, bias, epsilon.
type HeadStepArgs = (String, PyBackedBytes, PyBackedBytes, f32);

fn head_step((kind, weight, bias, eps): HeadStepArgs) -> PyResult<HeadStep> {
    Ok(match kind.as_str() {
        "linear" => HeadStep::Linear(float32s(&weight), float32s(&bias)),
        "layer_norm" => HeadStep::LayerNorm(float32s(&weight), float32s(&bias), eps),
        "tanh" => HeadStep::Tanh,
        "gelu" => HeadStep::GeluErf,
        other => return Err(PyValueError::new_err(("setting", format!("head step: {other}")))),
    })
}

#[pymethods]
impl CpuEngine {
    /// Loads a model. `settings`: JSON of `minisgl_cpu::load::Settings`. `say(done, total)` is called during the load.
    #[new]
    fn new(py: Python<'_>, settings: &str, say: Py<PyAny>) -> PyResult<Self> {
        let settings = checked(Settings::parse(settings))?;
        let progress = |done: usize, total: usize| {
            // an error of the progress callback does not stop the load
            let _ = Python::attach(|py| say.call1(py, (done, total)));
        };
        let loaded = checked(py.detach(|| load(&settings, &progress)))?;
        Ok(Self {
            inner: Mutex::new(Some(Box::new(loaded.engine))),
            keeping: Mutex::new(loaded.keeping),
            closing: AtomicBool::new(false),
            mapped: loaded.mapped,
        })
    }

    /// Returns the bytes of one KV page in all layers.
    #[staticmethod]
    fn page_bytes(settings: &str) -> PyResult<usize> {
        checked(Settings::parse(settings).and_then(|settings| settings.page_bytes()))
    }

    /// Returns the bytes of memory in which an image of `tokens` tokens is computed; 0 without a vision tower.
    #[staticmethod]
    fn image_bytes(settings: &str, tokens: usize) -> PyResult<usize> {
        checked(Settings::parse(settings).and_then(|settings| settings.image_bytes(tokens)))
    }

    /// Returns the bytes of one sequence's recurrent state; 0 for a model without.
    #[staticmethod]
    fn state_bytes(settings: &str) -> PyResult<usize> {
        let settings = checked(Settings::parse(settings))?;
        Ok(settings.state_bytes())
    }

    /// Returns the operations of a forward pass, one a line.
    #[staticmethod]
    fn operations(py: Python<'_>, settings: &str) -> PyResult<String> {
        let settings = checked(Settings::parse(settings))?;
        checked(py.detach(|| operations(&settings)))
    }

    /// Returns properties of the engine: isa, threads, kinds (name, bytes), weight_bytes, mapped (weights are a mapped
    /// file); bytes read and multiplications for a decoded token (token_bytes, token_products); those of them that a
    /// prompt needs once (head_products); KV bytes of a token (kv_bytes); whether it has experts and windows
    /// (sliding-window attention).
    fn about<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let guard = self.locked();
        let engine = guard.as_ref().ok_or_else(closed)?;
        let about = PyDict::new(py);
        let weights = &engine.decoder().weights;
        let kinds: Vec<(String, usize)> = weights
            .kinds()
            .into_iter()
            .map(|(kind, bytes)| (kind.name().to_lowercase(), bytes))
            .collect();
        about.set_item("isa", engine.decoder().kernels.isa().name())?;
        about.set_item("threads", engine.threads())?;
        about.set_item("kinds", kinds)?;
        about.set_item("weight_bytes", engine.weight_bytes())?;
        about.set_item("mapped", self.mapped)?;
        let (bytes, products) = weights.of_a_token();
        about.set_item("token_bytes", bytes)?;
        about.set_item("token_products", products)?;
        about.set_item("head_products", weights.head.n() * weights.head.k())?;
        about.set_item("kv_bytes", engine.kv_token_bytes())?;
        about.set_item("experts", engine.decoder().config.has_experts())?;
        about.set_item("windows", engine.decoder().config.has_windows())?;
        Ok(about)
    }

    /// Returns the seconds of all forward passes by part; empty without the setting `timed`.
    fn times<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let times = self.with(|engine| engine.times())?.unwrap_or_default();
        PARTS.iter().zip(times).into_py_dict(py)
    }

    /// Sets the output heads: the steps of the embedding head, and for scores the pooling and the steps. A step is
    /// (kind, weight, bias, epsilon), arrays as bytes of float32.
    fn set_heads(&self, embedding: Vec<HeadStepArgs>, score: Option<(String, Vec<HeadStepArgs>)>) -> PyResult<()> {
        let steps = |given: Vec<HeadStepArgs>| given.into_iter().map(head_step).collect::<PyResult<Vec<_>>>();
        let score = score.map(|(pooling, given)| -> PyResult<_> {
            let kind = if pooling == "mean" {
                Pooling::Mean
            } else if pooling == "last" {
                Pooling::Last
            } else {
                Pooling::First
            };
            Ok((kind, steps(given)?))
        });
        let heads = Heads {
            embedding: steps(embedding)?,
            score: score.transpose()?,
        };
        checked(self.with(|engine| engine.set_heads(heads))?)
    }

    /// Adds an adapter under the id `number`, from the next step on. `adapter` cannot be used again.
    fn add_adapter(&self, number: u32, adapter: &CpuAdapter) -> PyResult<()> {
        let used = || PyValueError::new_err(("setting", "the adapter was added already"));
        let made = adapter.take().ok_or_else(used)?;
        self.with(|engine| engine.adapters().add(number, made)).map(drop)
    }

    /// Removes the adapter with the id `number`.
    fn remove_adapter(&self, number: u32) {
        let _ = self.with(|engine| engine.adapters().remove(number)); // a closed engine has no adapters
    }

    /// Writes full KV pages to `store` from now on, and loads pages staged there.
    fn keep(&self, store: &PageStore) -> PyResult<()> {
        self.with(|engine| engine.keep(store.shared()))
    }

    /// Runs a step: its arrays without padding rows (2-D ones flat), slot assignments, freed slots. Returns (tokens by
    /// row, log probabilities or None, prompt log probabilities, prompt embeddings as bytes, failures by row).
    #[pyo3(signature = (input_ids, positions, out_loc, req_slots, seq_lens, extend_lens, sample_rows,
                        page_table_updates, page_ids, num_decode_rows, bindings, freed,
                        state_begins, state_saves, page_loads=None))]
    #[allow(clippy::too_many_arguments)] // the arrays of a step
    fn step<'py>(
        &self,
        py: Python<'py>,
        input_ids: Int32s<'py>,
        positions: Int32s<'py>,
        out_loc: Int32s<'py>,
        req_slots: Int32s<'py>,
        seq_lens: Int32s<'py>,
        extend_lens: Int32s<'py>,
        sample_rows: Int32s<'py>,
        page_table_updates: Int32s<'py>,
        page_ids: Int32s<'py>,
        num_decode_rows: usize,
        bindings: Vec<Bound<'py, PyAny>>,
        freed: Int32s<'py>,
        state_begins: Int32s<'py>,
        state_saves: Int32s<'py>,
        page_loads: Option<Int32s<'py>>,
    ) -> PyResult<StepResult<'py>> {
        let step = Step {
            input_ids: input_ids.as_slice().to_vec(),
            positions: positions.as_slice().to_vec(),
            out_loc: out_loc.as_slice().to_vec(),
            req_slots: req_slots.as_slice().to_vec(),
            seq_lens: seq_lens.as_slice().to_vec(),
            extend_lens: extend_lens.as_slice().to_vec(),
            sample_rows: sample_rows.as_slice().to_vec(),
            page_table_updates: page_table_updates.as_slice().as_chunks().0.to_vec(),
            page_ids: page_ids.as_slice().to_vec(),
            num_decode_rows,
            freed: freed.as_slice().to_vec(),
            page_loads: page_loads.map_or_else(Vec::new, |loads| loads.as_slice().as_chunks().0.to_vec()),
            state_begins: state_begins.as_slice().as_chunks().0.to_vec(),
            state_saves: state_saves.as_slice().as_chunks().0.to_vec(),
            added: Vec::new(),
        };
        let bindings = bindings.iter().map(binding_from_python).collect::<PyResult<Vec<_>>>()?;
        let sampled = py.detach(|| self.with(|engine| engine.step(&step, bindings)))?;
        step_to_python(py, checked(sampled)?)
    }

    /// Runs the vision tower for about `slice_s` seconds over an image whose request waits. Returns whether it has
    /// ended, and the features: while they are held, they stay in the cache. `begins`: the image is its request's
    /// first.
    fn see_ahead(
        &self,
        py: Python<'_>,
        image: &Bound<'_, PyAny>,
        begins: bool,
        slice_s: f64,
    ) -> PyResult<(bool, Option<ImageFeatures>)> {
        let (image, slice) = (image_from_python(image)?, Duration::from_secs_f64(slice_s));
        let seen = py.detach(|| self.with(|engine| engine.see_ahead(&image, begins, slice)))?;
        Ok(match seen {
            Ahead::Unfinished => (false, None),
            Ahead::Failed => (true, None),
            Ahead::Seen(features) => (true, Some(ImageFeatures(features))),
        })
    }

    /// Gives up what `see_ahead` has begun.
    fn give_up_image(&self) -> PyResult<()> {
        self.with(|engine| engine.give_up_image())
    }

    /// Returns the counts of images: tower runs, hits, images and bytes in the cache; `None` without a vision tower.
    fn image_counts(&self) -> PyResult<Option<(u64, u64, usize, usize)>> {
        let counts = self.with(|engine| engine.image_counts())?;
        Ok(counts.map(|counts| (counts.runs, counts.hits, counts.images, counts.bytes)))
    }

    /// Returns the MTP layer's draft tokens after sequences, given as (request, length); -1 where there is none.
    fn draft_tokens(&self, py: Python<'_>, sequences: Vec<(i64, usize)>) -> PyResult<Vec<i64>> {
        let tokens = py.detach(|| self.with(|engine| engine.draft_tokens(&sequences)))?;
        Ok(tokens.into_iter().map(|token| token.map_or(-1, i64::from)).collect())
    }

    /// Returns the logits at each of `tokens`, as bytes of float32 [tokens, vocabulary]; `images` are those of the
    /// prompt. `mtp`: the logits are those of the MTP layer. For measurements without live requests: it overwrites the
    /// first pages of the KV pool.
    #[pyo3(signature = (tokens, images=None, mtp=false))]
    fn prompt_logits<'py>(
        &self,
        py: Python<'py>,
        tokens: Int32s<'py>,
        images: Option<Bound<'py, PyAny>>,
        mtp: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let tokens = tokens.as_slice().to_vec();
        let images = images.as_ref().map(images_from_python).transpose()?.unwrap_or_default();
        let result = py.detach(|| self.with(|engine| engine.prompt_logits(&tokens, images, mtp)))?;
        let logits = checked(result)?;
        PyBytes::new_with(py, 4 * logits.len(), |bytes| {
            for (to, number) in bytes.chunks_exact_mut(4).zip(logits) {
                to.copy_from_slice(&number.to_ne_bytes());
            }
            Ok(())
        })
    }

    /// Whether there are repacked weights that are not in the file cache yet.
    #[getter]
    fn keeps_panels(&self) -> bool {
        self.waiting().is_some()
    }

    /// Writes the repacked weights to the file cache, while steps run; `close` stops it. Returns the file's bytes, or
    /// `None` if there was nothing to write.
    fn keep_panels(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let Some(keeping) = self.waiting().take() else {
            return Ok(None);
        };
        checked(py.detach(|| beside_others(|| keeping.write(&self.closing))))
    }

    /// Frees the memory of the engine. Idempotent.
    fn close(&self, py: Python<'_>) {
        self.closing.store(true, Relaxed);
        py.detach(|| {
            drop(self.waiting().take());
            drop(self.locked().take());
        });
    }
}

type StepResult<'py> = (
    Bound<'py, PyAny>,
    Bound<'py, PyAny>,
    Bound<'py, PyList>,
    Bound<'py, PyList>,
    Bound<'py, PyDict>,
);

fn step_to_python(py: Python<'_>, sampled: Sampled) -> PyResult<StepResult<'_>> {
    let tokens = to_numpy(py, sampled.tokens.into_iter())?;
    let logprobs = match sampled.logprobs {
        None => py.None().into_bound(py),
        Some(found) => {
            let (own, top_ids, top) = columns_of(found.tokens);
            (found.rows, own, top_ids, top).into_pyobject(py)?.into_any()
        }
    };
    let prompts = PyList::empty(py);
    for one in sampled.prompts {
        let (own, top_ids, top) = columns_of(one.tokens);
        prompts.append((one.req_id, one.first, own, top_ids, top))?;
    }
    let embeddings = PyList::empty(py);
    for one in sampled.embeddings {
        let numbers = PyBytes::new(
            py,
            &one.numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>(),
        );
        embeddings.append((one.req_id, numbers))?;
    }
    let failures = sampled.failures.into_py_dict(py)?;
    Ok((tokens, logprobs, prompts, embeddings, failures))
}

type LogprobColumns = (Vec<f32>, Vec<Vec<u32>>, Vec<Vec<f32>>);

fn columns_of(tokens: Vec<TokenLogprobs>) -> LogprobColumns {
    let mut all = LogprobColumns::default();
    for one in tokens {
        all.0.push(one.own);
        all.1.push(one.top_ids);
        all.2.push(one.top);
    }
    all
}

/// Measures the limits of the machine: (quantity, instruction set, rate in 1/s). See `minisgl_cpu::limits`.
#[pyfunction]
pub fn cpu_limits(py: Python<'_>, threads: usize, seconds: f64) -> PyResult<Vec<(&'static str, &'static str, f64)>> {
    if !(1..=1024).contains(&threads) || !(0.001..=60.0).contains(&seconds) {
        let text = format!("threads is {threads}, must be 1 to 1024; seconds is {seconds}, must be 0.001 to 60");
        return Err(PyValueError::new_err(text));
    }
    Ok(py.detach(|| minisgl_cpu::limits::limits(threads, seconds)))
}
