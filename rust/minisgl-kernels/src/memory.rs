//! Zeroed memory for weights, activations, KV pages and states: aligned to cache lines and on huge pages if possible.
//!
//! Invariants: every allocation is zero at first and has one owner; its mapping is returned to the system when the last
//! allocation in it is dropped. Pages are first touched by the code that writes to them, not here.

use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Alignment of every allocation in bytes: a cache line, which is also the widest vector.
pub const ALIGN: usize = 64;

/// Bytes of a mapping from which small allocations are made, so that they share huge pages.
const SHARED: usize = if cfg!(miri) { 4 << 20 } else { 64 << 20 };

/// Mapping for small allocations (kept alive by the allocations, not by this), and the bytes of it in use.
static CURRENT: Mutex<(Weak<Mapping>, usize)> = Mutex::new((Weak::new(), 0));

/// Owned zeroed bytes, 64-byte aligned.
pub struct Zeroed {
    start: *mut u8,
    len: usize,
    _mapping: Arc<Mapping>,
}

// SAFETY: a `Zeroed` is the only way to its bytes, as a `Vec<u8>` is, and keeps their mapping alive.
unsafe impl Send for Zeroed {}
// SAFETY: through `&Zeroed` bytes are only read; writing through `as_ptr` is the writer's responsibility.
unsafe impl Sync for Zeroed {}

