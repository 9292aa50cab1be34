//! Errors of the core as Python exceptions: the one place.

use minisgl_core::Error;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyAny;

/// `minisgl.step.EventError` or `minisgl.scheduler.api.ControlPlaneError`.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let made = match error {
        Error::Event { index, field, reason } => py
            .import("minisgl.step")
            .and_then(|module| module.getattr("EventError"))
            .and_then(|kind| kind.call1((index, field, reason))),
        Error::Broken(what) => control_plane_error(py, what),
    };
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(_) => PyRuntimeError::new_err(error.to_string()), // the package itself is broken
    }
}

fn control_plane_error<'py>(py: Python<'py>, what: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("minisgl.scheduler.api")?
        .getattr("ControlPlaneError")?
        .call1((what,))
}
