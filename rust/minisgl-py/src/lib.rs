//! The extension module `minisgl._rust`: a thin layer over `minisgl-core`.

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Cargo features of this crate that are on, `extension-module` aside, which every built module has.
const FEATURES: [&str; 0] = [];

/// What was compiled: `{"version": str, "profile": "release" | "debug", "features": list[str]}`.
#[pyfunction]
fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let build = minisgl_core::build_info();
    let info = PyDict::new(py);
    info.set_item("version", build.version)?;
    info.set_item("profile", build.profile)?;
    info.set_item("features", FEATURES.to_vec())?;
    Ok(info)
}

#[pymodule]
fn _rust(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(build_info, module)?)
}
