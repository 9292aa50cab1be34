//! The page store of a running engine: computed pages and states are written in the background, those of a request's
//! prompt are read before the request reaches the scheduler.
//!
//! Invariants: `enqueue` never waits: pages that the disk is too slow for are dropped, and counted; so are disk errors.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::folder::{Folder, Kind};
use crate::key::{Key, first_key, first_key_in, keys};

const QUEUE_BYTES: usize = 256 << 20;
const QUEUE_LEAST: usize = 4; // pages
const STAGED_BYTES: usize = 512 << 20; // read and not yet loaded
const MAX_KNOWN: usize = 1 << 20;
const FIRST_WAIT: Duration = Duration::from_secs(1); // for reading, before the speed of computing pages is known
#[cfg(target_os = "linux")]
const NICE: i32 = 10;
const SLACK: Duration = Duration::from_millis(20); // for the start of reading

/// Counters of pages and states since the start, and the known size of the folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Counts {
    pub bytes: u64,   // of the folder
    pub written: u64, // pages
    pub loaded: u64,
    pub dropped: u64, // pages and states that the disk was too slow for
    pub failed: u64,  // pages and states that could not be written or read
    pub damaged: u64,
    pub states_written: u64,
    pub states_loaded: u64,
}

#[derive(Default)]
struct Counters {
    written: AtomicU64,
    loaded: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
    damaged: AtomicU64,
    states_written: AtomicU64,
    states_loaded: AtomicU64,
    trouble: Mutex<Option<String>>, // reason of the last failure
}

impl Counters {
    /// Increments a counter, last of all: `Store::counts` then also shows the file and the error text written before.
    fn add(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Release);
    }

    fn written(&self, kind: Kind) {
        Self::add(match kind {
            Kind::Page => &self.written,
            Kind::State => &self.states_written,
        });
    }

    fn error(&self, error: &io::Error) {
        if error.kind() == io::ErrorKind::InvalidData {
            return Self::add(&self.damaged);
        }
        *self.trouble() = Some(error.to_string());
        Self::add(&self.failed);
    }

    fn trouble(&self) -> MutexGuard<'_, Option<String>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Staged pages of a sequence from index `first` on, and the state after the last one if the model has states.
pub struct Staged {
    first: usize,
    pages: Vec<Data>,
    state: Option<Data>,
}

impl Staged {
    /// Returns the range of staged page indexes: the first one and the end (exclusive).
    #[must_use]
    pub fn columns(&self) -> (usize, usize) {
        (self.first, self.first + self.pages.len())
    }

    /// Returns the KV bytes of page index `column` of the sequence; `None` if it is not staged.
    #[must_use]
    pub fn page(&self, column: usize) -> Option<&[u8]> {
        let at = column.checked_sub(self.first)?;
        self.pages.get(at).map(|page| page.as_slice())
    }

    /// Returns the state after the last page; `None` if there is none.
    #[must_use]
    pub fn state(&self) -> Option<&[u8]> {
        self.state.as_ref().map(|state| state.as_slice())
    }
}

impl std::fmt::Debug for Staged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "pages {:?}", self.columns())
    }
}

type Name = (Kind, Key);
type Data = Arc<Vec<u8>>;

/// A page or state in the write queue; `room` is the number of bytes that it counts there.
struct QueuedWrite {
    name: Name,
    room: usize,
    data: Vec<u8>,
    superseded: Option<Key>, // key of the state before it
}

struct Shared {
    folder: Folder,
    counters: Counters,
    known: Mutex<HashSet<Name>>,                 // names that have a file, or will have one
    staged: Mutex<HashMap<Name, Weak<Vec<u8>>>>, // data that is in use
    page_ns: AtomicU64,                          // time of computing a page; 0: not known
    slow_ns: AtomicU64,                          // additional time of the disk for a page, in tests
    ended: AtomicBool,
    queued: Mutex<usize>, // bytes
    less_queued: Condvar,
}

