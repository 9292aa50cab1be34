//! `minisgl._rust.CpuHead`: the LM head of the torch engine on a CPU, computed by the CPU engine's kernels.
//!
//! Invariants: matmuls run without the GIL, on arrays that the caller made for the call.

use std::sync::{Mutex, PoisonError};

use minisgl_cpu::files::Kind;
use minisgl_cpu::threads::Pool;
use minisgl_cpu::{Head, Isa, OpenMp, Team};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::buffers::Array;
use crate::cpu_engine::to_python;

#[pyclass(module = "minisgl._rust")]
pub(crate) struct CpuHead {
    inner: Mutex<Head>,
}

impl CpuHead {
    fn locked(&self) -> std::sync::MutexGuard<'_, Head> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the OpenMP team at the address `gomp_parallel`, or `None` if that is 0.
#[allow(unsafe_code)]
fn openmp(gomp_parallel: usize, threads: usize) -> Option<OpenMp> {
    // SAFETY: Python found the address under that name in the process; libraries are never unloaded.
    unsafe { OpenMp::new(gomp_parallel, threads) }
}

#[pymethods]
impl CpuHead {
    #[new]
    fn new(
        py: Python<'_>,
        table: &Bound<'_, PyAny>,
        kind: &str,
        shape: [usize; 2],
        isa: Option<&str>,
        threads: usize,
        gomp_parallel: usize,
    ) -> PyResult<Self> {
        let kind = match kind {
            "bfloat16" => Kind::BF16,
            "float16" => Kind::F16,
            other => return Err(PyValueError::new_err(format!("kind: {other}: not a 16-bit type"))),
        };
        let team = match openmp(gomp_parallel, threads) {
            Some(team) => Team::OpenMp(team),
            None => Team::Own(Pool::new(threads).map_err(|error| to_python(&error))?),
        };
        let mut table = Array::<u8>::bind(table, "table", 1)?;
        let data: &[u8] = table.as_mut();
        let head = py.detach(|| Head::new(kind, shape, data, isa, team));
        Ok(Self {
            inner: Mutex::new(head.map_err(|error| to_python(&error))?),
        })
    }

    #[getter]
    fn width(&self) -> usize {
        self.locked().width()
    }

    /// Returns the instruction set that the kernels would use, limited to `held_down_by` if given. Raises `ValueError`
    /// if this CPU does not have it.
    #[staticmethod]
    fn isa(held_down_by: Option<&str>) -> PyResult<&'static str> {
        let isa = Isa::detect(held_down_by).map_err(|error| to_python(&error))?;
        Ok(isa.name())
    }

    fn product(&self, py: Python<'_>, x: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>, bf16: bool) -> PyResult<()> {
        let (mut x, mut out) = (Array::<f32>::bind(x, "x", 1)?, Array::<f32>::bind(out, "out", 1)?);
        let (x, out): (&[f32], _) = (x.as_mut(), out.as_mut());
        py.detach(|| self.locked().product(x, out, bf16))
            .map_err(|error| to_python(&error))
    }
}
