//! Keys of pages: hashes over everything that their numbers depend on.
//!
//! Invariants: two pages have one key only if the same model, by the same rules of computing, made them of the same
//! tokens, all those before them among these.

use blake3::Hasher;

/// Of a page.
pub type Key = [u8; 32];

/// What stands before the first page of a text. `identity` says what computes, and how.
#[must_use]
pub fn first_key(identity: &[u8]) -> Key {
    blake3::derive_key("minisgl pages of KV, version 1", identity)
}

/// The key of the page that holds `tokens`, behind the page with the key `before`.
#[must_use]
pub fn next_key(before: &Key, tokens: &[i32]) -> Key {
    let mut hasher = Hasher::new_keyed(before);
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// The keys of the whole pages of `tokens`.
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

/// A digest of long data, such as the files of a model.
#[derive(Default)]
pub struct Digest(Hasher);

impl Digest {
    /// More of the data.
    pub fn update(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    /// Of all so far.
    #[must_use]
    pub fn finish(&self) -> [u8; 32] {
        *self.0.finalize().as_bytes()
    }
}
