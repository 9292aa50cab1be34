//! The prefix cache: a radix tree over whole pages (`tree`) and the order in which it gives pages back (`evict`).

mod check;
mod evict;
mod nodes;
#[cfg(test)]
mod tests;
pub mod timed;
mod tree;
mod view;

pub(crate) use check::check_tree;
pub(crate) use nodes::{NO_NODE, Namespace, NodeId, ROOT};
pub(crate) use tree::{Match, RadixTree};
pub use view::{TreeNode, TreeView};
