//! The extension module `minisgl._rust`: a thin layer over the other crates, and the only one that knows Python.
//!
//! It converts arguments, results and errors; decisions and computations belong to the crates that it calls. Start with
//! `hotpath`, the parts of the scheduler, or with the file of the class in question.

#![deny(unsafe_code)]

use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Allocator for encoding prompts, which makes many small allocations on one thread and frees them on another.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod answer;
mod arrays;
#[allow(unsafe_code)]
mod buffers;
mod control_plane;
mod cpu_engine;
mod cpu_head;
mod engine_pool;
mod errors;
mod events;
#[allow(unsafe_code)]
mod gateway;
mod gguf;
mod grammar;
mod grammar_of;
mod grammar_tokens;
mod hotpath;
mod load;
mod page_store;
mod router;
mod sampling;
mod step;
mod text;

#[pymodule]
fn _rust(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(control_plane::build_info, module)?)?;
    module.add_function(wrap_pyfunction!(answer::answer_rules, module)?)?;
    module.add_class::<answer::AnswerParser>()?;
    module.add_class::<answer::AnswerTools>()?;
    module.add_class::<answer::ContentScan>()?;
    module.add_class::<answer::Thinking>()?;
    module.add_class::<answer::ToolFormat>()?;
    module.add_function(wrap_pyfunction!(load::run_load, module)?)?;
    let kinds = minisgl_cpu::files::Kind::ALL.map(minisgl_cpu::files::Kind::name);
    module.add("GGUF_TYPES", PyTuple::new(module.py(), kinds)?)?;
    module.add_function(wrap_pyfunction!(gguf::gguf_header, module)?)?;
    module.add_function(wrap_pyfunction!(gguf::gguf_parts, module)?)?;
    module.add_function(wrap_pyfunction!(gguf::gguf_head_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(gguf::encode_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(gguf::quantize_weights, module)?)?;
    module.add_function(wrap_pyfunction!(gguf::decode_blocks, module)?)?;
    module.add_class::<control_plane::ControlPlane>()?;
    module.add_class::<cpu_engine::CpuAdapter>()?;
    module.add_class::<cpu_engine::CpuEngine>()?;
    module.add_class::<cpu_engine::ImageFeatures>()?;
    module.add_class::<cpu_head::CpuHead>()?;
    module.add_function(wrap_pyfunction!(cpu_engine::cpu_limits, module)?)?;
    module.add_class::<gateway::Gateway>()?;
    module.add_class::<grammar::GrammarTokenizer>()?;
    module.add_class::<grammar::GrammarMatcher>()?;
    module.add_function(wrap_pyfunction!(grammar::check_grammar, module)?)?;
    module.add_class::<engine_pool::EnginePool>()?;
    module.add_function(wrap_pyfunction!(engine_pool::recode_to_engine, module)?)?;
    module.add_function(wrap_pyfunction!(engine_pool::recode_from_engine, module)?)?;
    module.add_class::<hotpath::RadixCacheHandle>()?;
    module.add_class::<hotpath::RadixCacheManager>()?;
    module.add_class::<hotpath::RadixMatch>()?;
    module.add_function(wrap_pyfunction!(hotpath::prefill_admission_plan, module)?)?;
    module.add_function(wrap_pyfunction!(hotpath::make_positions, module)?)?;
    module.add_function(wrap_pyfunction!(hotpath::make_input_mapping, module)?)?;
    module.add_function(wrap_pyfunction!(hotpath::make_write_mapping, module)?)?;
    module.add_function(wrap_pyfunction!(hotpath::make_metadata_buffers, module)?)?;
    module.add_class::<page_store::PageStore>()?;
    module.add_class::<page_store::StagedPages>()?;
    module.add_class::<step::StepPlan>()?;
    module.add_class::<step::StepOutput>()?;
    module.add_class::<router::Router>()?;
    module.add_class::<sampling::CpuSampler>()?;
    module.add_class::<text::TextTokenizer>()?;
    module.add_class::<text::TextDecoder>()?;
    module.add_class::<text::TextStream>()
}
