//! The prefix cache: a radix tree over whole pages (`tree`) and its eviction order (`evict`).

mod cache;
mod check;
mod checkpoints;
mod evict;

mod nodes;
mod states;
#[cfg(test)]
mod tests;
mod tree;
mod view;

pub use cache::{Handle, RadixCacheManager};
pub(crate) use check::check_tree;
pub(crate) use checkpoints::Checkpoints;
pub(crate) use nodes::{NO_CHECKPOINT, NO_NODE, Namespace, NodeId, ROOT, Slot};
pub use tree::{Match, RadixTree};
pub use view::{TreeNode, TreeView};
