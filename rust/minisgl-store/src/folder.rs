//! A folder with a file for each page, and for each state: what layers without keys and values keep behind a page.
//!
//! A file is written beside its place and renamed into it, so a process may be killed at any moment, and any number of
//! them may share a folder without a lock: two that write one page write the same. Nothing is forced to the disk: after
//! a loss of power pages of the last half minute may be missing or damaged, which their digests show.
//!
//! Invariants: a file is its page or state, whole and under its own key, or it is not taken and removed; a file that is read was
//! used now, and what was not used for longest goes first, before it states that later ones of their text supersede; nobody
//! but the owner reads any of it.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use crate::key::Key;

const MAGIC: usize = 8;
const HEADER: usize = MAGIC + 32 + 32; // with the key and the digest
const STATE: &str = ".state";
const TEMPORARY: &str = "writing-";
const ABANDONED: Duration = Duration::from_secs(600); // a file that nobody writes any more
const MOST_REMOVALS: usize = 100; // of a folder while it is made
const KEPT_PERCENT: u64 = 90; // of the limit, once it is passed

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Keys and values of a page.
    Page,
    /// The state behind a page, under the page's key.
    State,
}

impl Kind {
    fn magic(self) -> &'static [u8; MAGIC] {
        match self {
            Self::Page => b"msglkv1\n",
            Self::State => b"msglst1\n",
        }
    }

    /// What a file's name has behind the key.
    fn ending(self) -> &'static str {
        match self {
            Self::Page => "",
            Self::State => STATE,
        }
    }
}

/// What a folder holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Pages.
    pub pages: u64,
    /// States.
    pub states: u64,
    /// Their files' bytes.
    pub bytes: u64,
    /// Files that were damaged.
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

/// A folder of pages and states. `limit` is in bytes; it is passed by a tenth at most, if one process writes.
pub struct Folder {
    root: PathBuf,
    limit: u64,
    bytes: AtomicU64,   // as far as this process knows
    written: AtomicU64, // names temporary files
}

