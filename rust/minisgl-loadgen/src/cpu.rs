//! Clocks that the standard library has not: the CPU time of this thread, the monotonic clock as a number.

use std::time::Duration;

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
    Duration::try_from(clock_gettime(clock)).map_or(0.0, |time| time.as_secs_f64())
}
