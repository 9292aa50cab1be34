//! What all connections of a gateway share: limits, counts, and the end of it all.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;

/// What is read at once, and at most read ahead of the request that is answered.
pub(crate) const READ_BYTES: usize = 64 * 1024;
/// Bodies up to here wait for nobody.
pub const SMALL_BYTES: usize = 64 * 1024;

/// Times may change at any moment: they come with the configuration, after the first clients.
pub struct Options {
    /// The Unix socket of the Python server.
    pub fallback: PathBuf,
    /// For a head to come, and for what was written to be read.
    pub slow_client_timeout: Cell<Duration>,
    /// How long a connection without a request stays open.
    pub keep_alive_timeout: Cell<Duration>,
    /// After a client has closed its half, until the first interim answer.
    pub probe_after: Cell<Duration>,
    /// The longest head; a longer one is for the Python server to refuse.
    pub max_head_bytes: usize,
    /// Takes lines for the log, as warnings.
    pub log: Box<dyn Fn(&str)>,
    /// The room for large bodies.
    pub bodies: Arc<Budget>,
    /// Ends connections.
    pub stop: Stop,
    /// What became of connections and requests.
    pub counts: Counts,
    pub(crate) scratch: RefCell<Vec<u8>>,
    pub(crate) input: RefCell<Box<[u8]>>,
    date: RefCell<(u64, String)>,
}

impl Options {
    /// With Python's times and bounds.
    pub fn new(fallback: PathBuf, log: Box<dyn Fn(&str)>) -> Self {
        Self {
            fallback,
            slow_client_timeout: Cell::new(Duration::from_secs(60)),
            keep_alive_timeout: Cell::new(Duration::from_secs(75)),
            probe_after: Cell::new(Duration::from_secs(1)),
            max_head_bytes: 64 * 1024,
            log,
            bodies: Arc::new(Budget::new(64 << 20)),
            stop: Stop::default(),
            counts: Counts::default(),
            scratch: RefCell::default(),
            input: RefCell::new(vec![0; READ_BYTES].into_boxed_slice()),
            date: RefCell::default(),
        }
    }

    /// Append a `date` header's value.
    pub(crate) fn push_date(&self, to: &mut Vec<u8>) {
        let now = SystemTime::now();
        let second = now
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let mut date = self.date.borrow_mut();
        if date.0 != second {
            *date = (
                second,
                chrono::DateTime::<chrono::Utc>::from(now)
                    .format("%a, %d %b %Y %H:%M:%S GMT")
                    .to_string(),
            );
        }
        to.extend_from_slice(date.1.as_bytes());
    }
}

/// So many bytes of large bodies may be in hand at once; shared with whoever reads bodies as well.
#[derive(Debug)]
pub struct Budget {
    most: AtomicUsize,
    held: AtomicUsize,
}

/// Bytes of a [`Budget`], until it is dropped.
#[derive(Debug)]
pub struct Held {
    budget: Arc<Budget>,
    size: usize,
}

impl Budget {
    /// A budget of `most` bytes.
    pub fn new(most: usize) -> Self {
        Self {
            most: AtomicUsize::new(most),
            held: AtomicUsize::new(0),
        }
    }

    /// From now on. What is in hand stays.
    pub fn set_most(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// In hand.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// None: there is no room now.
    pub fn take(self: &Arc<Self>, size: usize) -> Option<Held> {
        let most = self.most.load(Ordering::Relaxed);
        self.held
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
                held.checked_add(size).filter(|sum| *sum <= most)
            })
            .ok()
            .map(|_| Held {
                budget: self.clone(),
                size,
            })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.held.fetch_sub(self.size, Ordering::Relaxed);
    }
}

/// What became of connections and requests, since the start.
#[derive(Debug, Default)]
pub struct Counts {
    /// Connections now.
    pub open: Cell<usize>,
    /// Connections ever.
    pub accepted: Cell<u64>,
    /// Requests that went on.
    pub passed_on: Cell<u64>,
    /// Connections that went on as bytes.
    pub tunnelled: Cell<u64>,
    /// How many of those two found no Python server.
    pub unreachable: Cell<u64>,
    /// Connections whose clients read nothing.
    pub dropped: Cell<u64>,
    /// Requests whose answer panicked.
    pub panics: Cell<u64>,
}

pub(crate) fn count(cell: &Cell<u64>) {
    cell.set(cell.get() + 1);
}

/// Ends what [`crate::http::accept`] and its connections do.
#[derive(Default)]
pub struct Stop {
    phase: Cell<Phase>,
    changed: Notify,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    #[default]
    Open,
    Closing,
    Cut,
}

impl Stop {
    /// No more connections; those without a request are closed, the others after the answer under way. Idempotent.
    pub fn close(&self) {
        self.go_to(Phase::Closing);
    }

    /// All connections end now. Idempotent.
    pub fn cut(&self) {
        self.go_to(Phase::Cut);
    }

    /// Whether [`Stop::close`] or [`Stop::cut`] was called.
    pub fn is_closing(&self) -> bool {
        self.phase.get() >= Phase::Closing
    }

    /// Returns when [`Stop::close`] or [`Stop::cut`] is called.
    pub async fn closing(&self) {
        self.reached(Phase::Closing).await;
    }

    pub(crate) async fn cutting(&self) {
        self.reached(Phase::Cut).await;
    }

    fn go_to(&self, phase: Phase) {
        if self.phase.get() < phase {
            self.phase.set(phase);
            self.changed.notify_waiters();
        }
    }

    async fn reached(&self, phase: Phase) {
        while self.phase.get() < phase {
            self.changed.notified().await; // one thread: nothing happens between the check and this
        }
    }
}
