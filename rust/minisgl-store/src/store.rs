//! A folder of pages and states behind a running engine: what it computes is written behind, what a request begins with
//! is read before the request comes to the scheduler.
//!
//! Invariants: giving a page away never waits: what the disk does not follow is dropped, and counted; whatever goes
//! wrong with the disk is a counter.

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
const STAGED_BYTES: usize = 512 << 20; // of what is read and not yet loaded
const MAX_KNOWN: usize = 1 << 20;
const FIRST_WAIT: Duration = Duration::from_secs(1); // for a disk, before it is known how fast pages are computed
#[cfg(target_os = "linux")]
const NICE: i32 = 10;
const SLACK: Duration = Duration::from_millis(20); // for the start of reading

/// What has come of pages and states so far, and what this process knows of the folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Counts {
    pub bytes: u64,   // of the folder
    pub written: u64, // pages
    pub loaded: u64,
    pub dropped: u64, // of both, what the disk did not follow
    pub failed: u64,  // could not be written or read
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
    trouble: Mutex<Option<String>>, // of the last that failed
}

impl Counters {
    /// Raises a count, last of all: `Store::counts` then also shows the file and the text behind it.
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

/// Pages `first ..` of a text, read, and with them the state behind the last one, of a model that has states.
pub struct Staged {
    first: usize,
    pages: Vec<Data>,
    state: Option<Data>,
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

    /// The state behind the last page.
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

/// On its way to the disk; `room`: what it counts in the queue.
struct Given {
    name: Name,
    room: usize,
    data: Vec<u8>,
    superseded: Option<Key>, // the state before it
}

struct Shared {
    folder: Folder,
    counters: Counters,
    known: Mutex<HashSet<Name>>,                 // of what there is a file, or will be
    staged: Mutex<HashMap<Name, Weak<Vec<u8>>>>, // what somebody has at hand
    page_ns: AtomicU64,                          // what computing a page takes; 0: not known
    slow_ns: AtomicU64,                          // what the disk takes longer for a page
    ended: AtomicBool,
    queued: Mutex<usize>, // bytes
    less_queued: Condvar,
}

impl Shared {
    fn known(&self) -> MutexGuard<'_, HashSet<Name>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, from: &Receiver<Given>) {
        #[cfg(target_os = "linux")] // where it is of this thread alone: those that compute go first
        let _ = rustix::process::setpriority_process(None, NICE);
        if let Err(error) = self.folder.count(&self.ended) {
            self.counters.error(&error);
        }
        let mut passed = HashSet::new(); // states that a text has gone on from
        for Given {
            name,
            room,
            data,
            superseded,
        } in from
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
                        if passed.len() >= MAX_KNOWN {
                            passed.clear();
                        }
                        if let Some(before) = superseded {
                            // Where a second text goes on from it, texts part: it is of use to the next one.
                            self.folder.set_used(Kind::State, &before, !passed.insert(before));
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

    /// What somebody has at hand already, or what the folder has.
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

    /// Bytes that somebody has at hand.
    fn staged_bytes(&self) -> usize {
        let mut staged = self.staged.lock().unwrap_or_else(PoisonError::into_inner);
        staged.retain(|_, data| data.strong_count() > 0);
        let all = staged.values().filter_map(Weak::upgrade);
        all.map(|data| data.len()).sum()
    }

    /// There is no file of that.
    fn missing(&self, name: &Name) {
        let mut known = self.known();
        if known.contains(name) {
            known.clear(); // on its way, or somebody has cleared the folder
        }
    }

    fn has(&self, name: &Name) -> bool {
        let found = self.folder.has(name.0, &name.1);
        if !found {
            self.missing(name);
        }
        found
    }
}

/// Pages of one engine, of `page_size` tokens and `page_bytes` bytes.
pub struct Store {
    shared: Arc<Shared>,
    first: Key,
    page_size: usize,
    page_bytes: usize,
    state_bytes: usize, // 0: the model has no states
    queue: Option<Sender<Given>>,
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
        let (queue, from) = channel();
        let of_writer = Arc::clone(&shared);
        let writer = Builder::new()
            .name("page-writer".into())
            .spawn(move || of_writer.write(&from))?;
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

