//! Matrices with a row per token of a step, which threads write in disjoint parts.
//!
//! Invariants: rows begin at cache lines and have zero padding that is never overwritten; memory grows, never shrinks.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::cell::UnsafeCell;

/// Cache line of elements.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

const LINE: usize = 16;

/// Matrix [rows, stride] of f32 that threads write without locks, each its own part.
pub struct Grid {
    lines: Vec<UnsafeCell<Line>>,
    stride: usize,
}

// SAFETY: the cells are reached through raw pointers only, by code that states why no other thread touches the same
// elements.
#[allow(unsafe_code)]
unsafe impl Sync for Grid {}

impl Grid {
    /// Creates an empty grid with rows of `width` elements, padded to whole panels and blocks.
    pub fn new(width: usize) -> Self {
        Self {
            lines: Vec::new(),
            stride: width.next_multiple_of(2 * LINE),
        }
    }

    /// Grows the grid to at least `rows` rows. New rows are zero.
    pub fn reserve(&mut self, rows: usize) {
        let lines = rows * self.stride / LINE;
        if self.lines.is_empty() {
            self.lines = zeroed(lines);
        } else if lines > self.lines.len() {
            self.lines.resize_with(lines, || UnsafeCell::new(Line([0.0; LINE])));
        }
    }

    /// Returns the elements from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Returns the address of an element. Panics if it is beyond the reserved rows.
    #[inline]
    pub fn at(&self, row: usize, column: usize) -> *mut f32 {
        let index = row * self.stride + column;
        assert!(
            column <= self.stride && index <= self.lines.len() * LINE,
            "row {row}, column {column} of a grid"
        );
        let start: *mut f32 = UnsafeCell::raw_get(self.lines.as_ptr()).cast();
        start.wrapping_add(index)
    }

    /// Returns the first `count` rows, exclusively.
    pub fn rows(&mut self, count: usize) -> impl Iterator<Item = &mut [f32]> {
        self.at(count, 0);
        let (start, numbers) = (self.at(0, 0), count * self.stride);
        // SAFETY: the range is within the memory, and `&mut self` is exclusive.
        #[allow(unsafe_code)]
        let all = unsafe { std::slice::from_raw_parts_mut(start, numbers) };
        all.chunks_exact_mut(self.stride)
    }
}

/// Returns zeros that large allocations take from the system without a write: the pages are touched by the threads that
/// use them. (A vision tower begins with hundreds of MB.)
fn zeroed(lines: usize) -> Vec<UnsafeCell<Line>> {
    let layout = Layout::array::<UnsafeCell<Line>>(lines).ok();
    let Some(layout) = layout.filter(|layout| layout.size() > 0) else {
        return Vec::new();
    };
    // SAFETY: the layout is not empty; zeros are valid lines, and the memory is that of a `Vec` of this length.
    #[allow(unsafe_code)]
    unsafe {
        let start = alloc_zeroed(layout).cast::<UnsafeCell<Line>>();
        if start.is_null() {
            handle_alloc_error(layout);
        }
        Vec::from_raw_parts(start, lines, lines)
    }
}
