//! The scheduler as pure logic: no Python, no I/O, no clock, no environment, no unsafe.
//!
//! Each module mirrors a Python module (`minisgl.scheduler` and its `reference`), with the same names, policies, orders
//! and tie-breaks: the same events give the same plans and buffers, bit for bit. Engines, and all tensor work of a
//! step, belong elsewhere. Start with `api` and `scheduler`, next to the reference.

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
mod step_arrays;

pub use admission::{Candidate, ChunkLimits, PlannedChunk, prefill_admission_plan};
pub use api::{CachePolicy, Config, Error, Result, SchedulePolicy, Stats};
#[cfg(feature = "test-panics")]
pub use faulty::{Call, Moment};
pub use inputs::{CheckedEvents, invalid_token_ids};
pub use radix::{Handle, Match, RadixCacheManager, RadixTree, TreeNode, TreeView};
pub use scheduler::Scheduler;
pub use step::{
    Arrival, CommitEntry, Draft, Event, FinishReason, Limits, PagesRead, Plan, RESERVED_OUTPUT, RingEntry, Sampled,
    TokenBudget,
};
pub use step_arrays::{Metadata, make_input_mapping, make_metadata_buffers, make_positions, make_write_mapping};
