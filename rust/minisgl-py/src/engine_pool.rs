//! `minisgl._rust.EnginePool`: several engine processes behind one socket. Its thread never touches Python.

use minisgl_gateway::message::{FromEngine, FromPool, decode, decode_to_engine, encode, encode_from_pool};
use minisgl_router::pool::{EnginePool as Pool, PoolConfig};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// See `_rust.pyi`.
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

    fn readings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = self.pool.readings();
        let dict = PyDict::new(py);
        dict.set_item("loads", found.loads)?;
        dict.set_item("states", found.states)?;
        dict.set_item("num_losses_total", found.num_losses_total)?;
        dict.set_item("num_live", found.num_live)?;
        dict.set_item("num_waiting", found.num_waiting)?;
        dict.set_item("num_moved_total", found.num_moved_total)?;
        Ok(dict)
    }

    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.pool.stop());
    }
}

/// See `_rust.pyi`.
#[pyfunction]
pub(crate) fn recode_to_engine(frame: &[u8]) -> PyResult<Vec<u8>> {
    let messages = decode_to_engine(frame).map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(encode(&messages))
}

/// See `_rust.pyi`.
#[pyfunction]
pub(crate) fn recode_from_engine(frame: &[u8]) -> PyResult<Vec<u8>> {
    let messages = decode(frame).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let mut said = Vec::with_capacity(messages.len());
    for message in &messages {
        said.push(match message {
            FromEngine::LoadProgress(progress) => FromPool::LoadProgress(progress),
            FromEngine::EngineReady(ready) => FromPool::EngineReady(ready),
            FromEngine::Heartbeat(beat) => FromPool::Heartbeat(beat),
            FromEngine::StepTokens(step) => FromPool::StepTokens(step),
            FromEngine::EngineState { engine, state, reason } => FromPool::EngineState {
                engine: *engine,
                state,
                reason,
            },
            FromEngine::EngineFailed(text) => FromPool::EngineFailed(text),
            _ => return Err(PyValueError::new_err("a pool says no such message")),
        });
    }
    Ok(encode_from_pool(&said))
}
