//! Numbers on cache lines of their own, so that no vector lies on two.
//!
//! Invariants: the first number begins a line.

use std::cell::UnsafeCell;

use super::lanes::LANES;

#[repr(align(64))]
#[derive(Debug)]
struct Line {
    // Reached through pointers.
    _numbers: UnsafeCell<[f32; LANES]>,
}

/// Numbers in whole cache lines.
#[derive(Debug, Default)]
pub(super) struct Lines(Vec<Line>);

// SAFETY: shared numbers are reached only through `shared`, whose users are unsafe and say who writes where.
unsafe impl Sync for Lines {}

impl Lines {
    pub fn new(numbers: usize) -> Self {
        let mut lines = Self::default();
        lines.grow(numbers);
        lines
    }

    /// Room for at least so many; what was there is kept, what is new is 0.
    pub fn grow(&mut self, numbers: usize) {
        let lines = numbers.div_ceil(LANES);
        if self.0.len() < lines {
            self.0.resize_with(lines, || Line {
                _numbers: UnsafeCell::new([0.0; LANES]),
            });
        }
    }

    pub fn len(&self) -> usize {
        self.0.len() * LANES
    }

    #[inline(always)]
    pub fn as_ptr(&self) -> *const f32 {
        self.0.as_ptr().cast()
    }

    #[inline(always)]
    pub fn as_mut_ptr(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }

    /// To be written by several threads, each in places of its own.
    #[inline(always)]
    pub fn shared(&self) -> *mut f32 {
        UnsafeCell::raw_get(self.0.as_ptr().cast::<UnsafeCell<f32>>())
    }
}
