//! The prefix cache: a radix tree over whole pages (`tree`) and the order in which it gives pages back (`evict`).

mod evict;
#[cfg(test)]
mod tests;
mod tree;

pub(crate) use tree::{Match, NO_NODE, NodeId, ROOT, RadixTree};
