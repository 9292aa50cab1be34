//! Work on the process's own OpenMP threads (libgomp), which other libraries compute with.
//!
//! These threads spin for milliseconds when idle, so a second pool next to them gets half of each core.
//!
//! Invariants: no panic unwinds into C.

#![allow(unsafe_code)]

use std::ffi::{c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// Type of libgomp's `GOMP_parallel(function, data, threads, flags)`, which calls `function(data)` on all threads.
type Parallel = unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// Handle to the process's OpenMP threads.
pub struct OpenMp {
    parallel: Parallel,
    threads: c_uint,
}

struct Call<'a> {
    job: &'a (dyn Fn() + Sync),
    panicked: AtomicBool,
}

impl OpenMp {
    /// Creates a handle for `threads` threads. `None` if `address` is null.
    ///
    /// # Safety
    /// `address` must be that of `GOMP_parallel`, in a library that stays loaded.
    #[must_use]
    pub unsafe fn new(address: usize, threads: usize) -> Option<Self> {
        let threads = c_uint::try_from(threads.max(1)).ok()?;
        // SAFETY: guaranteed by the caller; a null pointer becomes `None`.
        let parallel: Option<Parallel> = unsafe { std::mem::transmute(address) };
        parallel.map(|parallel| Self { parallel, threads })
    }

    /// Returns the number of threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads as usize
    }

    /// Calls `job` on all threads at once and waits for them. A panic becomes an error.
    pub fn run(&self, job: &(dyn Fn() + Sync)) -> Result<()> {
        let mut call = Call {
            job,
            panicked: AtomicBool::new(false),
        };
        // SAFETY: `call` lives until all threads are done, which is when the function returns.
        unsafe { (self.parallel)(run_one, (&raw mut call).cast(), self.threads, 0) };
        if call.panicked.into_inner() {
            return Err(Error::step("the matmul panicked"));
        }
        Ok(())
    }
}

unsafe extern "C" fn run_one(data: *mut c_void) {
    // SAFETY: `run` passed a `Call`, which outlives this.
    let call = unsafe { &*data.cast::<Call<'_>>() };
    if catch_unwind(AssertUnwindSafe(call.job)).is_err() {
        call.panicked.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Stands in for libgomp's `GOMP_parallel`, with threads created for the call.
    unsafe extern "C" fn parallel(
        function: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
        threads: c_uint,
        _flags: c_uint,
    ) {
        let data = data as usize;
        std::thread::scope(|scope| {
            for _ in 0..threads {
                // SAFETY: the caller's data may be shared by threads.
                scope.spawn(move || unsafe { function(data as *mut c_void) });
            }
        });
    }

    #[test]
    fn run_calls_job_on_every_thread_and_returns_panics_as_errors() {
        // SAFETY: `parallel` has the contract of GOMP_parallel: it calls the function on all threads and waits.
        let team = unsafe { OpenMp::new(parallel as *const () as usize, 3) }.unwrap();
        let calls = AtomicUsize::new(0);
        let count = || {
            calls.fetch_add(1, Ordering::Relaxed);
        };
        team.run(&count).unwrap();
        assert_eq!((team.threads(), calls.load(Ordering::Relaxed)), (3, 3));
        assert!(team.run(&|| panic!("as a test wants it")).is_err());
        team.run(&count).unwrap();
        // SAFETY: address 0 is rejected.
        assert!(unsafe { OpenMp::new(0, 3) }.is_none());
    }
}
