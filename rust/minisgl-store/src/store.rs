//! A folder of pages behind a running engine: what it computes is written behind, what a request begins with is read
//! before the request comes to the scheduler.
//!
//! Invariants: giving a page away never waits: what the disk does not follow is dropped, and counted; whatever goes
//! wrong with the disk is a counter.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::folder::Folder;
use crate::key::{Key, first_key, keys};

const QUEUE_BYTES: usize = 256 << 20;
const STAGED_BYTES: usize = 512 << 20; // of pages that are read and not yet loaded
const MAX_KNOWN: usize = 1 << 20;
const FIRST_WAIT: Duration = Duration::from_secs(1); // for a disk, before it is known how fast pages are computed
#[cfg(target_os = "linux")]
const NICE: i32 = 10;
const SLACK: Duration = Duration::from_millis(20); // for the start of reading

/// What has come of pages so far, and what this process knows of the folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Counts {
    pub bytes: u64, // of the folder
    pub written: u64,
    pub loaded: u64,
    pub dropped: u64, // the disk did not follow
    pub failed: u64,  // could not be written or read
    pub damaged: u64,
}

#[derive(Default)]
struct Counters {
    written: AtomicU64,
    loaded: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
    damaged: AtomicU64,
    trouble: Mutex<Option<String>>, // of the last that failed
}

impl Counters {
    fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn error(&self, error: &io::Error) {
        if error.kind() == io::ErrorKind::InvalidData {
            return Self::add(&self.damaged);
        }
        Self::add(&self.failed);
        *self.trouble() = Some(error.to_string());
    }

    fn trouble(&self) -> MutexGuard<'_, Option<String>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Pages `first ..` of a text, read.
pub struct Staged {
    first: usize,
    pages: Vec<Arc<Vec<u8>>>,
}

impl Staged {
    /// The first one that there is, and the end.
    #[must_use]
    pub fn columns(&self) -> (usize, usize) {
        (self.first, self.first + self.pages.len())
    }

    /// Page `column` of the text.
    #[must_use]
    pub fn page(&self, column: usize) -> Option<&[u8]> {
        let at = column.checked_sub(self.first)?;
        self.pages.get(at).map(|page| page.as_slice())
    }
}

impl std::fmt::Debug for Staged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "pages {:?}", self.columns())
    }
}

struct Shared {
    folder: Folder,
    counters: Counters,
    known: Mutex<HashSet<Key>>,                 // pages of which there is a file, or will be
    staged: Mutex<HashMap<Key, Weak<Vec<u8>>>>, // pages that somebody has at hand
    page_ns: AtomicU64,                         // what computing a page takes; 0: not known
    slow_ns: AtomicU64,                         // what the disk takes longer for a page
    ended: AtomicBool,
    queued: Mutex<usize>,
    less_queued: Condvar,
}

impl Shared {
    fn known(&self) -> MutexGuard<'_, HashSet<Key>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, from: &Receiver<(Key, Vec<u8>)>) {
        #[cfg(target_os = "linux")] // where it is of this thread alone: those that compute go first
        let _ = rustix::process::setpriority_process(None, NICE);
        if let Err(error) = self.folder.count() {
            self.counters.error(&error);
        }
        for (key, page) in from {
            if self.ended.load(Ordering::Relaxed) {
                return;
            }
            if !self.folder.has(&key) {
                self.wait_for_slow_disk();
                match self.folder.write(&key, &page) {
                    Ok(()) => Counters::add(&self.counters.written),
                    Err(error) => {
                        self.counters.error(&error);
                        self.known().remove(&key);
                    }
                }
            }
            *self.queued() -= 1;
            self.less_queued.notify_all();
        }
    }

    fn wait_for_slow_disk(&self) {
        let began = Instant::now();
        let left = || Duration::from_nanos(self.slow_ns.load(Ordering::Relaxed)).saturating_sub(began.elapsed());
        while !left().is_zero() && !self.ended.load(Ordering::Relaxed) {
            std::thread::sleep(left().min(Duration::from_millis(10)));
        }
    }

    fn queued(&self) -> MutexGuard<'_, usize> {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A page that somebody has at hand already, or what the folder has.
    fn read(&self, key: &Key, bytes: usize) -> io::Result<Option<Arc<Vec<u8>>>> {
        let staged = || self.staged.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(page) = staged().get(key).and_then(Weak::upgrade) {
            return Ok(Some(page));
        }
        let found = self.folder.read(key, bytes)?.map(Arc::new);
        if let Some(page) = &found {
            self.wait_for_slow_disk();
            staged().insert(*key, Arc::downgrade(page));
        }
        Ok(found)
    }

    /// How many pages somebody has at hand.
    fn num_staged(&self) -> usize {
        let mut staged = self.staged.lock().unwrap_or_else(PoisonError::into_inner);
        staged.retain(|_, page| page.strong_count() > 0);
        staged.len()
    }
}

