//! Errors of the core as Python exceptions: the one place.

use minisgl_core::Error;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// `minisgl.step.EventError` or `minisgl.scheduler.api.ControlPlaneError`.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let class = |module: &str, name: &str| py.import(module)?.getattr(name);
    let made = match error {
        Error::Event { index, field, reason } => {
            class("minisgl.step", "EventError").and_then(|kind| kind.call1((index, field, reason)))
        }
        Error::Broken(what) => class("minisgl.scheduler.api", "ControlPlaneError").and_then(|kind| kind.call1((what,))),
    };
    // else the package itself is broken
    made.map_or_else(|_| PyRuntimeError::new_err(error.to_string()), PyErr::from_value)
}
