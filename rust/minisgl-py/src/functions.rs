//! Functions of the core that stand by themselves, with numpy arrays in and out.

use minisgl_core::{Candidate, Error, Room};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{Int32s, int32, to_numpy};
use crate::errors::to_python;

type Array<'py> = Bound<'py, PyAny>;

fn made<'py>(py: Python<'py>, result: Result<Vec<i32>, Error>) -> PyResult<Array<'py>> {
    let numbers = result.map_err(|error| to_python(py, &error))?;
    to_numpy(py, numbers.into_iter())
}

/// Which of the first candidates start, and the tokens and pages of their first chunks.
#[pyfunction]
#[pyo3(signature = (
    num_tokens, num_matched_pages, max_output, *,
    budget, num_slots, num_pages, page_size=1, reserve_ratio=716, needed_by_started=0, any_started=false
))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn prefill_admission_plan<'py>(
    py: Python<'py>,
    num_tokens: Int32s<'py>,
    num_matched_pages: Int32s<'py>,
    max_output: Int32s<'py>,
    budget: i64,
    num_slots: usize,
    num_pages: usize,
    page_size: usize,
    reserve_ratio: usize,
    needed_by_started: usize,
    any_started: bool,
) -> PyResult<(Array<'py>, Array<'py>)> {
    let lengths = num_tokens.as_slice();
    let (matched, output) = (num_matched_pages.as_slice(), max_output.as_slice());
    if matched.len() != lengths.len() || output.len() != lengths.len() {
        return Err(PyValueError::new_err("candidates: arrays of one length are needed"));
    }
    let number = |value: i32| {
        u32::try_from(value).map_err(|_| PyValueError::new_err(format!("candidates: {value} is negative")))
    };
    let mut candidates = Vec::with_capacity(lengths.len());
    for ((&length, &matched), &output) in lengths.iter().zip(matched).zip(output) {
        candidates.push(Candidate {
            num_tokens: number(length)?,
            num_matched_pages: number(matched)?,
            max_output: number(output)?,
        });
    }
    let room = Room {
        budget,
        num_slots,
        num_pages,
        page_size,
        reserve_ratio,
        needed_by_started,
        any_started,
    };
    let plan = minisgl_core::prefill_admission_plan(&candidates, &room);
    let plan = plan.map_err(|error| to_python(py, &error))?;
    let tokens = to_numpy(py, plan.iter().map(|&(tokens, _)| int32(tokens)))?;
    let pages = to_numpy(py, plan.iter().map(|&(_, pages)| int32(pages)))?;
    Ok((tokens, pages))
}

/// The positions of the tokens of all rows.
#[pyfunction]
pub(crate) fn make_positions<'py>(
    py: Python<'py>,
    starts: Int32s<'py>,
    extend_lens: Int32s<'py>,
) -> PyResult<Array<'py>> {
    made(
        py,
        minisgl_core::make_positions(starts.as_slice(), extend_lens.as_slice()),
    )
}

/// The request slot of each token.
#[pyfunction]
pub(crate) fn make_input_mapping<'py>(
    py: Python<'py>,
    req_slots: Int32s<'py>,
    extend_lens: Int32s<'py>,
) -> PyResult<Array<'py>> {
    made(
        py,
        minisgl_core::make_input_mapping(req_slots.as_slice(), extend_lens.as_slice()),
    )
}

/// The position of the token that each row samples, -1 for a row that samples none.
#[pyfunction]
pub(crate) fn make_write_mapping<'py>(
    py: Python<'py>,
    seq_lens: Int32s<'py>,
    samples: Int32s<'py>,
) -> PyResult<Array<'py>> {
    let mapping = minisgl_core::make_write_mapping(seq_lens.as_slice(), samples.as_slice());
    let of_rows = |rows: Vec<Option<i32>>| rows.into_iter().map(|row| row.unwrap_or(-1)).collect();
    made(py, mapping.map(of_rows))
}

/// The arrays of a step that follow from its rows.
#[pyfunction]
#[pyo3(signature = (page_tables, starts, extend_lens, page_size=1))]
pub(crate) fn make_metadata_buffers<'py>(
    py: Python<'py>,
    page_tables: &Bound<'py, PyAny>,
    starts: Int32s<'py>,
    extend_lens: Int32s<'py>,
    page_size: usize,
) -> PyResult<Bound<'py, PyDict>> {
    let shape: (usize, usize) = page_tables.getattr("shape")?.extract()?;
    let flat: Int32s<'_> = page_tables.call_method1("reshape", (-1,))?.extract()?;
    let metadata = minisgl_core::make_metadata_buffers(
        flat.as_slice(),
        shape.1,
        starts.as_slice(),
        extend_lens.as_slice(),
        page_size,
    );
    let metadata = metadata.map_err(|error| to_python(py, &error))?;
    let arrays = PyDict::new(py);
    for (name, numbers) in [
        ("positions", metadata.positions),
        ("out_loc", metadata.out_loc),
        ("seq_lens", metadata.seq_lens),
        ("qo_indptr", metadata.qo_indptr),
        ("kv_indptr", metadata.kv_indptr),
        ("last_page_len", metadata.last_page_len),
    ] {
        arrays.set_item(name, to_numpy(py, numbers.into_iter())?)?;
    }
    Ok(arrays)
}
