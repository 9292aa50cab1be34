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
    changed: i128,
}

impl Mapping {
    /// Maps a regular file; links are followed.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.file_name().unwrap_or(path.as_os_str());
        let name = name.to_string_lossy().into_owned();
        let bad = |error: std::io::Error| Error::file(format!("{name}: {error}"));
        let file = fs::File::open(path).map_err(bad)?;
        let metadata = file.metadata().map_err(bad)?;
        if !metadata.is_file() {
            return Err(Error::file(format!("{name}: not a file")));
        }
        // SAFETY: the mapping is private and only read. That the file is not written or shortened meanwhile is what
        // every program that maps weights relies on; wrong bytes would be wrong numbers, every index is checked.
        let map = unsafe { Mmap::map(&file) }.map_err(bad)?;
        let changed = changed(&metadata).map_err(bad)?;
        Ok(Self { map, name, changed })
    }

    /// When it was changed last, by a clock that nobody sets back where the system has such a one.
    #[must_use]
    pub fn changed(&self) -> i128 {
        self.changed
    }

    /// Asks for large pages, which the system has for files of some file systems: all of it will be read often.
    #[must_use]
    pub fn in_large_pages(self) -> Self {
        // Without them it is slower where the processor looks up pages, nothing else.
        #[cfg(target_os = "linux")]
        let _ = self.map.advise(memmap2::Advice::HugePage);
        self
    }

    /// Whether only places of it are read from now on: then the system does not read around them, which may be megabytes.
    pub fn read_in_places(&self, yes: bool) {
        #[cfg(unix)]
        let _ = self.map.advise(if yes {
            memmap2::Advice::Random
        } else {
            memmap2::Advice::Normal
        });
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

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

#[cfg(unix)]
#[allow(clippy::unnecessary_wraps)]
fn changed(metadata: &fs::Metadata) -> std::io::Result<i128> {
    use std::os::unix::fs::MetadataExt;
    Ok(i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec()))
}

#[cfg(not(unix))]
fn changed(metadata: &fs::Metadata) -> std::io::Result<i128> {
    let since = metadata.modified()?.duration_since(std::time::SystemTime::UNIX_EPOCH);
    Ok(since.map_or(0, |since| since.as_nanos() as i128))
}
