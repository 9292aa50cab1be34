//! A file mapped for reading: the one place of `files` that needs `unsafe`.

use std::fs;
use std::path::Path;

use memmap2::Mmap;

use crate::{Error, Result};

/// A whole file as bytes, read by the system as they are touched.
#[derive(Debug)]
pub struct Mapping {
    map: Mmap,
    name: String,
}

impl Mapping {
    /// Maps a regular file; links are followed.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.file_name().unwrap_or(path.as_os_str());
        let name = name.to_string_lossy().into_owned();
        let bad = |error: std::io::Error| Error::file(format!("{name}: {error}"));
        let file = fs::File::open(path).map_err(bad)?;
        if !file.metadata().map_err(bad)?.is_file() {
            return Err(Error::file(format!("{name}: not a file")));
        }
        // SAFETY: the mapping is private and only read. That the file is not written or shortened meanwhile is what
        // every program that maps weights relies on; wrong bytes would be wrong numbers, every index is checked.
        let map = unsafe { Mmap::map(&file) }.map_err(bad)?;
        Ok(Self { map, name })
    }

    /// The content.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Lets go of what was read: of the process's memory, not of the system's. It is read again where it is touched again.
    pub fn release(&self) {
        // SAFETY: pages of a file that nobody writes to come back as they were. Without the advice they only stay longer.
        #[cfg(unix)]
        let _ = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }

    /// The file's name without its folder, for errors.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What `read` makes of the content; its error with the file's name before it.
    pub fn named<T>(&self, read: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
        read(self.bytes()).map_err(|error| error.within(&self.name))
    }
}
