//! What files of the cache have in common: they appear whole or not at all, and a checksum finds damage.

use std::fs;
use std::path::{Path, PathBuf};

use minisgl_kernels::TensorView;

use crate::{Error, Result};

/// How the names of files end that are not whole.
pub(crate) const PARTIAL: &str = ".partial";

/// A file of this process that goes when it was not renamed.
pub(crate) struct Partial(PathBuf);

impl Partial {
    /// `file` with another ending, in its folder, which is made.
    pub fn beside(file: &Path) -> Result<Self> {
        let folder = file.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(|error| at(folder, &error))?;
        let mut name = file.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}{PARTIAL}", std::process::id()));
        Ok(Self(folder.join(name)))
    }

    /// Where it is written.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// From now on it is `file`, in place of what was there: whoever has that mapped keeps it.
    pub fn become_file(self, file: &Path) -> Result<()> {
        fs::rename(&self.0, file).map_err(|error| at(file, &error))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        let _renamed = fs::remove_file(&self.0);
    }
}

/// What the system says about a file.
pub(crate) fn at(path: &Path, error: &std::io::Error) -> Error {
    Error::file(format!("{}: {error}", path.display()))
}

/// Of bytes in one piece.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    let mut sum = Checksum::new();
    sum.add(bytes);
    sum.end()
}

/// A checksum of bytes, however they are cut: it finds damage, not malice.
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

    /// Bytes that follow those before.
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
                // odd, with its bits well mixed: each word changes all of its lane that comes after
                *lane = (*lane ^ u64::from_le_bytes(number))
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    .rotate_left(29);
            }
        }
        self.lanes = lanes;
    }

    /// What tells a tensor from others of its shape without reading it all: bytes from some places. `use_of_it` is told apart,
    /// too.
    pub fn sample(&mut self, tensor: &TensorView<'_>, use_of_it: &str, places: usize) {
        const BYTES: usize = 64;
        self.add(tensor.name().as_bytes());
        self.add(tensor.kind().name().as_bytes());
        self.add(use_of_it.as_bytes());
        for dim in tensor.shape() {
            self.add(&(*dim as u64).to_le_bytes());
        }
        let data = tensor.data();
        for place in 0..places {
            let start = data.len() / places * place;
            self.add(&data[start..data.len().min(start + BYTES)]);
        }
    }

    /// Of all that was added.
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
