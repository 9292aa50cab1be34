//! Conversions of numpy arrays and JSON, for functions that are not methods of a larger object.
//!
//! An argument is a contiguous int32 array; a result is a new one, which the receiver may write.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyBytes;

use crate::buffers::View;

/// Argument: a one-dimensional int32 array, read while the GIL is held.
pub(crate) struct Int32s<'py> {
    view: View,
    py: Python<'py>,
}

impl Int32s<'_> {
    pub fn as_slice(&self) -> &[i32] {
        self.view.as_slice(self.py)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Int32s<'py> {
    type Error = PyErr;

    fn extract(array: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let py = array.py();
        match View::of(&array) {
            Some(view) => Ok(Self { view, py }),
            None => Err(PyValueError::new_err("not a contiguous int32 array of one dimension")),
        }
    }
}

/// References to numpy for making arrays from the memory of a `bytes` or `bytearray`.
pub(crate) struct Numpy {
    pub from_buffer: Py<PyAny>,
    pub int32: Py<PyAny>,
    pub int64: Py<PyAny>,
}

impl Numpy {
    pub fn get(py: Python<'_>) -> PyResult<&Self> {
        static NUMPY: PyOnceLock<Numpy> = PyOnceLock::new();
        NUMPY.get_or_try_init(py, || {
            let numpy = py.import("numpy")?;
            let dtype = |name: &str| Ok::<_, PyErr>(numpy.call_method1("dtype", (name,))?.unbind());
            Ok(Self {
                from_buffer: numpy.getattr("frombuffer")?.unbind(),
                int32: dtype("int32")?,
                int64: dtype("int64")?,
            })
        })
    }
}

/// Converts a JSON value to Python objects.
pub(crate) fn from_json<'py>(py: Python<'py>, value: &serde_json::Value) -> PyResult<Bound<'py, PyAny>> {
    py.import("json")?.call_method1("loads", (value.to_string(),))
}

/// Returns a new int32 array with these elements.
pub(crate) fn to_numpy(py: Python<'_>, numbers: impl ExactSizeIterator<Item = i32>) -> PyResult<Bound<'_, PyAny>> {
    let bytes = PyBytes::new_with(py, 4 * numbers.len(), |bytes| {
        for (to, number) in bytes.chunks_exact_mut(4).zip(numbers) {
            to.copy_from_slice(&number.to_ne_bytes());
        }
        Ok(())
    })?;
    let numpy = Numpy::get(py)?;
    let array = numpy.from_buffer.call1(py, (bytes, &numpy.int32))?;
    array.bind(py).call_method0("copy")
}

/// Returns the words of a bit mask, from an int32 array.
pub(crate) fn words_of(numbers: &Int32s<'_>) -> Vec<u32> {
    let words = numbers.as_slice().iter();
    words.map(|word| word.cast_unsigned()).collect()
}
