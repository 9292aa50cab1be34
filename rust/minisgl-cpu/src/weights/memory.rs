//! Zeroed memory for weights and activations: aligned to cache lines and on huge pages where the system has them.
//!
//! Invariants: every piece is zero when it is handed out, has one owner, and its mapping is given back when the last
//! piece of it is dropped. Pages are touched by whoever writes to them first, not here.

use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Alignment of every piece: a cache line, which is also the widest vector.
pub const ALIGN: usize = 64;

/// Small pieces are cut from mappings of this size, so that they share huge pages.
const SHARED: usize = 64 << 20;

/// The mapping that pieces are cut from now (which the pieces keep alive, not this), and how much of it is given out.
static CURRENT: Mutex<(Weak<Mapping>, usize)> = Mutex::new((Weak::new(), 0));

/// Owned zeroed bytes, 64-byte aligned.
pub struct Zeroed {
    start: *mut u8,
    len: usize,
    _mapping: Arc<Mapping>,
}

// SAFETY: a `Zeroed` is the only way to its bytes, as a `Vec<u8>` is, and keeps their mapping alive.
unsafe impl Send for Zeroed {}
// SAFETY: through `&Zeroed` bytes are only read; who writes through `as_ptr` answers for it.
unsafe impl Sync for Zeroed {}

impl Zeroed {
    /// `len` zero bytes. Memory that the system refuses is a panic, as with `Vec`.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let need = len.max(1).next_multiple_of(ALIGN);
        if need > SHARED / 4 {
            return Self::cut(Arc::new(Mapping::new(need)), 0, len);
        }
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mapping) = current.0.upgrade()
            && mapping.len - current.1 >= need
        {
            let at = current.1;
            current.1 += need;
            return Self::cut(mapping, at, len);
        }
        let mapping = Arc::new(Mapping::new(SHARED));
        *current = (Arc::downgrade(&mapping), need);
        Self::cut(mapping, 0, len)
    }

    fn cut(mapping: Arc<Mapping>, at: usize, len: usize) -> Self {
        Self {
            // SAFETY: `at + len` lies in the mapping: checked by the caller.
            start: unsafe { mapping.start.add(at) },
            len,
            _mapping: mapping,
        }
    }

    /// Its first byte.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// How many bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` initialized bytes that this value owns.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// The bytes, to write.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialized bytes that this value owns and has lent to nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// Zero bytes from the system.
struct Mapping {
    start: *mut u8,
    len: usize,
    _held: Held,
}

// SAFETY: it is only an address and its owner; who uses the bytes is the pieces' business.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

#[cfg(all(unix, not(miri)))]
type Held = memmap2::MmapMut;

#[cfg(all(unix, not(miri)))]
impl Mapping {
    fn new(len: usize) -> Self {
        const HUGE: usize = 2 << 20;
        let mut map = memmap2::MmapMut::map_anon(len + HUGE).expect("memory from the system");
        // Without huge pages it is slower, nothing else.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let ahead = map.as_ptr().align_offset(HUGE).min(HUGE);
        Self {
            // SAFETY: the mapping is larger than asked for by what the alignment can take.
            start: unsafe { map.as_mut_ptr().add(ahead) },
            len,
            _held: map,
        }
    }
}

/// Without mappings: the allocator's memory.
#[cfg(any(not(unix), miri))]
type Held = Vec<u8>;

#[cfg(any(not(unix), miri))]
impl Mapping {
    fn new(len: usize) -> Self {
        let len = if cfg!(miri) { len.min(4 << 20) } else { len };
        let mut held = vec![0; len + ALIGN];
        let start = held.as_mut_ptr();
        Self {
            // SAFETY: the memory is larger than asked for by what the alignment can take.
            start: unsafe { start.add(start.align_offset(ALIGN).min(ALIGN)) },
            len,
            _held: held,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_zero_aligned_and_apart() {
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
    fn a_large_piece_has_a_mapping_of_its_own() {
        let piece = Zeroed::new(if cfg!(miri) { 1 << 16 } else { SHARED / 2 });
        assert!(piece.as_slice()[..100].iter().all(|&byte| byte == 0));
    }
}
