//! The control plane as pure logic: no Python, no I/O, no clock, no environment, no unsafe.
//!
//! One module here is one module of the Python reference (`minisgl.scheduler.reference`), with the same names, policies,
//! orders and tie-breaks: the same events give the same plans and buffers, bit for bit.

#![forbid(unsafe_code)]

mod admission;
mod config;
mod decode_set;
mod error;
mod faults;
mod inputs;
mod invariants;
mod metadata;
mod output;
mod page_pool;
mod pieces;
mod radix;
mod request;
mod retraction;
mod scheduler;
mod slots;

pub use config::{CachePolicy, Config, Limits};
pub use error::{Error, Result};
#[cfg(feature = "test-panics")]
pub use faults::{Call, Moment};
pub use inputs::{Arrival, Event, RESERVED_OUTPUT};
pub use metadata::{Plan, RingEntry};
pub use output::{Entry, FinishReason, Stats};
pub use pieces::{
    Candidate, Metadata, Room, make_input_mapping, make_metadata_buffers, make_positions,
    make_write_mapping, prefill_admission_plan,
};
pub use radix::{Handle, RadixCacheManager};
pub use scheduler::Scheduler;

/// What was compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildInfo {
    /// Version of the workspace.
    pub version: &'static str,
    /// `release` or `debug`; benchmarks refuse the latter.
    pub profile: &'static str,
}

/// The build of this crate.
#[must_use]
pub const fn build_info() -> BuildInfo {
    BuildInfo {
        version: env!("CARGO_PKG_VERSION"),
        profile: if cfg!(debug_assertions) {
            "debug"
        } else {
            "release"
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_follows_the_compiler() {
        let expected = if cfg!(debug_assertions) {
            "debug"
        } else {
            "release"
        };
        assert_eq!(build_info().profile, expected);
    }

    #[test]
    fn version_is_a_release_number() {
        let parts: Vec<u32> = build_info()
            .version
            .split('.')
            .filter_map(|part| part.parse().ok())
            .collect();
        assert_eq!(parts.len(), 3);
    }
}