impl Shared {
    fn known(&self) -> MutexGuard<'_, HashSet<Name>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, queue: &Receiver<QueuedWrite>) {
        #[cfg(target_os = "linux")] // on Linux it applies to this thread alone: computing threads go first
        let _ = rustix::process::setpriority_process(None, NICE);
        if let Err(error) = self.folder.count(&self.ended) {
            self.counters.error(&error);
        }
        let mut superseded_states = HashSet::new(); // states that a sequence has continued from
        for QueuedWrite {
            name,
            room,
            data,
            superseded,
        } in queue
        {
            let (kind, key) = &name;
            if self.ended.load(Ordering::Relaxed) {
                return;
            }
            if !self.folder.has(*kind, key) {
                self.wait_for_slow_disk();
                match self.folder.write(*kind, key, &data) {
                    Ok(()) => {
                        self.counters.written(*kind);
                        if superseded_states.len() >= MAX_KNOWN {
                            superseded_states.clear();
                        }
                        if let Some(before) = superseded {
                            // If a second sequence continues from it, sequences branch there, and the next one can use
                            // it.
                            self.folder
                                .set_used(Kind::State, &before, !superseded_states.insert(before));
                        }
                    }
                    Err(error) => {
                        self.known().remove(&name);
                        self.counters.error(&error);
                    }
                }
            }
            *self.queued() -= room;
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

    /// Returns the data from staging memory if it is there, else from the folder; `None` if it is in neither.
    fn read(&self, name: &Name, bytes: usize) -> io::Result<Option<Data>> {
        let staged = || self.staged.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(data) = staged().get(name).and_then(Weak::upgrade) {
            return Ok(Some(data));
        }
        let found = self.folder.read(name.0, &name.1, bytes)?.map(Arc::new);
        if let Some(data) = &found {
            self.wait_for_slow_disk();
            staged().insert(*name, Arc::downgrade(data));
        }
        Ok(found)
    }

    /// Returns the bytes of staging memory in use.
    fn staged_bytes(&self) -> usize {
        let mut staged = self.staged.lock().unwrap_or_else(PoisonError::into_inner);
        staged.retain(|_, data| data.strong_count() > 0);
        let all = staged.values().filter_map(Weak::upgrade);
        all.map(|data| data.len()).sum()
    }

    /// Notes that there is no file of that name.
    fn note_missing(&self, name: &Name) {
        let mut known = self.known();
        if known.contains(name) {
            known.clear(); // the file is not written yet, or the folder was cleared
        }
    }

    fn has(&self, name: &Name) -> bool {
        let found = self.folder.has(name.0, &name.1);
        if !found {
            self.note_missing(name);
        }
        found
    }
}

/// The page store of one engine, for pages of `page_size` tokens and `page_bytes` bytes.
pub struct Store {
    shared: Arc<Shared>,
    first: Key,
    page_size: usize,
    page_bytes: usize,
    state_bytes: usize, // 0: the model has no states
    queue: Option<Sender<QueuedWrite>>,
    writer: Option<JoinHandle<()>>,
}

impl Store {
    /// Opens the store in `root`, a folder of at most `limit` bytes. `identity` describes the model and how it
    /// computes. The size of the folder is counted in the background, so that a large one does not delay the start.
    ///
    /// # Errors
    /// The folder cannot be created or read, or the thread cannot be started.
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
        let (queue, from) = channel();
        let writer_shared = Arc::clone(&shared);
        let writer = Builder::new()
            .name("page-writer".into())
            .spawn(move || writer_shared.write(&from))?;
        Ok(Self {
            shared,
            first: first_key(identity),
            page_size,
            page_bytes,
            state_bytes: 0,
            queue: Some(queue),
            writer: Some(writer),
        })
    }

    /// Sets the size of the model's recurrent states. Pages are then staged only up to one with a stored state.
    #[must_use]
    pub fn with_states(mut self, bytes: usize) -> Self {
        self.state_bytes = bytes;
        self
    }

    /// Returns the root key, before the first page of a sequence.
    #[must_use]
    pub fn first_key(&self) -> &Key {
        &self.first
    }

    /// Returns the number of tokens of a page.
    #[must_use]
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns the bytes of a state; 0 if the model has none.
    #[must_use]
    pub fn state_bytes(&self) -> usize {
        self.state_bytes
    }

    fn bytes_of(&self, kind: Kind) -> usize {
        match kind {
            Kind::Page => self.page_bytes,
            Kind::State => self.state_bytes,
        }
    }

    /// Queues a page or state to be written. `data` copies it, and is called only if it will be written. Never blocks
    /// on the disk; drops the page if the queue is full.
    pub fn enqueue(&self, kind: Kind, key: Key, data: impl FnOnce() -> Vec<u8>) {
        self.enqueue_after(None, (kind, key), data);
    }

    /// Queues a page or state to be written; a state may supersede the one with the key `superseded`.
    pub(crate) fn enqueue_after(&self, superseded: Option<Key>, name: Name, data: impl FnOnce() -> Vec<u8>) {
        let Some(queue) = &self.queue else { return };
        let (kind, _) = name;
        let mut known = self.shared.known();
        if known.len() >= MAX_KNOWN {
            known.clear();
        }
        if !known.insert(name) {
            return;
        }
        drop(known);
        let max_bytes = QUEUE_BYTES.max(QUEUE_LEAST * self.page_bytes);
        let room = self.bytes_of(kind).max(1);
        let mut queued = self.shared.queued();
        let fits = *queued == 0 || *queued + room <= max_bytes;
        *queued += if fits { room } else { 0 };
        drop(queued);
        if fits {
            let _ = queue.send(QueuedWrite {
                name,
                room,
                data: data(),
                superseded,
            }); // fails only if the writer has ended
        } else {
            Counters::add(&self.shared.counters.dropped);
            self.shared.known().remove(&name);
        }
    }

