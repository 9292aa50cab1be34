//! Work on the threads of the process's own OpenMP (GNU's), which other libraries compute with.
//!
//! Those threads spin for milliseconds when they have nothing to do. A second set of threads beside them gets half of a
//! core: measured, a product on two threads then took as long as on one.
//!
//! Invariants: no panic passes through C.

#![allow(unsafe_code)]

use std::ffi::{c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// `GOMP_parallel` of libgomp's interface to compilers: calls a function with its data on so many threads.
type Parallel = unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// Where the threads are.
pub struct OpenMp {
    parallel: Parallel,
    threads: c_uint,
}

struct Call<'a> {
    job: &'a (dyn Fn() + Sync),
    panicked: AtomicBool,
}

impl OpenMp {
    /// # Safety
    /// `address` is that of `GOMP_parallel`, in a library that stays loaded.
    #[must_use]
    pub unsafe fn new(address: usize, threads: usize) -> Option<Self> {
        let threads = c_uint::try_from(threads.max(1)).ok()?;
        // SAFETY: the caller's; a null pointer is None.
        let parallel: Option<Parallel> = unsafe { std::mem::transmute(address) };
        parallel.map(|parallel| Self { parallel, threads })
    }

    /// How many there are.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads as usize
    }

    /// Call `job` on all of them at once. A panic is an error of the step.
    pub fn run(&self, job: &(dyn Fn() + Sync)) -> Result<()> {
        let mut call = Call {
            job,
            panicked: AtomicBool::new(false),
        };
        // SAFETY: `call` lives until all threads are done, which is when the function returns.
        unsafe { (self.parallel)(run_one, (&raw mut call).cast(), self.threads, 0) };
        if call.panicked.into_inner() {
            return Err(Error::step("the product panicked"));
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

    /// As libgomp's, on threads that are made for the call.
    unsafe extern "C" fn parallel(
        function: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
        threads: c_uint,
        _flags: c_uint,
    ) {
        let data = data as usize;
        std::thread::scope(|scope| {
            for _ in 0..threads {
                // SAFETY: the caller's data, which is shared.
                scope.spawn(move || unsafe { function(data as *mut c_void) });
            }
        });
    }

    #[test]
    fn a_job_runs_on_every_thread_and_a_panic_is_an_error() {
        // SAFETY: as that function, it calls another one on some threads and waits for them.
        let team = unsafe { OpenMp::new(parallel as *const () as usize, 3) }.unwrap();
        let calls = AtomicUsize::new(0);
        let count = || {
            calls.fetch_add(1, Ordering::Relaxed);
        };
        team.run(&count).unwrap();
        assert_eq!((team.threads(), calls.load(Ordering::Relaxed)), (3, 3));
        assert!(team.run(&|| panic!("as a test wants it")).is_err());
        team.run(&count).unwrap();
        // SAFETY: no address is no function.
        assert!(unsafe { OpenMp::new(0, 3) }.is_none());
    }
}
