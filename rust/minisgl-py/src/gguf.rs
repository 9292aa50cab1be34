//! Weight files for Python: GGUF headers, decoding and encoding of quantized blocks, quantization of weights.
//!
//! Invariants: `gguf_header` reads only the header of a GGUF file; if damaged, the `ValueError` names the key or
//! tensor.

use std::path::PathBuf;

use minisgl_cpu::files::gguf::{self, Header, List, Value};
use minisgl_cpu::files::quantize::{self, Quantization};
use minisgl_cpu::files::{self, Kind, Mapping, blocks, cache};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::cpu_engine::to_python as to_python_error;

/// Reads the header of a GGUF file and its parts. See `_rust.pyi`.
#[pyfunction]
pub(crate) fn gguf_header(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let (metadata, tensors, places) = (PyDict::new(py), PyDict::new(py), PyDict::new(py));
    let out = PyDict::new(py);
    for (i, (path, mapping)) in gguf::parts(&path).map_err(value_error)?.iter().enumerate() {
        let header = Header::parse(mapping.bytes()).map_err(|error| value_error(error.within(mapping.name())))?;
        for tensor in &header.tensors {
            if tensors.contains(tensor.name)? {
                let error = minisgl_cpu::Error::file(format!("tensor {}: in another part, too", tensor.name));
                return Err(value_error(error.within(mapping.name())));
            }
            let shape = PyTuple::new(py, tensor.shape())?;
            tensors.set_item(tensor.name, (tensor.type_name, shape))?;
            places.set_item(tensor.name, (path, tensor.bytes.start, tensor.bytes.end))?;
        }
        if i == 0 {
            for (key, value) in &header.metadata {
                metadata.set_item(key, to_python(py, value)?)?;
            }
            out.set_item("head_bytes", header.head_bytes)?;
        }
    }
    out.set_item("metadata", metadata)?;
    out.set_item("tensors", tensors)?;
    out.set_item("places", places)?;
    Ok(out)
}

/// Returns the files of a GGUF model. See `_rust.pyi`.
#[pyfunction]
pub(crate) fn gguf_parts(path: PathBuf) -> PyResult<Vec<PathBuf>> {
    let parts = gguf::parts(&path).map_err(value_error)?;
    Ok(parts.into_iter().map(|(path, _)| path).collect())
}

/// Returns the size of a GGUF header in bytes. See `_rust.pyi`.
#[pyfunction]
pub(crate) fn gguf_head_bytes(path: PathBuf) -> PyResult<usize> {
    let mapping = Mapping::open(&path).map_err(value_error)?;
    let header = mapping.named(|bytes| Ok(Header::parse(bytes)?.head_bytes));
    header.map_err(value_error)
}

fn to_python<'py>(py: Python<'py>, value: &Value<'_>) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Unsigned(n) => PyInt::new(py, *n).into_any(),
        Value::Signed(n) => PyInt::new(py, *n).into_any(),
        Value::Float(x) => PyFloat::new(py, *x).into_any(),
        Value::Bool(b) => b.into_pyobject(py)?.to_owned().into_any(),
        Value::Text(text) => PyString::new(py, text).into_any(),
        Value::List(list) => list_to_python(py, list)?.into_any(),
    })
}

fn list_to_python<'py>(py: Python<'py>, list: &List<'_>) -> PyResult<Bound<'py, PyList>> {
    let out = PyList::empty(py);
    for value in list.iter() {
        out.append(to_python(py, &value)?)?;
    }
    Ok(out)
}

/// Decodes quantized blocks to float32. See `_rust.pyi`.
#[pyfunction]
pub(crate) fn decode_blocks<'py>(py: Python<'py>, kind: &str, data: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    let parsed = Kind::from_name(kind);
    let kind = parsed.ok_or_else(|| PyValueError::new_err(format!("no decoder for {kind}")))?;
    if !data.len().is_multiple_of(kind.block_bytes()) {
        return Err(PyValueError::new_err(format!(
            "{} bytes are not whole blocks of {} ({})",
            data.len(),
            kind.block_bytes(),
            kind.name()
        )));
    }
    let mut numbers = vec![0.0f32; data.len() / kind.block_bytes() * kind.block_len()];
    PyBytes::new_with(py, 4 * numbers.len(), |out| {
        blocks::decode(kind, data, &mut numbers);
        for (out, number) in out.chunks_exact_mut(4).zip(&numbers) {
            out.copy_from_slice(&number.to_le_bytes());
        }
        Ok(())
    })
}

/// Quantizes float32 values to blocks. See `_rust.pyi`.
#[pyfunction]
pub(crate) fn encode_blocks<'py>(py: Python<'py>, kind: &str, numbers: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    let supported = [Kind::Q8_0, Kind::Q4_1].into_iter();
    let kind = supported.clone().find(|candidate| candidate.name() == kind);
    let kind = kind.ok_or_else(|| PyValueError::new_err("kind must be Q8_0 or Q4_1"))?;
    let numbers = numbers.chunks_exact(4);
    let values: Vec<f32> = numbers.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let bytes = kind.bytes_of(values.len());
    let bytes = bytes.ok_or_else(|| PyValueError::new_err("the values must fill whole blocks of 32"))?;
    PyBytes::new_with(py, bytes, |out| {
        if quantize::encode(kind, &values, out) {
            Ok(())
        } else {
            Err(PyValueError::new_err("not finite, or too large"))
        }
    })
}

/// Quantizes the weights of a model into a GGUF file. See `_rust.pyi`.
#[pyfunction]
pub(crate) fn quantize_weights(
    py: Python<'_>,
    source: PathBuf,
    quantization: &str,
    file: PathBuf,
    progress: Py<PyAny>,
) -> PyResult<bool> {
    let quantization = Quantization::parse(quantization).map_err(value_error)?;
    let mut failed = None;
    let made = py.detach(|| {
        let source = files::open(&source)?;
        let mut say = |done: usize, all: usize| {
            Python::attach(|py| {
                let signals = py.check_signals();
                signals.and_then(|()| progress.call1(py, (done, all)).map(drop))
            })
            .map_err(|error| {
                failed = Some(error);
                minisgl_cpu::Error::step("ended by its caller")
            })
        };
        cache::quantized(source.as_ref(), quantization, &file, &mut say)
    });
    match (made, failed) {
        (_, Some(error)) => Err(error),
        (Err(error), None) => Err(to_python_error(&error)),
        (Ok(made), None) => Ok(made.is_some()),
    }
}

fn value_error(error: minisgl_cpu::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}
