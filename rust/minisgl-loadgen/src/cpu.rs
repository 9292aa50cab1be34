//! Clocks that the standard library has not: the CPU time of this thread, the monotonic clock as a number.

/// CPU seconds, user and system, that the calling thread has used.
pub fn thread_cpu_s() -> f64 {
    read(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Seconds of the monotonic clock, the one that `Instant` and Python's `time.monotonic` read.
pub fn monotonic_s() -> f64 {
    read(libc::CLOCK_MONOTONIC)
}

#[allow(unsafe_code)]
fn read(clock: libc::clockid_t) -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec that the call writes and nobody else sees.
    let code = unsafe { libc::clock_gettime(clock, &mut time) };
    assert_eq!(code, 0, "the clock cannot be read");
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
