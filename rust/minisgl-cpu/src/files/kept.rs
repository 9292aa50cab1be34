//! Helpers for cache files: a file appears whole or not at all (`Partial`), and a checksum detects damage (`Checksum`).

use std::fs;
use std::path::{Path, PathBuf};

use minisgl_kernels::TensorView;

use crate::{Error, Result};

/// File name extension of incomplete cache files.
pub(crate) const PARTIAL: &str = ".partial";

/// Temporary file of this process, deleted on drop unless it was renamed to its final name.
pub(crate) struct Partial(PathBuf);

impl Partial {
    /// Names a temporary file next to `file`. Creates the folder if needed, but not the file.
    pub fn for_file(file: &Path) -> Result<Self> {
        let folder = file.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(|error| at(folder, &error))?;
        let mut name = file.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}{PARTIAL}", std::process::id()));
        Ok(Self(folder.join(name)))
    }

    /// Returns the path of the temporary file.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Renames the temporary file to `file`, atomically. Processes that have the old file mapped keep its content.
    pub fn persist(self, file: &Path) -> Result<()> {
        fs::rename(&self.0, file).map_err(|error| at(file, &error))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        let _renamed = fs::remove_file(&self.0);
    }
}

/// Converts an I/O error into a file error with the path in its text.
pub(crate) fn at(path: &Path, error: &std::io::Error) -> Error {
    Error::file(format!("{}: {error}", path.display()))
}

/// Returns the checksum of `bytes`.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    let mut sum = Checksum::new();
    sum.add(bytes);
    sum.end()
}

/// Incremental checksum, the same however the bytes are split into calls. It detects damage, not tampering.
pub(crate) struct Checksum {
    lanes: [u64; 4],
    rest: Vec<u8>,
    len: u64,
}

impl Checksum {
    const BYTES: usize = 32;

    pub fn new() -> Self {
        Self {
            lanes: [1, 2, 3, 4],
            rest: Vec::with_capacity(Self::BYTES),
            len: 0,
        }
    }

    /// Appends bytes to the checksummed data.
    pub fn add(&mut self, mut bytes: &[u8]) {
        self.len += bytes.len() as u64;
        if !self.rest.is_empty() {
            let (first, later) = bytes.split_at(bytes.len().min(Self::BYTES - self.rest.len()));
            self.rest.extend_from_slice(first);
            bytes = later;
            if self.rest.len() < Self::BYTES {
                return;
            }
            let full = std::mem::take(&mut self.rest);
            self.whole(&full);
        }
        let (whole, rest) = bytes.split_at(bytes.len() / Self::BYTES * Self::BYTES);
        self.whole(whole);
        self.rest.extend_from_slice(rest);
    }

    fn whole(&mut self, bytes: &[u8]) {
        let mut lanes = self.lanes;
        for block in bytes.chunks_exact(Self::BYTES) {
            for (lane, word) in lanes.iter_mut().zip(block.chunks_exact(8)) {
                let mut number = [0; 8];
                number.copy_from_slice(word);
                // an odd multiplier with well mixed bits: each word changes all later bits of its lane
                *lane = (*lane ^ u64::from_le_bytes(number))
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    .rotate_left(29);
            }
        }
        self.lanes = lanes;
    }

    /// Adds a tensor's fingerprint: name, type, `usage`, shape, and 64 bytes at each of `num_samples` offsets.
    pub fn sample(&mut self, tensor: &TensorView<'_>, usage: &str, num_samples: usize) {
        const BYTES: usize = 64;
        self.add(tensor.name().as_bytes());
        self.add(tensor.kind().name().as_bytes());
        self.add(usage.as_bytes());
        for dim in tensor.shape() {
            self.add(&(*dim as u64).to_le_bytes());
        }
        let data = tensor.data();
        for index in 0..num_samples {
            let start = data.len() / num_samples * index;
            self.add(&data[start..data.len().min(start + BYTES)]);
        }
    }

    /// Returns the checksum of all bytes added so far.
    pub fn end(&self) -> u64 {
        let mut last = self.rest.clone();
        last.resize(Self::BYTES, 0);
        let mut sum = Self {
            lanes: self.lanes,
            rest: Vec::new(),
            len: 0,
        };
        sum.whole(&last);
        let [a, b, c, d] = sum.lanes;
        [a, b, c, d, self.len].iter().fold(0, |sum: u64, &word| {
            (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31)
        })
    }
}
