//! KV pages and recurrent states on disk: a prefix that was computed once is available after a restart, after an
//! eviction, and to other processes. The engine decides which pages are stored. Start with `store`, then `folder`, the
//! format on disk.
//!
//! Invariants: what is read is what was written under its key, or nothing; computing threads never wait for the disk.

mod folder;
mod keeper;
mod key;
mod store;

pub use folder::{Folder, Kind, Totals};
pub use keeper::Keeper;
pub use key::{Key, digest_of_files, first_key, first_key_in, keys, next_key};
pub use store::{Counts, Staged, Store};
