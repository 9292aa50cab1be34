//! Folder of a page store: one file for each page, and one for each saved recurrent state.
//!
//! A file is written under a temporary name and renamed, so a process may be killed at any moment, and any number of
//! them may share a folder without a lock: two that write the same page write the same bytes. There is no fsync: after
//! a power failure pages of the last half minute may be missing or damaged, which their digests show.
//!
//! Invariants: a file is read only if it holds its page or state, complete and under its own key, else it is removed; a
//! read updates the file's time of use. Least recently used files are removed first, after states that later ones of
//! their sequence supersede. Only the owner can read the files.

use std::collections::hash_map::RandomState;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::BuildHasher;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use crate::key::Key;

const MAGIC: usize = 8;
const HEADER: usize = MAGIC + 32 + 32; // magic, key, digest
const STATE: &str = ".state";
const TEMPORARY: &str = "writing-";

/// Counts the temporary files of this process, and a random number of it: two processes may have the same pid, in two
/// containers. Both are parts of the names, so that no other writer of a folder uses the same one.
static WRITTEN: AtomicU64 = AtomicU64::new(0);
static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(std::process::id()));
const ABANDONED: Duration = Duration::from_secs(600); // age of a temporary file whose writer has exited
const MOST_REMOVALS: usize = 100; // removals of a folder by others while it is created
const KEPT_PERCENT: u64 = 90; // of the limit, after a sweep

/// Contents of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Keys and values of a page.
    Page,
    /// Recurrent state after a page, under the page's key.
    State,
}

impl Kind {
    fn magic(self) -> &'static [u8; MAGIC] {
        match self {
            Self::Page => b"msglkv1\n",
            Self::State => b"msglst1\n",
        }
    }

    /// Returns the suffix of a file name after the key.
    fn ending(self) -> &'static str {
        match self {
            Self::Page => "",
            Self::State => STATE,
        }
    }
}

/// Totals of a folder's contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Number of pages.
    pub pages: u64,
    /// Number of states.
    pub states: u64,
    /// Bytes of the files of pages and states.
    pub bytes: u64,
    /// Number of damaged files.
    pub damaged: u64,
}

impl Totals {
    fn add(&mut self, entry: &Entry) {
        match entry.kind {
            Kind::Page => self.pages += 1,
            Kind::State => self.states += 1,
        }
        self.bytes += entry.bytes;
    }
}

/// A folder of pages and states. `limit` is in bytes; one writing process exceeds it by a tenth at most.
pub struct Folder {
    root: PathBuf,
    limit: u64,
    bytes: AtomicU64, // as far as this process knows
}