    /// Writes pages of `tokens` from index `first` on, which another store has read. Blocks, and overwrites.
    ///
    /// # Errors
    /// They do not fit this store and sequence, or cannot be written.
    pub fn put(&self, tokens: &[i32], first: usize, pages: &[&[u8]]) -> io::Result<()> {
        let keys = keys(&self.first, tokens, self.page_size);
        (first..)
            .zip(pages)
            .try_for_each(|(at, page)| self.put_one(Kind::Page, keys.get(at), page))
    }

    /// Writes the state after the first `num_pages` pages of `tokens`, which another store has read. Blocks.
    ///
    /// # Errors
    /// It does not fit this store and sequence, or cannot be written.
    pub fn put_state(&self, tokens: &[i32], num_pages: usize, state: &[u8]) -> io::Result<()> {
        let keys = keys(&self.first, tokens, self.page_size);
        self.put_one(Kind::State, num_pages.checked_sub(1).and_then(|at| keys.get(at)), state)
    }

    fn put_one(&self, kind: Kind, key: Option<&Key>, data: &[u8]) -> io::Result<()> {
        match key {
            Some(key) if data.len() == self.bytes_of(kind) => self.shared.folder.write(kind, key, data),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the page does not fit this store",
            )),
        }
    }

    /// Simulates, for tests, a disk that takes longer by `page` to read or write a page.
    pub fn slow_down(&self, page: Duration) {
        let nanos = u64::try_from(page.as_nanos()).unwrap_or(u64::MAX);
        self.shared.slow_ns.store(nanos, Ordering::Relaxed);
    }

    /// Returns true if there is a file for page index `column` of `tokens`. Quick: contents are not checked.
    #[must_use]
    pub fn has(&self, tokens: &[i32], column: usize) -> bool {
        let keys = keys(&self.first, tokens, self.page_size);
        keys.get(column)
            .is_some_and(|key| self.shared.folder.has(Kind::Page, key))
    }

    /// Records that computing `tokens` tokens took `time`, which limits the time of `stage`, one slow read excepted.
    pub fn record_speed(&self, tokens: usize, time: Duration) {
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

    /// Blocks until the write queue is empty, for at most `most`.
    pub fn flush(&self, most: Duration) {
        let wait = |queued| {
            self.shared
                .less_queued
                .wait_timeout_while(queued, most, |left| *left > 0)
        };
        drop(wait(self.shared.queued()));
    }

    /// Reads up to `most` stored pages of `tokens` in `space` from page index `first` on. Blocks on disk I/O. Stops at
    /// the first missing page, when staging memory is full, or when reading takes longer than computing. With recurrent
    /// states, ends at the last page that has a stored state.
    #[must_use]
    pub fn stage(&self, space: &[u8], tokens: &[i32], first: usize, most: usize) -> Staged {
        let taken = self.shared.staged_bytes() + self.state_bytes;
        let room = STAGED_BYTES.saturating_sub(taken) / self.page_bytes.max(1);
        let keys = keys(&first_key_in(&self.first, space), tokens, self.page_size);
        let keys = keys.get(first..).unwrap_or_default();
        let keys = &keys[..keys.len().min(most).min(room)];
        let (pages, state) = match self.state_bytes {
            0 => (self.read_pages(keys), None),
            _ => self.read_to_state(keys),
        };
        let counters = &self.shared.counters;
        let count = u64::try_from(pages.len()).unwrap_or(u64::MAX);
        counters.loaded.fetch_add(count, Ordering::Relaxed);
        (counters.states_loaded).fetch_add(u64::from(state.is_some()), Ordering::Relaxed);
        Staged { first, pages, state }
    }

    /// Reads pages up to the last one with a stored state, and that state.
    fn read_to_state(&self, keys: &[Key]) -> (Vec<Data>, Option<Data>) {
        let there = keys.iter().take_while(|key| self.shared.has(&(Kind::Page, **key)));
        let mut pages = self.read_pages(&keys[..self.num_to_state(&keys[..there.count()])]);
        loop {
            pages.truncate(self.num_to_state(&keys[..pages.len()]));
            let Some(last) = pages.len().checked_sub(1) else {
                return (pages, None);
            };
            match self.read_one(Kind::State, &keys[last]) {
                None => pages.truncate(last), // retry with an earlier state
                state => return (pages, state),
            }
        }
    }

    /// Reads page index `column` of `tokens`, with or without a state; `None` if it is not stored.
    #[must_use]
    pub fn page(&self, tokens: &[i32], column: usize) -> Option<Arc<Vec<u8>>> {
        let keys = keys(&self.first, tokens, self.page_size);
        self.read_one(Kind::Page, keys.get(column)?)
    }

    /// Returns the number of pages of `keys` up to the last one with a stored state; 0 if none has one.
    fn num_to_state(&self, keys: &[Key]) -> usize {
        let last = keys.iter().rposition(|key| self.shared.has(&(Kind::State, *key)));
        last.map_or(0, |last| last + 1)
    }

    fn read_pages(&self, keys: &[Key]) -> Vec<Data> {
        let page_ns = self.shared.page_ns.load(Ordering::Relaxed);
        let (mut pages, mut times) = (Vec::new(), ReadTimes::default());
        for key in keys {
            let began = Instant::now();
            let Some(page) = self.read_one(Kind::Page, key) else {
                break;
            };
            pages.push(page);
            times.add(began.elapsed());
            if times.without_slowest() > max_read_time(pages.len(), page_ns) {
                break;
            }
        }
        pages
    }

    /// Reads a page or state; `None` if it is missing, damaged or unreadable.
    fn read_one(&self, kind: Kind, key: &Key) -> Option<Data> {
        let name = (kind, *key);
        match self.shared.read(&name, self.bytes_of(kind)) {
            Ok(Some(data)) => {
                self.shared.known().insert(name);
                return Some(data);
            }
            Ok(None) => self.shared.note_missing(&name),
            Err(error) => {
                self.shared.known().remove(&name);
                self.shared.counters.error(&error);
            }
        }
        None
    }

    /// Returns the reason of the last failure since this was last called, if there was any.
    #[must_use]
    pub fn take_trouble(&self) -> Option<String> {
        self.shared.counters.trouble().take()
    }

    /// Returns the counters of pages and states so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Acquire);
        let counters = &self.shared.counters;
        Counts {
            bytes: self.shared.folder.bytes(),
            written: get(&counters.written),
            loaded: get(&counters.loaded),
            dropped: get(&counters.dropped),
            failed: get(&counters.failed),
            damaged: get(&counters.damaged),
            states_written: get(&counters.states_written),
            states_loaded: get(&counters.states_loaded),
        }
    }
}

