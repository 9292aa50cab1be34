//! Reads numbers and texts one after the other, never beyond the end.

use crate::{Error, Result};

/// What is left of a file.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }

    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// All that is left, not yet taken.
    pub(super) fn rest(&self) -> &'a [u8] {
        &self.bytes[self.at..]
    }

    /// The next `count` bytes, or an error that says in what the file ends.
    pub(super) fn take(&mut self, count: usize, what: &str) -> Result<&'a [u8]> {
        if count > self.left() {
            return Err(Error::file(format!("the file ends in {what}")));
        }
        let taken = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A length and so many bytes of UTF-8.
    pub(super) fn text(&mut self, what: &str) -> Result<&'a str> {
        let len = self.u64(what)?;
        let left = self.left();
        let Some(len) = usize::try_from(len).ok().filter(|&len| len <= left) else {
            return Err(Error::file(format!(
                "the file ends in {what}: a text of {len} bytes, {left} are left"
            )));
        };
        std::str::from_utf8(self.take(len, what)?).map_err(|error| Error::file(format!("{what} is not UTF-8: {error}")))
    }
}
