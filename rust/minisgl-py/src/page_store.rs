//! `minisgl._rust.PageStore`: pages of KV, and states, on disk, for an engine, for what reads before requests arrive
//! and for people.
//!
//! Invariants: whatever touches the disk runs without the GIL.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use minisgl_store::{Folder, Staged, Store, Totals, digest_of_files};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::arrays::Int32s;

/// The pages of one model, computed in one way, in a folder.
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

/// Pages of a text, read, and the state behind the last of them.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct StagedPages {
    inner: Arc<Staged>,
}

/// A `StagedPages` or None.
pub(crate) fn staged_of(stored: &Bound<'_, PyAny>) -> PyResult<Option<Arc<Staged>>> {
    let found: Option<PyRef<'_, StagedPages>> = stored.extract()?;
    Ok(found.map(|pages| Arc::clone(&pages.inner)))
}

/// Pages, states, bytes of their files, and damaged files.
type Counted = (u64, u64, u64, u64);

fn counted(totals: Totals) -> Counted {
    (totals.pages, totals.states, totals.bytes, totals.damaged)
}

#[pymethods]
impl PageStore {
    /// `state_bytes` is 0 for a model that has no states.
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

    /// What computes its pages, and how.
    #[getter]
    fn identity(&self) -> &[u8] {
        &self.identity
    }

    /// A state has so many; 0: the model has none.
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

    /// Write pages of a text now, from that of a column on.
    fn put(&self, py: Python<'_>, tokens: Int32s<'_>, first: usize, pages: Vec<PyBackedBytes>) -> PyResult<()> {
        let tokens = tokens.as_slice().to_vec();
        let pages: Vec<&[u8]> = pages.iter().map(|page| &**page).collect();
        Ok(py.detach(|| self.inner.put(&tokens, first, &pages))?)
    }

    /// The same of the state behind so many pages.
    fn put_state(&self, py: Python<'_>, tokens: Int32s<'_>, num_pages: usize, state: PyBackedBytes) -> PyResult<()> {
        let tokens = tokens.as_slice().to_vec();
        Ok(py.detach(|| self.inner.put_state(&tokens, num_pages, &state))?)
    }

    /// For tests: from now on the disk takes so many seconds longer for a page.
    fn slow_down(&self, seconds: f64) {
        self.inner.slow_down(Duration::from_secs_f64(seconds));
    }

    /// Bytes of the folder; pages written and loaded; what was dropped, failed, damaged; states written and loaded.
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

    /// Why the last page that failed did, if any has since this was asked.
    fn take_trouble(&self) -> Option<String> {
        self.inner.take_trouble()
    }

    /// Wait until what was given is written, but not longer than so many seconds.
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

    /// The digest of all that some files hold, in their order.
    #[staticmethod]
    fn digest<'py>(py: Python<'py>, files: Vec<PathBuf>) -> PyResult<Bound<'py, PyBytes>> {
        let digest = py.detach(|| digest_of_files(&files))?;
        Ok(PyBytes::new(py, &digest))
    }
}

#[pymethods]
impl StagedPages {
    /// The first page that there is, and the end.
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
