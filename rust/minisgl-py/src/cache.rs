//! `minisgl._rust.RadixCacheManager`: the core's radix tree by itself, with numpy arrays in and out.
//!
//! A handle is used with the manager that made it.

use minisgl_core as core;
use minisgl_core::CachePolicy;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::{Int32s, pages_of, to_numpy};
use crate::errors::to_python;

/// A prefix cache over pages 0 .. num_pages - 1, which the caller gives out and gets back.
#[pyclass(module = "minisgl._rust")]
pub(crate) struct RadixCacheManager {
    inner: core::RadixCacheManager,
}

/// The end of a matched prefix.
#[pyclass(module = "minisgl._rust")]
pub(crate) struct RadixCacheHandle {
    inner: core::Handle,
    manager: Py<RadixCacheManager>,
}

#[pymethods]
impl RadixCacheHandle {
    /// Tokens of the prefix, whole pages.
    #[getter]
    fn cached_len(&self) -> usize {
        self.inner.cached_len()
    }
}

#[pymethods]
impl RadixCacheManager {
    #[new]
    #[pyo3(signature = (num_pages, page_size=1, policy="lru"))]
    fn new(py: Python<'_>, num_pages: usize, page_size: usize, policy: &str) -> PyResult<Self> {
        let policy = match policy {
            "lru" => CachePolicy::Lru,
            "lfu" => CachePolicy::Lfu,
            other => {
                let text = format!("policy: {other:?}: must be lru or lfu");
                return Err(PyValueError::new_err(text));
            }
        };
        let made = core::RadixCacheManager::new(num_pages, page_size, policy);
        let inner = made.map_err(|error| to_python(py, &error))?;
        Ok(Self { inner })
    }

    /// The handle of the longest cached prefix of `tokens`, and its pages. It counts as used now.
    fn match_prefix<'py>(
        slf: &Bound<'py, Self>,
        tokens: Int32s<'py>,
    ) -> PyResult<(RadixCacheHandle, Bound<'py, PyAny>)> {
        let py = slf.py();
        let found = slf.borrow_mut().inner.match_prefix(tokens.as_slice());
        let (inner, pages) = found.map_err(|error| to_python(py, &error))?;
        let manager = slf.clone().unbind();
        let pages = pages.iter().map(|&page| page.cast_signed());
        Ok((RadixCacheHandle { inner, manager }, to_numpy(py, pages)?))
    }

    /// Keep the pages of a handle from eviction, or take one such lock back.
    #[pyo3(signature = (handle, unlock=false))]
    fn lock_handle(slf: &Bound<'_, Self>, handle: &mut RadixCacheHandle, unlock: bool) -> PyResult<()> {
        if !handle.manager.is(slf) {
            return Err(PyValueError::new_err("handle: of another manager"));
        }
        let inner = &mut slf.borrow_mut().inner;
        let done = if unlock {
            inner.unlock(&mut handle.inner)
        } else {
            inner.lock(&mut handle.inner)
        };
        done.map_err(|error| to_python(slf.py(), &error))
    }

    /// Let `tokens`, whole pages, enter with the `pages` of their KV; returns how many of the first pages the cache had
    /// already.
    fn insert_prefix(&mut self, py: Python<'_>, tokens: Int32s<'_>, pages: Int32s<'_>) -> PyResult<usize> {
        let pages = pages_of(pages.as_slice());
        let done = self.inner.insert_prefix(tokens.as_slice(), &pages);
        done.map_err(|error| to_python(py, &error))
    }

    /// Take `num_pages` out; they are the caller's then.
    fn evict<'py>(&mut self, py: Python<'py>, num_pages: usize) -> PyResult<Bound<'py, PyAny>> {
        let freed = self.inner.evict(num_pages);
        let pages = freed.map_err(|error| to_python(py, &error))?;
        to_numpy(py, pages.iter().map(|&page| page.cast_signed()))
    }

    /// Pages that may be evicted, and pages that are locked.
    fn size_info(&self) -> (usize, usize) {
        self.inner.size_info()
    }

    /// Check everything that must hold. O(everything).
    fn check_integrity(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.check().map_err(|error| to_python(py, &error))
    }

    /// Each cached page, with all tokens from the start of the sequence to the page's end. For tests.
    fn tree_pages<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Bound<'py, PyTuple>, u32)>> {
        let pages = self.inner.tree_pages().into_iter();
        pages
            .map(|(tokens, page)| Ok((PyTuple::new(py, tokens)?, page)))
            .collect()
    }
}