struct Entry {
    kind: Kind,
    key: Key,
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl Folder {
    /// Opens the folder, and creates it if it does not exist. Its size is unknown before `count`, which reads every
    /// file's metadata.
    ///
    /// # Errors
    /// The folder cannot be created or read.
    pub fn open(root: &Path, limit: u64) -> io::Result<Self> {
        let folder = Self {
            root: root.to_owned(),
            limit,
            bytes: AtomicU64::new(0),
        };
        folder.make(root)?;
        folder.files(root)?; // if another process has just removed it there are no files, and `write` creates it again
        Ok(folder)
    }

    /// Counts the bytes in the folder; call once, after `open`. Bytes that are written meanwhile may count twice: then
    /// a sweep, which recounts, comes early, but none late. Setting `ended` stops the count, so closing need not wait.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn count(&self, ended: &AtomicBool) -> io::Result<()> {
        let found = self.entries_while(|| !ended.load(Ordering::Relaxed))?;
        let bytes = found.iter().map(|entry| entry.bytes).sum();
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Opens an existing folder for inspection: nothing is created, and there is no limit.
    ///
    /// # Errors
    /// The folder does not exist, or is no folder.
    pub fn existing(root: &Path) -> io::Result<Self> {
        fs::read_dir(root)?;
        Self::open(root, u64::MAX)
    }

    /// Returns the bytes of the folder's files, as far as this process knows.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns true if there is a file of this kind and key. Its contents are not checked.
    pub fn has(&self, kind: Kind, key: &Key) -> bool {
        self.path_of(kind, key).exists()
    }

    /// Reads the page or state of `bytes` bytes; `None` if there is no file. A damaged file is removed.
    ///
    /// # Errors
    /// The file is damaged, or cannot be read.
    pub fn read(&self, kind: Kind, key: &Key, bytes: usize) -> io::Result<Option<Vec<u8>>> {
        let path = self.path_of(kind, key);
        let there = match fs::metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        if there.len() != (HEADER + bytes) as u64 || !there.is_file() {
            return Err(self.damaged(&path, bytes)); // without opening it: a pipe would block
        }
        let mut file = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let mut header = [0; HEADER];
        let mut page = vec![0; bytes];
        let whole = file.read_exact(&mut header).is_ok()
            && file.read_exact(&mut page).is_ok()
            && header == self::header(kind, key, &page);
        if !whole {
            return Err(self.damaged(&path, bytes));
        }
        let _ = file.set_modified(SystemTime::now()); // fails in a folder of another owner, where the age stays
        Ok(Some(page))
    }

    /// Sets the time of use to now; with `now` false to the oldest, so that the file goes first until it is read.
    pub fn set_used(&self, kind: Kind, key: &Key, now: bool) {
        let (path, long_ago) = (self.path_of(kind, key), SystemTime::UNIX_EPOCH);
        let at = if now { SystemTime::now() } else { long_ago };
        if path.is_file() {
            let _ = File::open(path).and_then(|file| file.set_modified(at)); // fails in a folder of another owner
        }
    }

    /// Writes a page or state, and sweeps the folder if the limit is exceeded.
    ///
    /// # Errors
    /// The file cannot be written (disk full, read-only folder, ...).
    pub fn write(&self, kind: Kind, key: &Key, page: &[u8]) -> io::Result<()> {
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let temporary = self.root.join(format!("{TEMPORARY}{:x}-{number}", *PROCESS));
        let (path, header) = (self.path_of(kind, key), header(kind, key, page));
        let done = self
            .write_temporary(&temporary, &header, page)
            .or_else(|error| match error.kind() {
                // the folder was removed meanwhile
                ErrorKind::NotFound => self
                    .make(&self.root)
                    .and_then(|()| self.write_temporary(&temporary, &header, page)),
                _ => Err(error),
            })
            .and_then(|()| self.make(path.parent().unwrap_or(&self.root)))
            .and_then(|()| fs::rename(&temporary, &path));
        if done.is_err() {
            let _ = fs::remove_file(&temporary);
            return done;
        }
        let bytes = (HEADER + page.len()) as u64;
        if self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > self.limit {
            self.sweep()?;
        }
        Ok(())
    }

    /// Removes least recently used files until a tenth of the limit is free, and temporary files of killed processes.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn sweep(&self) -> io::Result<()> {
        let mut entries = self.entries()?;
        entries.sort_by_key(|entry| entry.used);
        let mut bytes: u64 = entries.iter().map(|entry| entry.bytes).sum();
        if bytes > self.limit {
            for entry in entries {
                if bytes <= self.limit / 100 * KEPT_PERCENT {
                    break;
                }
                let _ = fs::remove_file(&entry.path);
                bytes -= entry.bytes;
            }
        }
        self.bytes.store(bytes, Ordering::Relaxed);
        for file in self.files(&self.root)? {
            let age = file.metadata().and_then(|data| data.modified()).map(|at| at.elapsed());
            if matches!(age, Ok(Ok(age)) if age > ABANDONED) && is_temporary(&file.file_name()) {
                let _ = fs::remove_file(file.path());
            }
        }
        Ok(())
    }

    /// Removes all pages and states, and returns their totals.
    ///
    /// # Errors
    /// The folder cannot be read, or a file cannot be removed.
    pub fn clear(&self) -> io::Result<Totals> {
        let mut removed = Totals::default();
        for entry in self.entries()? {
            match fs::remove_file(&entry.path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => removed.add(&entry),
            }
        }
        self.bytes.store(0, Ordering::Relaxed);
        Ok(removed)
    }