impl Zeroed {
    /// Allocates `len` zero bytes. Panics if the system refuses, like `Vec`.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let need = len.max(1).next_multiple_of(ALIGN);
        if need > SHARED / 4 {
            return Self::carve(Arc::new(Mapping::held(need)), 0, len);
        }
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mapping) = current.0.upgrade()
            && mapping.len - current.1 >= need
        {
            let at = current.1;
            current.1 += need;
            return Self::carve(mapping, at, len);
        }
        let mapping = Arc::new(Mapping::held(SHARED));
        *current = (Arc::downgrade(&mapping), need);
        Self::carve(mapping, 0, len)
    }

    fn carve(mapping: Arc<Mapping>, at: usize, len: usize) -> Self {
        Self {
            // SAFETY: `at + len` lies in the mapping: checked by the caller.
            start: unsafe { mapping.start.add(at) },
            len,
            _mapping: mapping,
        }
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the size is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` initialized bytes that this value owns.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// Returns the bytes for writing.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialized bytes that this value owns and has lent to nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// Zero bytes that take no memory until they are written; may be larger than the machine's memory.
pub struct Reserved(Mapping);

impl Reserved {
    /// Maps `len` bytes of zeros. `None` if the system refuses.
    #[must_use]
    pub fn new(len: usize) -> Option<Self> {
        Mapping::new(len, true).map(Self)
    }

    /// Returns the address of the first byte, aligned to cache lines. The caller must prevent conflicting writes.
    #[must_use]
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.start
    }
}

/// Zero bytes mapped from the system; `whole` is the address and size of the mapping before alignment.
struct Mapping {
    start: *mut u8,
    len: usize,
    whole: (*mut u8, usize),
}

// SAFETY: only an address and its owner; the allocations in it govern access to the bytes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn held(len: usize) -> Self {
        Self::new(len, false).expect("memory from the system")
    }

    /// Maps `len` bytes, or returns `None` if the system refuses. `overcommit`: allow more than the machine's memory.
    fn new(len: usize, overcommit: bool) -> Option<Self> {
        let size = len.checked_add(system::ALIGN)?;
        let at = system::map(size, overcommit)?;
        Some(Self {
            // SAFETY: the mapping is larger than requested by the alignment.
            start: unsafe { at.add(at.align_offset(system::ALIGN).min(system::ALIGN)) },
            len,
            whole: (at, size),
        })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it came from `map`, and nothing uses it any more.
        unsafe { system::unmap(self.whole.0, self.whole.1) };
    }
}

/// Memory mappings of Linux, by libc functions that every Rust program links: no crate has to be built before this one.
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
mod system {
    use std::ffi::{c_int, c_void};

    /// Alignment in bytes: a huge page.
    pub const ALIGN: usize = 2 << 20;

    const READ_AND_WRITE: c_int = 1 | 2;
    const PRIVATE_AND_ANONYMOUS: c_int = 2 | 0x20;
    const NO_RESERVE: c_int = 0x4000;
    const HUGE_PAGES: c_int = 14;
    const FAILED: *mut c_void = usize::MAX as *mut c_void;

    unsafe extern "C" {
        fn mmap(at: *mut c_void, len: usize, access: c_int, flags: c_int, file: c_int, offset: i64) -> *mut c_void;
        fn madvise(at: *mut c_void, len: usize, advice: c_int) -> c_int;
        fn munmap(at: *mut c_void, len: usize) -> c_int;
    }

    pub fn map(len: usize, overcommit: bool) -> Option<*mut u8> {
        let flags = PRIVATE_AND_ANONYMOUS | if overcommit { NO_RESERVE } else { 0 };
        // SAFETY: a mapping of its own, where the system wants it; the advice is about that.
        unsafe {
            let at = mmap(std::ptr::null_mut(), len, READ_AND_WRITE, flags, -1, 0);
            if at == FAILED {
                return None;
            }
            // Failure is ignored: memory without huge pages is only slower.
            let _ = madvise(at, len, HUGE_PAGES);
            Some(at.cast())
        }
    }

    /// Unmaps memory.
    ///
    /// # Safety
    /// `map` returned it with that length, and nothing uses it any more.
    pub unsafe fn unmap(at: *mut u8, len: usize) {
        // SAFETY: upheld by the caller.
        let _ = unsafe { munmap(at.cast(), len) };
    }
}

/// Memory of the global allocator, for other systems.
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
mod system {
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    pub use crate::memory::ALIGN;

    // Allocates without alignment: the allocator would zero, and so touch, aligned memory itself.
    fn layout(len: usize) -> Option<Layout> {
        Layout::from_size_align(len, 1).ok()
    }

    pub fn map(len: usize, _beyond: bool) -> Option<*mut u8> {
        // SAFETY: it is not empty: it has room for the alignment.
        let at = unsafe { alloc_zeroed(layout(len)?) };
        (!at.is_null()).then_some(at)
    }

    /// Frees memory.
    ///
    /// # Safety
    /// `map` returned it with that length, and nothing uses it any more.
    pub unsafe fn unmap(at: *mut u8, len: usize) {
        if let Some(layout) = layout(len) {
            // SAFETY: upheld by the caller.
            unsafe { dealloc(at, layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_zero_aligned_and_disjoint() {
        let mut pieces: Vec<Zeroed> = [1, 63, 64, 65, 0, 1000].into_iter().map(Zeroed::new).collect();
        for (i, piece) in pieces.iter_mut().enumerate() {
            assert_eq!(piece.as_ptr() as usize % ALIGN, 0);
            assert!(piece.as_slice().iter().all(|&byte| byte == 0));
            piece.as_mut_slice().fill(i as u8 + 1);
        }
        for (i, piece) in pieces.iter().enumerate() {
            assert!(piece.as_slice().iter().all(|&byte| byte == i as u8 + 1));
        }
    }

    #[test]
    fn a_large_allocation_has_a_mapping_of_its_own() {
        let piece = Zeroed::new(SHARED / 2);
        assert!(piece.as_slice()[..100].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn reserving_more_than_the_memory_succeeds_and_absurd_sizes_fail() {
        assert!(Reserved::new(usize::MAX).is_none() && Reserved::new(isize::MAX as usize).is_none());
        let size = if cfg!(all(target_os = "linux", not(miri))) {
            1 << 40
        } else {
            1 << 20
        };
        let reserved = Reserved::new(size).unwrap();
        // SAFETY: the last byte of it.
        unsafe {
            let last = reserved.as_ptr().add(size - 1);
            assert_eq!((*last, reserved.as_ptr() as usize % ALIGN), (0, 0));
            *last = 1;
        }
    }
}
