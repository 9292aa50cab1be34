//! Arrays that Python allocated and the scheduler writes in place. All `unsafe` code of the crate but FFI is here.
//!
//! Invariants: an array is bound only if it has the right type, is contiguous, writable, large enough, and overlaps no
//! other; while it is bound, Python cannot resize or free its memory.

use std::ptr::NonNull;
use std::slice;

use minisgl_core::{Limits, RingEntry};
use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A writable array of `len` elements, owned by Python.
pub(crate) struct Array<T: Element> {
    data: NonNull<T>,
    len: usize,
    _owner: PyBuffer<T>, // keeps the memory allocated
}

// SAFETY: the memory belongs to the buffer's owner, which any thread may hold; it is only touched through `&mut self`
// of the Python object, under the GIL.
unsafe impl<T: Element + Send> Send for Array<T> {}
// SAFETY: no element is reachable through `&self`.
unsafe impl<T: Element + Sync> Sync for Array<T> {}

impl<T: Element> Array<T> {
    /// Binds an array of at least `needed` elements. Raises `ValueError`, with `name` in the message, if it is unfit.
    pub fn bind(array: &Bound<'_, PyAny>, name: &str, needed: usize) -> PyResult<Self> {
        let refuse = |reason: &str| Err(PyValueError::new_err(format!("{name}: {reason}")));
        let Some(buffer) = PyBuffer::<T>::get(array).ok().filter(|buffer| is_native(buffer)) else {
            return refuse("not an array of the right type");
        };
        if buffer.readonly() {
            return refuse("not writable");
        }
        if !buffer.is_c_contiguous() {
            return refuse("not contiguous");
        }
        if buffer.item_count() < needed {
            return refuse(&format!("{} items, {needed} are needed", buffer.item_count()));
        }
        let Some(data) = NonNull::new(buffer.buf_ptr().cast::<T>()) else {
            return refuse("has no memory");
        };
        Ok(Self {
            data,
            len: buffer.item_count(),
            _owner: buffer,
        })
    }

    /// Binds the attribute `name` of a ring entry, with at least `needed(name)` elements.
    fn of(entry: &Bound<'_, PyAny>, name: &str, needed: impl Fn(&str) -> usize) -> PyResult<Self> {
        Self::bind(&entry.getattr(name)?, name, needed(name))
    }

    fn range(&self) -> (usize, usize) {
        let start = self.data.addr().get();
        (start, start + self.len * size_of::<T>())
    }

