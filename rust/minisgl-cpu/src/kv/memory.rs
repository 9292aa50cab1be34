//! Zeroed memory that the system hands out page by page as it is touched.

#![allow(unsafe_code)]

#[cfg(all(unix, not(miri)))]
type Held = memmap2::MmapMut;
#[cfg(not(all(unix, not(miri))))]
type Held = Vec<u64>;

pub(super) struct Zeroed {
    at: *mut u8,
    _held: Held,
}

// SAFETY: plain memory; who writes where is the business of the unsafe functions above.
unsafe impl Send for Zeroed {}
// SAFETY: as above.
unsafe impl Sync for Zeroed {}

impl Zeroed {
    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.at
    }

    #[cfg(all(unix, not(miri)))]
    pub(super) fn new(bytes: usize) -> Option<Self> {
        let mut options = memmap2::MmapOptions::new();
        let mut held = options.len(bytes).no_reserve_swap().map_anon().ok()?;
        // A refusal costs speed only.
        #[cfg(target_os = "linux")]
        let _ = held.advise(memmap2::Advice::HugePage);
        Some(Self {
            at: held.as_mut_ptr(),
            _held: held,
        })
    }

    #[cfg(not(all(unix, not(miri))))]
    pub(super) fn new(bytes: usize) -> Option<Self> {
        let mut held = Vec::new();
        held.try_reserve_exact(bytes.div_ceil(8)).ok()?;
        held.resize(bytes.div_ceil(8), 0);
        Some(Self {
            at: held.as_mut_ptr().cast(),
            _held: held,
        })
    }
}