/// Pages of one engine, of `page_size` tokens and `page_bytes` bytes.
pub struct Store {
    shared: Arc<Shared>,
    first: Key,
    page_size: usize,
    page_bytes: usize,
    queue: Option<SyncSender<(Key, Vec<u8>)>>,
    writer: Option<JoinHandle<()>>,
}

impl Store {
    /// `limit` in bytes of the folder; `identity` says what computes, and how. What the folder holds is counted behind:
    /// a large one would hold up the start.
    ///
    /// # Errors
    /// The folder cannot be made or read, or there is no thread.
    pub fn open(root: &Path, limit: u64, identity: &[u8], page_size: usize, page_bytes: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            folder: Folder::open(root, limit)?,
            counters: Counters::default(),
            known: Mutex::default(),
            staged: Mutex::default(),
            page_ns: AtomicU64::new(0),
            slow_ns: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            queued: Mutex::default(),
            less_queued: Condvar::new(),
        });
        let (queue, from) = sync_channel((QUEUE_BYTES / page_bytes.max(1)).clamp(4, 65_536));
        let of_writer = Arc::clone(&shared);
        let writer = Builder::new()
            .name("page-writer".into())
            .spawn(move || of_writer.write(&from))?;
        Ok(Self {
            shared,
            first: first_key(identity),
            page_size,
            page_bytes,
            queue: Some(queue),
            writer: Some(writer),
        })
    }

    /// What stands before the first page of a text.
    #[must_use]
    pub fn first_key(&self) -> &Key {
        &self.first
    }

    /// Tokens of a page.
    #[must_use]
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Have a page written behind. `page` makes the copy, if it is needed.
    pub fn give(&self, key: Key, page: impl FnOnce() -> Vec<u8>) {
        let Some(queue) = &self.queue else { return };
        let mut known = self.shared.known();
        if known.len() >= MAX_KNOWN {
            known.clear();
        }
        if !known.insert(key) {
            return;
        }
        drop(known);
        *self.shared.queued() += 1;
        match queue.try_send((key, page())) {
            Ok(()) => (),
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                *self.shared.queued() -= 1;
                Counters::add(&self.shared.counters.dropped);
                self.shared.known().remove(&key);
            }
        }
    }

    /// Write pages of `tokens` from column `first` on now, whatever there is: what another store has read.
    ///
    /// # Errors
    /// They are not pages of this store and text, or cannot be written.
    pub fn put(&self, tokens: &[i32], first: usize, pages: &[&[u8]]) -> io::Result<()> {
        let keys = keys(&self.first, tokens, self.page_size);
        for (at, page) in (first..).zip(pages) {
            match keys.get(at) {
                Some(key) if page.len() == self.page_bytes => self.shared.folder.write(key, page)?,
                _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "a page of another kind")),
            }
        }
        Ok(())
    }

    /// For tests: from now on the disk takes so much longer for a page, to read and to write it.
    pub fn slow_down(&self, page: Duration) {
        let nanos = u64::try_from(page.as_nanos()).unwrap_or(u64::MAX);
        self.shared.slow_ns.store(nanos, Ordering::Relaxed);
    }

    /// Whether page `column` of `tokens` seems to be there. Quick.
    #[must_use]
    pub fn has(&self, tokens: &[i32], column: usize) -> bool {
        let keys = keys(&self.first, tokens, self.page_size);
        keys.get(column).is_some_and(|key| self.shared.folder.has(key))
    }

    /// Say that computing so many tokens took so long: reading for longer than that is refused.
    pub fn took(&self, tokens: usize, time: Duration) {
        let tokens = u64::try_from(tokens.max(1)).unwrap_or(u64::MAX);
        let page_size = u64::try_from(self.page_size).unwrap_or(u64::MAX);
        let now = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX) / tokens;
        let now = now.saturating_mul(page_size).max(1);
        let before = self.shared.page_ns.load(Ordering::Relaxed);
        let mean = if before == 0 {
            now
        } else {
            before - before / 4 + now / 4
        };
        self.shared.page_ns.store(mean, Ordering::Relaxed);
    }

    /// Wait until what was given is written, but not longer than `most`.
    pub fn flush(&self, most: Duration) {
        let wait = |queued| {
            self.shared
                .less_queued
                .wait_timeout_while(queued, most, |left| *left > 0)
        };
        drop(wait(self.shared.queued()));
    }

    /// Read the pages of `tokens` from `first` on, at most `most` of them: as far as they are there, there is room, and the
    /// disk is faster than computing.
    #[must_use]
    pub fn stage(&self, tokens: &[i32], first: usize, most: usize) -> Staged {
        let mut pages = Vec::new();
        let room = (STAGED_BYTES / self.page_bytes.max(1)).saturating_sub(self.shared.num_staged());
        let (most, page_ns, began) = (
            most.min(room),
            self.shared.page_ns.load(Ordering::Relaxed),
            Instant::now(),
        );
        for key in keys(&self.first, tokens, self.page_size).iter().skip(first).take(most) {
            match self.shared.read(key, self.page_bytes) {
                Ok(Some(page)) => pages.push(page),
                Ok(None) => {
                    let mut known = self.shared.known();
                    if known.contains(key) {
                        known.clear(); // on its way, or somebody has cleared the folder
                    }
                    break;
                }
                Err(error) => {
                    self.shared.counters.error(&error);
                    self.shared.known().remove(key);
                    break;
                }
            }
            Counters::add(&self.shared.counters.loaded);
            self.shared.known().insert(*key);
            if began.elapsed() > longest(pages.len(), page_ns) {
                break;
            }
        }
        Staged { first, pages }
    }

    /// Why the last page that failed did, if any has since this was asked.
    #[must_use]
    pub fn take_trouble(&self) -> Option<String> {
        self.shared.counters.trouble().take()
    }

    /// What has come of pages so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        Counts {
            bytes: self.shared.folder.bytes(),
            written: get(&counters.written),
            loaded: get(&counters.loaded),
            dropped: get(&counters.dropped),
            failed: get(&counters.failed),
            damaged: get(&counters.damaged),
        }
    }
}

/// How long reading so many pages may take, where computing one takes `page_ns`.
fn longest(pages: usize, page_ns: u64) -> Duration {
    let pages = u64::try_from(pages).unwrap_or(u64::MAX);
    match page_ns {
        0 => FIRST_WAIT,
        _ => SLACK + Duration::from_nanos(page_ns.saturating_mul(pages)),
    }
}

impl Drop for Store {
    /// What was given and not written is lost: see `flush`. A disk may take for ever.
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        self.queue = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_waited_for_no_longer_than_computing_takes() {
        let ms = Duration::from_millis;
        assert_eq!(longest(9, 0), FIRST_WAIT);
        assert_eq!(longest(3, 10_000_000), SLACK + ms(30));
        let root = tempfile::TempDir::new().expect("a folder");
        let store = Store::open(root.path(), 1 << 30, b"model", 4, 100).expect("a folder");
        store.took(8, ms(80));
        assert_eq!(store.shared.page_ns.load(Ordering::Relaxed), 40_000_000);
        store.took(8, ms(160));
        assert_eq!(store.shared.page_ns.load(Ordering::Relaxed), 50_000_000);
        store.took(8, ms(0));
        assert!(store.shared.page_ns.load(Ordering::Relaxed) > 0);
    }
}
