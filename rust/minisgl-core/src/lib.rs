//! The scheduler as pure logic: no Python, no I/O, no clock, no environment, no unsafe.
//!
//! One module here is one module of Python (`minisgl.scheduler` and its `reference`), with the same names, policies,
//! orders and tie-breaks: the same events give the same plans and buffers, bit for bit.

#![forbid(unsafe_code)]
#![deny(clippy::as_conversions)] // `numbers` names them

mod admission;
mod api;
mod background;
mod decode_set;
mod drafter;
mod drafts;
mod faulty;
mod inputs;
mod invariants;
mod metadata;
mod numbers;
mod page_pool;
mod pins;
mod radix;
mod ranking;
mod request;
mod retraction;
mod scheduler;
mod slots;
mod state;
mod step;

pub use api::{CachePolicy, Config, Error, Result, SchedulePolicy, Stats};
#[cfg(feature = "test-panics")]
pub use faulty::{Call, Moment};
pub use inputs::{CheckedEvents, not_ids};
#[doc(hidden)]
pub use radix::timed::TimedTree;
pub use radix::{TreeNode, TreeView};
pub use scheduler::Scheduler;
pub use step::{
    Arrival, Draft, Entry, Event, FinishReason, Limits, PagesRead, Plan, RESERVED_OUTPUT, RingEntry, Sampled,
    TokenBudget,
};

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
        profile: if cfg!(debug_assertions) { "debug" } else { "release" },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_follows_the_compiler() {
        let expected = if cfg!(debug_assertions) { "debug" } else { "release" };
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
