//! Clocks that the standard library has not: the CPU time of this thread, the monotonic clock as a number.

use rustix::time::{ClockId, clock_gettime};

/// CPU seconds, user and system, that the calling thread has used.
pub fn thread_cpu_s() -> f64 {
    read(ClockId::ThreadCPUTime)
}

/// Seconds of the monotonic clock, the one that `Instant` and Python's `time.monotonic` read.
pub fn monotonic_s() -> f64 {
    read(ClockId::Monotonic)
}

fn read(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
