//! `minisgl._rust.EnginePool`: several engine processes behind one socket. Its thread never calls Python.

use minisgl_gateway::message::{decode, decode_to_engine, encode, encode_from_engine};
use minisgl_router::pool::{EnginePool as Pool, PoolConfig};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::arrays::from_json;

/// Several engine processes behind one socket. See `_rust.pyi`.
#[pyclass(module = "minisgl._rust", frozen)]
pub(crate) struct EnginePool {
    pool: Pool,
}

#[pymethods]
impl EnginePool {
    #[new]
    fn new(config: &str) -> PyResult<Self> {
        let config: PoolConfig = serde_json::from_str(config)
            .map_err(|error| PyValueError::new_err(format!("the pool's configuration: {error}")))?;
        let pool = Pool::start(config).map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidInput => PyValueError::new_err(error.to_string()),
            _ => PyOSError::new_err(error.to_string()),
        })?;
        Ok(Self { pool })
    }

    fn restarting(&self, engine: usize, yes: bool) -> PyResult<()> {
        self.pool.restarting(engine, yes).map_err(PyValueError::new_err)
    }

    fn readings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        from_json(py, &serde_json::json!(self.pool.readings()))
    }

    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.pool.stop());
    }
}

/// Decodes and re-encodes a message frame to an engine. See `_rust.pyi`.
#[pyfunction]
pub(crate) fn recode_to_engine(frame: &[u8]) -> PyResult<Vec<u8>> {
    let messages = decode_to_engine(frame).map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(encode(&messages))
}

/// Decodes and re-encodes a message frame from an engine. See `_rust.pyi`.
#[pyfunction]
pub(crate) fn recode_from_engine(frame: &[u8]) -> PyResult<Vec<u8>> {
    let messages = decode(frame).map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(encode_from_engine(&messages))
}
