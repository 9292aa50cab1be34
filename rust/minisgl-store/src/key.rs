//! Keys of pages: hashes over everything that their contents depend on.
//!
//! Invariants: two pages have one key only if the same model, by the same rules of computing, made them in the same
//! namespace from the same tokens, including all tokens before them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, available_parallelism};

use blake3::Hasher;

/// BLAKE3 hash that is the key of a page or state.
pub type Key = [u8; 32];

/// Returns the root key, before the first page of a sequence. `identity` describes the model and how it computes.
#[must_use]
pub fn first_key(identity: &[u8]) -> Key {
    blake3::derive_key("minisgl pages of KV, version 1", identity)
}

/// Returns the root key of a namespace: sequences share pages only within their `space`. An empty one has `first`.
#[must_use]
pub fn first_key_in(first: &Key, space: &[u8]) -> Key {
    if space.is_empty() {
        return *first;
    }
    blake3::derive_key("minisgl space of pages, version 1", &[first, space].concat())
}

/// Returns the key of the page that holds `tokens`, after the page with the key `before`.
#[must_use]
pub fn next_key(before: &Key, tokens: &[i32]) -> Key {
    let mut hasher = Hasher::new_keyed(before);
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// Returns the keys of the full pages of `tokens`; `first` is the root key.
#[must_use]
pub fn keys(first: &Key, tokens: &[i32], page_size: usize) -> Vec<Key> {
    let mut last = *first;
    let pages = tokens.chunks_exact(page_size);
    pages
        .map(|page| {
            last = next_key(&last, page);
            last
        })
        .collect()
}

const STRETCH: usize = 4 << 20; // bytes of a file that are hashed separately, by several threads
const MAX_THREADS: usize = 4; // enough to hash faster than disks read

/// Returns the digest of the contents of all `files`, in order.
///
/// # Errors
/// A file cannot be read.
pub fn digest_of_files(files: &[PathBuf]) -> io::Result<Key> {
    let mut whole = Hasher::new();
    for path in files {
        let file = File::open(path)?;
        let stretches = stretches(&file, file.metadata()?.len())?;
        whole.update(&(stretches.len() as u64).to_le_bytes());
        for stretch in stretches {
            whole.update(&stretch);
        }
    }
    Ok(*whole.finalize().as_bytes())
}

fn stretches(file: &File, bytes: u64) -> io::Result<Vec<Key>> {
    let count = bytes.div_ceil(STRETCH as u64);
    let next = AtomicU64::new(0);
    let work = || -> io::Result<Vec<(u64, Key)>> {
        let (mut found, mut data) = (Vec::new(), vec![0; STRETCH]);
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return Ok(found);
            }
            let start = number * STRETCH as u64;
            let length = usize::try_from(bytes - start).map_or(STRETCH, |left| left.min(STRETCH));
            file.read_exact_at(&mut data[..length], start)?;
            found.push((number, *blake3::hash(&data[..length]).as_bytes()));
        }
    };
    let threads = available_parallelism().map_or(1, |cores| cores.get().min(MAX_THREADS));
    let mut all = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut all = work()?;
        for other in others {
            let found = other
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("a thread panicked")));
            all.append(&mut found?);
        }
        Ok::<_, io::Error>(all)
    })?;
    all.sort_unstable();
    Ok(all.into_iter().map(|(_, key)| key).collect())
}
