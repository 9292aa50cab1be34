//! Attention over the KV pool: any mix of prefill and decode rows in one step.
//!
//! A step's work is planned once ([`Plan::build`]), then every layer runs the plan: threads claim units by index
//! ([`Attention::run_unit`], 0..[`Plan::units`]), and after all are done, merges ([`Attention::merge`],
//! 0..[`Plan::merges`]; none in most steps).
//!
//! Results of a row (a token and a head): positions are split into chunks of 128, at multiples of 128. In a chunk, a
//! score is the sum over the head's elements in order, the weights are 2^(score - the chunk's largest), their sum goes
//! over 16 lanes, and the values are summed position by position. Chunks are merged from the left; an attention sink
//! comes last. So neither the other rows, nor how a prompt was chunked, nor the page size, the threads or the
//! instruction set change a bit.
//!
//! Invariants: a row attends to the positions up to its own (in an encoder: to all of its sequence; in an image: to its
//! end) within its layer's window; nothing is allocated after the plan is built.

mod api;
mod kernel;
mod load;
mod plan;
mod unit;

pub use plan::{Plan, Rows};
pub use unit::{Attention, Call, Distances, MAX_GROUP, Scratch};
