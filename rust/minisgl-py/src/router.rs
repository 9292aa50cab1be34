//! `minisgl._rust.Router`: the router behind the Protocol of `minisgl.routing.api`.

use minisgl_router::policy::{self, RouterConfig};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::arrays::Int32s;

/// Router that assigns requests to engines; `minisgl.routing.api.make_router` checks its settings. See `_rust.pyi`.
#[pyclass(module = "minisgl._rust")]
pub(crate) struct Router {
    inner: policy::Router,
    num_engines: usize,
    num_keys: usize,
    placed: Py<PyAny>,
    out: Vec<policy::Placed>,
}

/// Returns `number` if it is an index below `count`. Raises `ValueError`, with `name` in the message, if not.
fn below(name: &str, number: i64, count: usize) -> PyResult<usize> {
    match usize::try_from(number) {
        Ok(found) if found < count => Ok(found),
        _ => Err(PyValueError::new_err(format!("{name} {number}: must be below {count}"))),
    }
}

impl Router {
    fn engine(&self, engine: i64) -> PyResult<usize> {
        below("engine", engine, self.num_engines)
    }
}

#[pymethods]
impl Router {
    #[new]
    fn new(py: Python<'_>, config: &str) -> PyResult<Self> {
        let config: RouterConfig = serde_json::from_str(config)
            .map_err(|error| PyValueError::new_err(format!("the router's configuration: {error}")))?;
        let (num_engines, num_keys) = (config.num_engines, config.keys.len() + 1);
        let inner = policy::Router::new(config).map_err(PyValueError::new_err)?;
        let api = py.import("minisgl.routing.api")?;
        Ok(Self {
            inner,
            num_engines,
            num_keys,
            placed: api.getattr("Placed")?.unbind(),
            out: Vec::new(),
        })
    }

    /// Marks an engine as ready, with an empty cache. No engine is ready at first.
    #[pyo3(signature = (engine, num_pages=None))]
    fn engine_up(&mut self, engine: i64, num_pages: Option<usize>) -> PyResult<()> {
        let engine = self.engine(engine)?;
        self.inner.engine_up(engine, num_pages);
        Ok(())
    }

    /// Marks an engine as lost. Returns the ids of its requests in the order of placement and forgets them.
    fn engine_down(&mut self, engine: i64) -> PyResult<Vec<i64>> {
        let engine = self.engine(engine)?;
        Ok(self.inner.engine_down(engine))
    }

    /// Sets the load that an engine reported last.
    fn report(&mut self, engine: i64, num_waiting: usize, num_running: usize) -> PyResult<()> {
        let engine = self.engine(engine)?;
        self.inner.report(engine, num_waiting, num_running);
        Ok(())
    }

    /// Adds a request to the queue, at the position of its priority and key; with `again` ahead of all others.
    #[pyo3(signature = (req_id, tokens, priority=0, key=0, *, again=false, namespace=0))]
    fn add(
        &mut self,
        req_id: i64,
        tokens: Int32s<'_>,
        priority: i64,
        key: i64,
        again: bool,
        namespace: u32,
    ) -> PyResult<()> {
        let key = below("key", key, self.num_keys)?;
        self.inner
            .add(req_id, tokens.as_slice(), priority, key, again, namespace)
            .map_err(PyValueError::new_err)
    }

    /// Returns the requests that may start now, in order, each with its engine.
    fn place<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.out.clear();
        self.inner.place(&mut self.out);
        let placed = self.placed.bind(py);
        let made: Vec<_> = self
            .out
            .iter()
            .map(|one| placed.call1((one.req_id, one.engine, one.matched_len)))
            .collect::<PyResult<_>>()?;
        PyList::new(py, made)
    }

    /// Removes a request that ended or was cancelled. `num_generated` counts towards its key's share. No-op if unknown.
    #[pyo3(signature = (req_id, num_generated=0))]
    fn remove(&mut self, req_id: i64, num_generated: usize) {
        self.inner.remove(req_id, num_generated);
    }

    /// Returns for each engine how many requests are placed there and not removed.
    fn loads(&self) -> Vec<usize> {
        self.inner.loads()
    }

    /// Number of queued requests.
    #[getter]
    fn num_waiting(&self) -> usize {
        self.inner.num_waiting()
    }
}