/// Sum of read times except the slowest one, which may be a pause of the machine: a slow disk shows in the others.
#[derive(Default)]
struct ReadTimes {
    sum: Duration,
    slowest: Duration,
}

impl ReadTimes {
    fn add(&mut self, time: Duration) {
        self.sum += time;
        self.slowest = self.slowest.max(time);
    }

    fn without_slowest(&self) -> Duration {
        self.sum - self.slowest
    }
}

/// Returns how long reading `pages` pages may take if computing one takes `page_ns`; 0: not known yet.
fn max_read_time(pages: usize, page_ns: u64) -> Duration {
    let pages = u64::try_from(pages).unwrap_or(u64::MAX);
    match page_ns {
        0 => FIRST_WAIT,
        _ => SLACK + Duration::from_nanos(page_ns.saturating_mul(pages)),
    }
}

impl Drop for Store {
    /// Ends the writer. What is still queued is lost (see `flush`), because a disk may never finish.
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
    fn count_stops_when_store_closes() {
        let root = tempfile::TempDir::new().expect("a folder");
        let folder = Folder::open(root.path(), 1 << 30).expect("a folder");
        folder.write(Kind::Page, &[7; 32], &[1; 100]).expect("a page");
        let again = Folder::open(root.path(), 1 << 30).expect("a folder");
        again.count(&AtomicBool::new(true)).expect("a count");
        assert_eq!(again.bytes(), 0);
        again.count(&AtomicBool::new(false)).expect("a count");
        assert!(again.bytes() > 100);
    }

    #[test]
    fn reading_stops_when_slower_than_computing() {
        let ms = Duration::from_millis;
        assert_eq!(max_read_time(9, 0), FIRST_WAIT);
        assert_eq!(max_read_time(3, 10_000_000), SLACK + ms(30));
        let root = tempfile::TempDir::new().expect("a folder");
        let store = Store::open(root.path(), 1 << 30, b"model", 4, 100).expect("a folder");
        store.record_speed(8, ms(80));
        assert_eq!(store.shared.page_ns.load(Ordering::Relaxed), 40_000_000);
        store.record_speed(8, ms(160));
        assert_eq!(store.shared.page_ns.load(Ordering::Relaxed), 50_000_000);
        let mut times = ReadTimes::default();
        let is_too_slow = [ms(5000), ms(30), ms(40)].map(|time| {
            times.add(time);
            times.without_slowest() > max_read_time(3, 10_000_000)
        });
        assert_eq!(
            is_too_slow,
            [false, false, true],
            "one pause is no slow disk, two reads are"
        );
        store.record_speed(8, ms(0));
        assert!(store.shared.page_ns.load(Ordering::Relaxed) > 0);
    }
}
