//! Attention over the KV pool: any mix of prefill and decode rows in one step.
//!
//! What a step needs is planned once ([`Plan::build`]), then every layer runs the plan: threads claim units by number
//! ([`Attention::run_unit`], 0..[`Plan::units`]), and after all are done merges ([`Attention::merge`],
//! 0..[`Plan::merges`]; none in most steps).
//!
//! The numbers of a row (a token and a head): positions are cut into chunks of 128, at multiples of 128. In a chunk, a score
//! is the sum over the head's numbers in order, the weights are 2^(score - the chunk's largest), their sum goes over
//! sixteen lanes, the values are summed position by position. Chunks are joined from the left, a sink comes last. So neither the other rows,
//! nor how a prompt was cut, nor the page size, nor the threads, nor the instruction set change a bit.
//!
//! Invariants: a row sees the positions up to its own, or of an encoder all of its text, within its layer's window; no allocation after the plan is built.

mod api;
mod kernel;
mod load;
mod plan;
mod unit;

pub use plan::{Plan, Rows};
pub use unit::{Attention, Call, Distances, MAX_GROUP, Scratch};
