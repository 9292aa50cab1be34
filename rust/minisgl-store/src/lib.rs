//! Pages of KV, and states, on disk: a prefix that was computed once comes back after a restart, an eviction, in another
//! process. Which pages are kept is the engine's to say. Start with `store`, then `folder`, what lies on the disk.
//!
//! Invariants: what is read is what was written under its key, or nothing; nobody who computes waits for the disk.

mod folder;
mod keeper;
mod key;
mod store;

pub use folder::{Folder, Kind, Totals};
pub use keeper::Keeper;
pub use key::{Key, digest_of_files, first_key, first_key_in, keys, next_key};
pub use store::{Counts, Staged, Store};
