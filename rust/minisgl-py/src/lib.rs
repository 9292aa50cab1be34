//! The extension module `minisgl._rust`: a thin layer over `minisgl-core`, `minisgl-cpu` and `minisgl-loadgen`.

#![deny(unsafe_code)]

use pyo3::prelude::*;

mod arrays;
#[allow(unsafe_code)]
mod buffers;
mod cache;
mod control_plane;
mod cpu_engine;
mod errors;
mod events;
mod functions;
mod gguf;
mod load;
mod sampling;
mod step;

#[pymodule]
fn _rust(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(control_plane::build_info, module)?)?;
    module.add_function(wrap_pyfunction!(load::run_load, module)?)?;
    module.add_function(wrap_pyfunction!(gguf::gguf_header, module)?)?;
    module.add_function(wrap_pyfunction!(gguf::gguf_head_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(gguf::encode_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(gguf::quantize_weights, module)?)?;
    module.add_function(wrap_pyfunction!(gguf::decode_blocks, module)?)?;
    module.add_class::<control_plane::ControlPlane>()?;
    module.add_class::<cpu_engine::CpuEngine>()?;
    module.add_class::<step::StepPlan>()?;
    module.add_class::<step::StepOutput>()?;
    module.add_class::<cache::RadixCacheManager>()?;
    module.add_class::<cache::RadixCacheHandle>()?;
    module.add_class::<sampling::CpuSampler>()?;
    module.add_function(wrap_pyfunction!(functions::prefill_admission_plan, module)?)?;
    module.add_function(wrap_pyfunction!(functions::make_positions, module)?)?;
    module.add_function(wrap_pyfunction!(functions::make_input_mapping, module)?)?;
    module.add_function(wrap_pyfunction!(functions::make_write_mapping, module)?)?;
    module.add_function(wrap_pyfunction!(functions::make_metadata_buffers, module)?)
}
