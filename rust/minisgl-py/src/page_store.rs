//! `minisgl._rust.PageStore`: KV pages and saved states on disk, for an engine, for prefetching before requests arrive,
//! and for maintenance commands.
//!
//! Invariants: all disk I/O runs without the GIL.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use minisgl_store::{Folder, Staged, Store, Totals, digest_of_files};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::arrays::Int32s;

/// Folder of the KV pages of one model, computed in one way.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct PageStore {
    inner: Arc<Store>,
    identity: Vec<u8>,
}

impl PageStore {
    pub fn shared(&self) -> Arc<Store> {
        Arc::clone(&self.inner)
    }
}

/// Staged pages of a sequence, read from disk, and the state after the last of them.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct StagedPages {
    inner: Arc<Staged>,
}

/// Returns the pages of a `StagedPages`, or `None` for None.
pub(crate) fn staged_of(stored: &Bound<'_, PyAny>) -> PyResult<Option<Arc<Staged>>> {
    let staged: Option<PyRef<'_, StagedPages>> = stored.extract()?;
    Ok(staged.map(|pages| Arc::clone(&pages.inner)))
}

/// Totals of a folder: pages, states, bytes of their files, damaged files.
type Counted = (u64, u64, u64, u64);

fn counted(totals: Totals) -> Counted {
    (totals.pages, totals.states, totals.bytes, totals.damaged)
}

#[pymethods]
impl PageStore {
    /// Opens or creates a store. `state_bytes` is 0 for a model without recurrent state.
    #[new]
    #[pyo3(signature = (folder, limit, identity, page_size, page_bytes, state_bytes=0))]
    fn new(
        py: Python<'_>,
        folder: PathBuf,
        limit: u64,
        identity: &[u8],
        page_size: usize,
        page_bytes: usize,
        state_bytes: usize,
    ) -> PyResult<Self> {
        let opened = py.detach(|| Store::open(&folder, limit, identity, page_size, page_bytes))?;
        Ok(Self {
            inner: Arc::new(opened.with_states(state_bytes)),
            identity: identity.to_vec(),
        })
    }

    /// Identity of the model and the method that compute the pages.
    #[getter]
    fn identity(&self) -> &[u8] {
        &self.identity
    }

    /// Bytes of a saved state; 0 for a model without recurrent state.
    #[getter]
    fn state_bytes(&self) -> usize {
        self.inner.state_bytes()
    }

    #[pyo3(signature = (tokens, first, most, space=b"".as_slice()))]
    fn stage(&self, py: Python<'_>, tokens: Int32s<'_>, first: usize, most: usize, space: &[u8]) -> StagedPages {
        let tokens = tokens.as_slice().to_vec();
        let staged = py.detach(|| self.inner.stage(space, &tokens, first, most));
        StagedPages {
            inner: Arc::new(staged),
        }
    }

    fn page<'py>(&self, py: Python<'py>, tokens: Int32s<'_>, column: usize) -> Option<Bound<'py, PyBytes>> {
        let tokens = tokens.as_slice().to_vec();
        let page = py.detach(|| self.inner.page(&tokens, column))?;
        Some(PyBytes::new(py, &page))
    }

    /// Writes pages of a sequence now, from page index `first` on.
    fn put(&self, py: Python<'_>, tokens: Int32s<'_>, first: usize, pages: Vec<PyBackedBytes>) -> PyResult<()> {
        let tokens = tokens.as_slice().to_vec();
        let pages: Vec<&[u8]> = pages.iter().map(|page| &**page).collect();
        Ok(py.detach(|| self.inner.put(&tokens, first, &pages))?)
    }

    /// Writes the state after the first `num_pages` pages of a sequence now.
    fn put_state(&self, py: Python<'_>, tokens: Int32s<'_>, num_pages: usize, state: PyBackedBytes) -> PyResult<()> {
        let tokens = tokens.as_slice().to_vec();
        Ok(py.detach(|| self.inner.put_state(&tokens, num_pages, &state))?)
    }

    /// Delays each page read by `seconds` from now on. For tests.
    fn slow_down(&self, seconds: f64) {
        self.inner.slow_down(Duration::from_secs_f64(seconds));
    }

    /// Returns: bytes of the folder; pages written, loaded, dropped, failed, damaged; states written, loaded.
    fn counts(&self) -> (u64, u64, u64, u64, u64, u64, u64, u64) {
        let now = self.inner.counts();
        let all = (now.dropped, now.failed, now.damaged);
        (
            now.bytes,
            now.written,
            now.loaded,
            all.0,
            all.1,
            all.2,
            now.states_written,
            now.states_loaded,
        )
    }

    /// Returns the reason of the last failed page since the last call, if any.
    fn take_trouble(&self) -> Option<String> {
        self.inner.take_trouble()
    }

    /// Waits until all queued pages are written, at most `seconds`.
    fn flush(&self, py: Python<'_>, seconds: f64) {
        py.detach(|| self.inner.flush(Duration::from_secs_f64(seconds)));
    }

    #[staticmethod]
    fn totals(py: Python<'_>, folder: PathBuf) -> PyResult<Counted> {
        Ok(counted(py.detach(|| Folder::existing(&folder)?.totals())?))
    }

    #[staticmethod]
    fn clear(py: Python<'_>, folder: PathBuf) -> PyResult<Counted> {
        Ok(counted(py.detach(|| Folder::existing(&folder)?.clear())?))
    }

    #[staticmethod]
    fn verify(py: Python<'_>, folder: PathBuf) -> PyResult<Counted> {
        Ok(counted(py.detach(|| Folder::existing(&folder)?.verify())?))
    }

    /// Returns the digest of the contents of `files`, in their order.
    #[staticmethod]
    fn digest<'py>(py: Python<'py>, files: Vec<PathBuf>) -> PyResult<Bound<'py, PyBytes>> {
        let digest = py.detach(|| digest_of_files(&files))?;
        Ok(PyBytes::new(py, &digest))
    }
}

#[pymethods]
impl StagedPages {
    /// Page indices of the staged pages: the first, and the end.
    #[getter]
    fn columns(&self) -> (usize, usize) {
        self.inner.columns()
    }

    fn page<'py>(&self, py: Python<'py>, column: usize) -> Option<Bound<'py, PyBytes>> {
        self.inner.page(column).map(|page| PyBytes::new(py, page))
    }

    #[getter]
    fn state<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.inner.state().map(|state| PyBytes::new(py, state))
    }
}
