//! Results of the two scheduler calls: small objects with the attributes of `minisgl.step.StepPlan` and `StepOutput`.

use minisgl_core::{CommitEntry, FinishReason, Plan};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyBytes;

use crate::arrays::Numpy;

macro_rules! step_plan {
    ($($name:ident: $kind:ty,)*) => {
        /// Header of a step.
        #[pyclass(frozen, get_all, module = "minisgl._rust")]
        pub(crate) struct StepPlan {
            $($name: $kind,)*
        }

        impl From<Plan> for StepPlan {
            fn from(plan: Plan) -> Self {
                Self {
                    $($name: plan.$name,)*
                }
            }
        }
    };
}

step_plan! {
    step: i64,
    ring_index: usize,
    num_rows: usize,
    num_decode_rows: usize,
    padded_rows: usize,
    num_tokens: usize,
    num_samples: usize,
    num_page_table_updates: usize,
    num_page_ids: usize,
    num_assigned: usize,
    num_freed: usize,
    num_retracted: usize,
    num_free_pages: usize,
    num_evictable_pages: usize,
    num_state_begins: usize,
    num_state_saves: usize,
    num_page_loads: usize,
    num_background: usize,
}

/// Entries of a commit. The arrays are created on first access. An end without a token has token and row -1; the reason
/// of a request that continues is 0.
#[pyclass(frozen, module = "minisgl._rust")]
pub(crate) struct StepOutput {
    #[pyo3(get)]
    step: i64,
    entries: Vec<CommitEntry>,
    arrays: [PyOnceLock<Py<PyAny>>; 4],
}

impl StepOutput {
    pub fn new(step: i64, entries: Vec<CommitEntry>) -> Self {
        Self {
            step,
            entries,
            arrays: [const { PyOnceLock::new() }; 4],
        }
    }

    /// Returns the array with index `which`, of one field of each entry, created once.
    fn array<const SIZE: usize>(
        &self,
        py: Python<'_>,
        which: usize,
        field: impl Fn(&CommitEntry) -> [u8; SIZE],
    ) -> PyResult<Py<PyAny>> {
        let make = || {
            let bytes = PyBytes::new_with(py, SIZE * self.entries.len(), |bytes| {
                for (to, entry) in bytes.chunks_exact_mut(SIZE).zip(&self.entries) {
                    to.copy_from_slice(&field(entry));
                }
                Ok(())
            })?;
            let numpy = Numpy::get(py)?;
            let dtype = if SIZE == 8 { &numpy.int64 } else { &numpy.int32 };
            numpy.from_buffer.call1(py, (bytes, dtype))
        };
        Ok(self.arrays[which].get_or_try_init(py, make)?.clone_ref(py))
    }
}

#[pymethods]
impl StepOutput {
    fn __len__(&self) -> usize {
        self.entries.len()
    }

    #[getter]
    fn req_ids(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.array(py, 0, |entry| entry.req_id.to_ne_bytes())
    }

    #[getter]
    fn tokens(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.array(py, 1, |entry| entry.sampled.map_or(-1, |it| it.token).to_ne_bytes())
    }

    #[getter]
    fn reasons(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.array(py, 2, |entry| entry.reason.map_or(0, number).to_ne_bytes())
    }

    #[getter]
    fn rows(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.array(py, 3, |entry| entry.sampled.map_or(u32::MAX, |it| it.row).to_ne_bytes())
    }
}

/// Returns the value of a `minisgl.step.FinishReason`.
const fn number(reason: FinishReason) -> i32 {
    reason as i32
}
