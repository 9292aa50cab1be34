//! Errors and panics of the core as Python exceptions, in one place.

use minisgl_core::Error;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// Converts a core error to `minisgl.step.EventError`, `ValueError` or `minisgl.scheduler.api.ControlPlaneError`.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let class = |module: &str, name: &str| py.import(module)?.getattr(name);
    let made = match error {
        Error::Event { index, field, reason } => {
            class("minisgl.step", "EventError").and_then(|kind| kind.call1((index, field, reason)))
        }
        Error::Argument { .. } => return PyValueError::new_err(error.to_string()),
        Error::Broken(what) => class("minisgl.scheduler.api", "ControlPlaneError").and_then(|kind| kind.call1((what,))),
    };
    // on failure the package itself is broken
    made.map_or_else(|_| PyRuntimeError::new_err(error.to_string()), PyErr::from_value)
}

/// Returns the message of a panic.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panic: {}", text.unwrap_or_else(|| "of an unknown kind".into()))
}
