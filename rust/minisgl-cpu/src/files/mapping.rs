//! Read-only file mappings: the only module of `files` that needs `unsafe`.

use std::fs;
use std::path::Path;

use memmap2::Mmap;

use crate::{Error, Result};

/// Read-only memory mapping of a whole file. The system reads pages when they are touched.
#[derive(Debug)]
pub struct Mapping {
    map: Mmap,
    name: String,
    changed: i128,
}

impl Mapping {
    /// Maps a regular file. Follows symbolic links.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.file_name().unwrap_or(path.as_os_str());
        let name = name.to_string_lossy().into_owned();
        let bad = |error: std::io::Error| Error::file(format!("{name}: {error}"));
        let file = fs::File::open(path).map_err(bad)?;
        let metadata = file.metadata().map_err(bad)?;
        if !metadata.is_file() {
            return Err(Error::file(format!("{name}: not a file")));
        }
        // SAFETY: the mapping is private and only read. As in every program that maps weights, the file must not be
        // written or truncated meanwhile; wrong bytes would give wrong values, but indices are checked.
        let map = unsafe { Mmap::map(&file) }.map_err(bad)?;
        let changed = changed(&metadata).map_err(bad)?;
        Ok(Self { map, name, changed })
    }

    /// Returns the file's last change in nanoseconds: ctime on Unix, which programs cannot set back, else mtime.
    #[must_use]
    pub fn changed(&self) -> i128 {
        self.changed
    }

    /// Advises the system to use huge pages, for files that are read often. Some file systems ignore it.
    #[must_use]
    pub fn with_huge_pages(self) -> Self {
        // A failure is ignored: small pages only cost more TLB misses.
        #[cfg(target_os = "linux")]
        let _ = self.map.advise(memmap2::Advice::HugePage);
        self
    }

    /// Switches readahead off (`yes`) or on. For sparse reads it may read megabytes around each access.
    pub fn set_random_access(&self, yes: bool) {
        #[cfg(unix)]
        let _ = self.map.advise(if yes {
            memmap2::Advice::Random
        } else {
            memmap2::Advice::Normal
        });
    }

    /// Returns the content of the file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Drops the pages from the process's memory, not from the system's page cache. A later access maps them again.
    pub fn release(&self) {
        // SAFETY: pages of an unchanged file are read again with the same content. A failure is harmless: pages stay
        // mapped.
        #[cfg(unix)]
        let _ = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }

    /// Returns the file name without its folder, for error texts.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Calls `read` on the content and puts the file name in front of its error.
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