    /// The model has states of so many bytes: pages are found up to one behind which there is a state.
    #[must_use]
    pub fn with_states(mut self, bytes: usize) -> Self {
        self.state_bytes = bytes;
        self
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

    /// A state has so many; 0: the model has none.
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

    /// Have a page or state written behind. `data` makes the copy, if it is needed.
    pub fn give(&self, kind: Kind, key: Key, data: impl FnOnce() -> Vec<u8>) {
        self.give_after(None, (kind, key), data);
    }

    /// The same of a state that supersedes the one with the key `superseded`.
    pub(crate) fn give_after(&self, superseded: Option<Key>, name: Name, data: impl FnOnce() -> Vec<u8>) {
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
        let most = QUEUE_BYTES.max(QUEUE_LEAST * self.page_bytes);
        let room = self.bytes_of(kind).max(1);
        let mut queued = self.shared.queued();
        let fits = *queued == 0 || *queued + room <= most;
        *queued += if fits { room } else { 0 };
        drop(queued);
        if fits {
            let _ = queue.send(Given {
                name,
                room,
                data: data(),
                superseded,
            }); // whoever takes them ends with this
        } else {
            Counters::add(&self.shared.counters.dropped);
            self.shared.known().remove(&name);
        }
    }

    /// Write pages of `tokens` from column `first` on now, whatever there is: what another store has read.
    ///
    /// # Errors
    /// They are not pages of this store and text, or cannot be written.
    pub fn put(&self, tokens: &[i32], first: usize, pages: &[&[u8]]) -> io::Result<()> {
        let keys = keys(&self.first, tokens, self.page_size);
        (first..)
            .zip(pages)
            .try_for_each(|(at, page)| self.put_one(Kind::Page, keys.get(at), page))
    }

    /// The same of the state behind the first `num_pages` pages of `tokens`.
    ///
    /// # Errors
    /// It is no state of this store and text, or cannot be written.
    pub fn put_state(&self, tokens: &[i32], num_pages: usize, state: &[u8]) -> io::Result<()> {
        let keys = keys(&self.first, tokens, self.page_size);
        self.put_one(Kind::State, num_pages.checked_sub(1).and_then(|at| keys.get(at)), state)
    }

    fn put_one(&self, kind: Kind, key: Option<&Key>, data: &[u8]) -> io::Result<()> {
        match key {
            Some(key) if data.len() == self.bytes_of(kind) => self.shared.folder.write(kind, key, data),
            _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "a page of another kind")),
        }
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
        keys.get(column)
            .is_some_and(|key| self.shared.folder.has(Kind::Page, key))
    }

    /// Say that computing so many tokens took so long: reading for longer than that is refused, one slow read aside.
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

    /// Read the pages of `tokens` in `space` from `first` on, at most `most` of them: as far as they are there, there
    /// is room, and the disk is faster than computing. Of a model that has states, up to the last one behind which there
    /// is a state.
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

    /// The pages to the last one behind which there is a state, and that.
    fn read_to_state(&self, keys: &[Key]) -> (Vec<Data>, Option<Data>) {
        let there = keys.iter().take_while(|key| self.shared.has(&(Kind::Page, **key)));
        let mut pages = self.read_pages(&keys[..self.num_to_state(&keys[..there.count()])]);
        loop {
            pages.truncate(self.num_to_state(&keys[..pages.len()]));
            let Some(last) = pages.len().checked_sub(1) else {
                return (pages, None);
            };
            match self.one(Kind::State, &keys[last]) {
                None => pages.truncate(last), // to one before
                state => return (pages, state),
            }
        }
    }

    /// Page `column` of `tokens`, whatever states there are.
    #[must_use]
    pub fn page(&self, tokens: &[i32], column: usize) -> Option<Arc<Vec<u8>>> {
        let keys = keys(&self.first, tokens, self.page_size);
        self.one(Kind::Page, keys.get(column)?)
    }

    /// How many of the pages with `keys` lead to the last one behind which there is a state.
    fn num_to_state(&self, keys: &[Key]) -> usize {
        let last = keys.iter().rposition(|key| self.shared.has(&(Kind::State, *key)));
        last.map_or(0, |last| last + 1)
    }

    fn read_pages(&self, keys: &[Key]) -> Vec<Data> {
        let page_ns = self.shared.page_ns.load(Ordering::Relaxed);
        let (mut pages, mut times) = (Vec::new(), ReadTimes::default());
        for key in keys {
            let began = Instant::now();
            let Some(page) = self.one(Kind::Page, key) else { break };
            pages.push(page);
            times.add(began.elapsed());
            if times.without_slowest() > longest(pages.len(), page_ns) {
                break;
            }
        }
        pages
    }

    /// A page or state, if it is there and whole.
    fn one(&self, kind: Kind, key: &Key) -> Option<Data> {
        let name = (kind, *key);
        match self.shared.read(&name, self.bytes_of(kind)) {
            Ok(Some(data)) => {
                self.shared.known().insert(name);
                return Some(data);
            }
            Ok(None) => self.shared.missing(&name),
            Err(error) => {
                self.shared.known().remove(&name);
                self.shared.counters.error(&error);
            }
        }
        None
    }

    /// Why the last page that failed did, if any has since this was asked.
    #[must_use]
    pub fn take_trouble(&self) -> Option<String> {
        self.shared.counters.trouble().take()
    }

    /// What has come of pages so far.
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

/// Sums the times of reads but for the slowest one, which may have met a pause of the whole machine: a slow disk shows
/// in the others.
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
    fn who_closes_waits_for_no_count() {
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
        let mut times = ReadTimes::default();
        let is_too_slow = [ms(5000), ms(30), ms(40)].map(|time| {
            times.add(time);
            times.without_slowest() > longest(3, 10_000_000)
        });
        assert_eq!(
            is_too_slow,
            [false, false, true],
            "one pause is no slow disk, two reads are"
        );
        store.took(8, ms(0));
        assert!(store.shared.page_ns.load(Ordering::Relaxed) > 0);
    }
}