    /// Reads all files, removes damaged ones, and returns the totals.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn verify(&self) -> io::Result<Totals> {
        let mut found = Totals::default();
        for entry in self.entries()? {
            let size = usize::try_from(entry.bytes).unwrap_or(0).checked_sub(HEADER);
            match size.map(|size| self.read(entry.kind, &entry.key, size)) {
                Some(Ok(Some(_))) => found.add(&entry),
                Some(Ok(None)) => (), // another process removed it
                _ => {
                    self.remove(&entry.path, entry.bytes);
                    found.damaged += 1;
                }
            }
        }
        Ok(found)
    }

    /// Returns the totals of pages, states and bytes, by the names and sizes of the files.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn totals(&self) -> io::Result<Totals> {
        let mut found = Totals::default();
        self.entries()?.iter().for_each(|entry| found.add(entry));
        Ok(found)
    }

    fn damaged(&self, path: &Path, bytes: usize) -> io::Error {
        self.remove(path, (HEADER + bytes) as u64);
        io::Error::new(ErrorKind::InvalidData, "the stored page is damaged")
    }

    fn remove(&self, path: &Path, bytes: u64) {
        if fs::remove_file(path).is_ok() {
            let left = |known: u64| Some(known.saturating_sub(bytes));
            let _ = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left);
        }
    }

    /// Creates a folder; retries if another process removes it meanwhile.
    fn make(&self, folder: &Path) -> io::Result<()> {
        let mut times = MOST_REMOVALS;
        loop {
            if folder.is_dir() {
                return Ok(());
            }
            match DirBuilder::new().recursive(true).mode(0o700).create(folder) {
                Err(error) if times > 0 && matches!(error.kind(), ErrorKind::NotFound | ErrorKind::AlreadyExists) => {
                    times -= 1;
                }
                other => return other,
            }
        }
    }

    fn write_temporary(&self, temporary: &Path, header: &[u8], page: &[u8]) -> io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(temporary)?;
        file.write_all(header)?;
        file.write_all(page)
    }

    fn path_of(&self, kind: Kind, key: &Key) -> PathBuf {
        let name = name_of(key) + kind.ending();
        self.root.join(&name[..2]).join(name)
    }

    /// Returns all files of pages and states, including those of other models.
    fn entries(&self) -> io::Result<Vec<Entry>> {
        self.entries_while(|| true)
    }

    fn entries_while(&self, should_continue: impl Fn() -> bool) -> io::Result<Vec<Entry>> {
        let mut found = Vec::new();
        for folder in self.files(&self.root)? {
            if !should_continue() {
                break;
            }
            if folder.file_name().len() != 2 || !folder.path().is_dir() {
                continue;
            }
            for file in self.files(&folder.path())? {
                let named = file.file_name().to_str().and_then(kind_and_key);
                if let (Ok(data), Some((kind, key))) = (file.metadata(), named) {
                    found.push(Entry {
                        kind,
                        key,
                        path: file.path(),
                        bytes: data.len(),
                        used: data.modified().unwrap_or(SystemTime::UNIX_EPOCH),
                    });
                }
            }
        }
        Ok(found)
    }

    /// Returns the entries of a folder; none if another process has removed it.
    fn files(&self, folder: &Path) -> io::Result<Vec<fs::DirEntry>> {
        match fs::read_dir(folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            other => other?.collect(),
        }
    }
}

fn header(kind: Kind, key: &Key, page: &[u8]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    let digest = blake3::keyed_hash(key, page);
    header[..MAGIC].copy_from_slice(kind.magic());
    header[MAGIC..][..32].copy_from_slice(key);
    header[MAGIC + 32..].copy_from_slice(digest.as_bytes());
    header
}

fn is_temporary(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| name.starts_with(TEMPORARY))
}

fn name_of(key: &Key) -> String {
    key.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn kind_and_key(name: &str) -> Option<(Kind, Key)> {
    let (kind, name) = match name.strip_suffix(STATE) {
        Some(name) => (Kind::State, name),
        None => (Kind::Page, name),
    };
    let mut key = [0; 32];
    if name.len() != 64 || !name.is_ascii() {
        return None;
    }
    for (at, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&name[2 * at..2 * at + 2], 16).ok()?;
    }
    Some((kind, key))
}