    /// Returns the elements, mutable for the duration of a call.
    pub fn as_mut(&mut self) -> &mut [T] {
        // SAFETY: `bind` checked `len` contiguous, writable, aligned elements at `data`, which `_owner` keeps
        // allocated; the GIL is held, so no Python code writes meanwhile, or the caller has the only reference;
        // `Ring::bind` checked that no two arrays overlap.
        unsafe { slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

macro_rules! ring_arrays {
    ($($name:ident)*) => {
        /// Arrays of one ring entry: the attributes of Python's `RingEntry`.
        struct BoundEntry {
            $($name: Array<i32>,)*
            assigned_ids: Array<i64>,
        }

        impl BoundEntry {
            /// Binds all arrays. `needed(name)` returns the minimum element count of the array `name`.
            fn bind(entry: &Bound<'_, PyAny>, needed: impl Fn(&str) -> usize) -> PyResult<Self> {
                Ok(Self {
                    $($name: Array::of(entry, stringify!($name), &needed)?,)*
                    assigned_ids: Array::of(entry, "assigned_ids", &needed)?,
                })
            }

            fn ranges(&self) -> impl Iterator<Item = (usize, usize)> {
                [$(self.$name.range(),)* self.assigned_ids.range()].into_iter()
            }

            fn as_mut(&mut self) -> RingEntry<'_> {
                RingEntry {
                    $($name: self.$name.as_mut(),)*
                    assigned_ids: self.assigned_ids.as_mut(),
                }
            }
        }
    };
}

ring_arrays! {
    input_ids positions out_loc req_slots seq_lens extend_lens qo_indptr kv_indptr last_page_len sample_rows
    page_table_updates page_ids assigned freed state_begins state_saves page_loads
}

/// Ring of step arrays, used in turn.
pub(crate) struct Ring {
    entries: Vec<BoundEntry>,
}

impl Ring {
    /// Binds `ring`, a sequence of objects with the arrays as attributes. Raises `ValueError` if an array does not
    /// qualify, two overlap, or there are fewer than 2 entries.
    pub fn bind(ring: &Bound<'_, PyAny>, limits: &Limits, max_padded_rows: usize) -> PyResult<Self> {
        let rows = limits.max_rows.max(max_padded_rows);
        let tokens = limits.max_tokens + rows;
        let needed = |name: &str| match name {
            "input_ids" | "positions" | "out_loc" => tokens,
            "qo_indptr" | "kv_indptr" => rows + 1,
            "page_table_updates" => 3 * rows,
            "page_ids" => limits.max_page_changes(),
            "assigned" | "state_begins" => 2 * limits.max_rows,
            "state_saves" => 3 * limits.num_checkpoints,
            "page_loads" => 3 * limits.max_rows,
            "assigned_ids" | "freed" => limits.max_rows,
            _ => rows,
        };
        let entries = ring.try_iter()?.map(|one| BoundEntry::bind(&one?, needed));
        let entries: Vec<_> = entries.collect::<PyResult<_>>()?;
        if entries.len() < 2 {
            return Err(PyValueError::new_err(format!(
                "ring: {} entries, at least 2",
                entries.len()
            )));
        }
        let ring = Self { entries };
        ring.check_overlaps()?;
        Ok(ring)
    }

    fn check_overlaps(&self) -> PyResult<()> {
        let mut ranges: Vec<_> = self.entries.iter().flat_map(BoundEntry::ranges).collect();
        ranges.sort_unstable();
        if ranges.windows(2).any(|pair| pair[1].0 < pair[0].1) {
            return Err(PyValueError::new_err("ring: two arrays share memory"));
        }
        Ok(())
    }

    /// Returns the ring index of a step: its number modulo the number of entries.
    pub fn index(&self, step: i64) -> usize {
        let turns = i64::try_from(self.entries.len()).unwrap_or(i64::MAX);
        usize::try_from(step.rem_euclid(turns)).unwrap_or(0)
    }

    /// Returns the arrays of entry `index`, for the duration of a call.
    pub fn entry(&mut self, index: usize) -> RingEntry<'_> {
        self.entries[index].as_mut()
    }
}

/// Returns true if the elements have this machine's byte order, which PyO3 does not check.
fn is_native<T: Element>(buffer: &PyBuffer<T>) -> bool {
    let foreign: &[u8] = if cfg!(target_endian = "little") { b">!" } else { b"<" };
    buffer
        .format()
        .to_bytes()
        .first()
        .is_none_or(|order| !foreign.contains(order))
}

/// One-dimensional int32 array of the caller, read for the duration of a call.
pub(crate) struct View {
    buffer: PyBuffer<i32>,
}

impl View {
    /// Returns a view of `array`, or `None` if it is not a contiguous one-dimensional int32 array.
    pub fn of(array: &Bound<'_, PyAny>) -> Option<Self> {
        let buffer = PyBuffer::<i32>::get(array).ok()?;
        (buffer.dimensions() == 1 && buffer.is_c_contiguous() && is_native(&buffer)).then_some(Self { buffer })
    }

    pub fn as_slice(&self, _py: Python<'_>) -> &[i32] {
        let len = self.buffer.item_count();
        if len == 0 {
            return &[]; // an empty array may have no memory
        }
        // SAFETY: `View::of` checked that the buffer has contiguous int32 elements, and it keeps them allocated; the
        // GIL is held, and no Python code runs while the slice exists.
        unsafe { slice::from_raw_parts(self.buffer.buf_ptr().cast::<i32>(), len) }
    }
}