struct Entry {
    kind: Kind,
    key: Key,
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl Folder {
    /// Makes the folder if it is not there. What it holds is not known before `count`, which looks at each file.
    ///
    /// # Errors
    /// It cannot be made or read.
    pub fn open(root: &Path, limit: u64) -> io::Result<Self> {
        let folder = Self {
            root: root.to_owned(),
            limit,
            bytes: AtomicU64::new(0),
            written: AtomicU64::new(0),
        };
        folder.make(root)?;
        folder.files(root)?; // of one that another process has just removed there is nothing to read: `write` makes it
        Ok(folder)
    }

    /// Find out how many bytes it holds; once, after `open`. What is written meanwhile may count twice: then a sweep, which
    /// counts anew, comes early, and none late. `ended` breaks it off: whoever closes the store waits for it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn count(&self, ended: &AtomicBool) -> io::Result<()> {
        let found = self.entries_while(|| !ended.load(Ordering::Relaxed))?;
        let bytes = found.iter().map(|entry| entry.bytes).sum();
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// One that is there, for people: nothing is made, and nothing has to go for want of room.
    ///
    /// # Errors
    /// It is not there, or is no folder.
    pub fn existing(root: &Path) -> io::Result<Self> {
        fs::read_dir(root)?;
        Self::open(root, u64::MAX)
    }

    /// Bytes of its files, as far as this process knows.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Whether there is a file of that, whatever is in it.
    pub fn has(&self, kind: Kind, key: &Key) -> bool {
        self.place(kind, key).exists()
    }

    /// The page or state of `bytes` bytes, if it is there and whole; a file that is not is removed, and is an error.
    ///
    /// # Errors
    /// The file is damaged, or cannot be read.
    pub fn read(&self, kind: Kind, key: &Key, bytes: usize) -> io::Result<Option<Vec<u8>>> {
        let place = self.place(kind, key);
        let there = match fs::metadata(&place) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        if there.len() != (HEADER + bytes) as u64 || !there.is_file() {
            return Err(self.damaged(&place, bytes)); // and is not opened: a pipe would be waited for
        }
        let mut file = match File::open(&place) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let mut header = [0; HEADER];
        let mut page = vec![0; bytes];
        let whole = file.read_exact(&mut header).is_ok()
            && file.read_exact(&mut page).is_ok()
            && header == self::header(kind, key, &page);
        if !whole {
            return Err(self.damaged(&place, bytes));
        }
        let _ = file.set_modified(SystemTime::now()); // in a folder that is not ours the age stays
        Ok(Some(page))
    }

    /// It was used now, or it is to go before all that was used, until it is read.
    pub fn set_used(&self, kind: Kind, key: &Key, now: bool) {
        let (place, long_ago) = (self.place(kind, key), SystemTime::UNIX_EPOCH);
        let at = if now { SystemTime::now() } else { long_ago };
        if place.is_file() {
            let _ = File::open(place).and_then(|file| file.set_modified(at)); // in a folder that is not ours the age stays
        }
    }

    /// Writes a page or state.
    ///
    /// # Errors
    /// The disk is full, the folder is read-only...
    pub fn write(&self, kind: Kind, key: &Key, page: &[u8]) -> io::Result<()> {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let beside = self.root.join(format!("{TEMPORARY}{}-{number}", std::process::id()));
        let (place, header) = (self.place(kind, key), header(kind, key, page));
        let done = self
            .write_beside(&beside, &header, page)
            .or_else(|error| match error.kind() {
                // it was removed meanwhile
                ErrorKind::NotFound => self
                    .make(&self.root)
                    .and_then(|()| self.write_beside(&beside, &header, page)),
                _ => Err(error),
            })
            .and_then(|()| self.make(place.parent().unwrap_or(&self.root)))
            .and_then(|()| fs::rename(&beside, &place));
        if done.is_err() {
            let _ = fs::remove_file(&beside);
            return done;
        }
        let bytes = (HEADER + page.len()) as u64;
        if self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > self.limit {
            self.sweep()?;
        }
        Ok(())
    }

    /// Remove what was not used for longest until a part of the limit is free, and what killed processes left.
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

    /// Remove all of it.
    ///
    /// # Errors
    /// The folder cannot be read, or a file not removed.
    pub fn clear(&self) -> io::Result<Totals> {
        let mut gone = Totals::default();
        for entry in self.entries()? {
            match fs::remove_file(&entry.path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => gone.add(&entry),
            }
        }
        self.bytes.store(0, Ordering::Relaxed);
        Ok(gone)
    }

    /// Read all of it, and remove what is damaged.
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

    /// Pages, states and bytes, by the names and sizes of the files.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn totals(&self) -> io::Result<Totals> {
        let mut found = Totals::default();
        self.entries()?.iter().for_each(|entry| found.add(entry));
        Ok(found)
    }

    fn damaged(&self, place: &Path, bytes: usize) -> io::Error {
        self.remove(place, (HEADER + bytes) as u64);
        io::Error::new(ErrorKind::InvalidData, "a damaged page")
    }

    fn remove(&self, place: &Path, bytes: u64) {
        if fs::remove_file(place).is_ok() {
            let left = |known: u64| Some(known.saturating_sub(bytes));
            let _ = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left);
        }
    }

    /// Again, if another process removes it while it is made.
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

    fn write_beside(&self, beside: &Path, header: &[u8], page: &[u8]) -> io::Result<()> {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(beside)?;
        file.write_all(header)?;
        file.write_all(page)
    }

    fn place(&self, kind: Kind, key: &Key) -> PathBuf {
        let name = name_of(key) + kind.ending();
        self.root.join(&name[..2]).join(name)
    }

    /// Files of pages and states, those of other makers aside.
    fn entries(&self) -> io::Result<Vec<Entry>> {
        self.entries_while(|| true)
    }

    fn entries_while(&self, go_on: impl Fn() -> bool) -> io::Result<Vec<Entry>> {
        let mut found = Vec::new();
        for folder in self.files(&self.root)? {
            if !go_on() {
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

    /// What lies in a folder; nothing where another process has removed it.
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
