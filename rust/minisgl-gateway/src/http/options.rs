//! State shared by all connections of a gateway: limits, counters, and shutdown.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;

/// Bytes of one read, and of input that is read ahead of the current request at most.
pub(crate) const READ_BYTES: usize = 64 * 1024;
/// Largest body in bytes that needs no share of the budget for large bodies.
pub const SMALL_BYTES: usize = 64 * 1024;

/// Settings of all connections. The times change when the configuration arrives, which is after the first clients.
pub struct Options {
    /// Path of the Python server's Unix socket.
    pub fallback: PathBuf,
    /// Time limit for a request header to arrive, and for written bytes to be read.
    pub slow_client_timeout: Cell<Duration>,
    /// Time that a connection without a request stays open.
    pub keep_alive_timeout: Cell<Duration>,
    /// Time from the close of a client's sending half to the first interim response.
    pub probe_after: Cell<Duration>,
    /// Longest request header in bytes; the Python server refuses a longer one.
    pub max_head_bytes: usize,
    /// Callback that writes a warning to the log.
    pub log: Box<dyn Fn(&str)>,
    /// Budget of bytes for large request bodies.
    pub bodies: Arc<Budget>,
    /// Shutdown signal for the listener and all connections.
    pub stop: Stop,
    /// Counters of connections and requests.
    pub counts: Counts,
    pub(crate) scratch: RefCell<Vec<u8>>,
    pub(crate) input: RefCell<Box<[u8]>>,
    date: RefCell<(u64, String)>,
}

impl Options {
    /// Makes options with the default times and limits of the Python server.
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

    /// Appends the value of a `date` header.
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

/// Budget of bytes for large bodies that are in memory at once; shared with all readers of bodies.
#[derive(Debug)]
pub struct Budget {
    max: AtomicUsize,
    used: AtomicUsize,
}

/// Bytes taken from a [`Budget`]; dropping it returns them.
#[derive(Debug)]
pub struct BudgetPermit {
    budget: Arc<Budget>,
    size: usize,
}

impl Budget {
    /// Makes a budget of `max` bytes.
    pub fn new(max: usize) -> Self {
        Self {
            max: AtomicUsize::new(max),
            used: AtomicUsize::new(0),
        }
    }

    /// Changes the size of the budget for later calls of `take`. Bytes already taken stay taken.
    pub fn set_max(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// Returns the number of bytes that are taken from the budget now.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes `size` bytes of the budget. `None` if that many are not free now.
    pub fn take(self: &Arc<Self>, size: usize) -> Option<BudgetPermit> {
        let max = self.max.load(Ordering::Relaxed);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(size).filter(|sum| *sum <= max)
            })
            .ok()
            .map(|_| BudgetPermit {
                budget: self.clone(),
                size,
            })
    }
}

impl Drop for BudgetPermit {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.size, Ordering::Relaxed);
    }
}

/// Counters of connections and requests since the start.
#[derive(Debug, Default)]
pub struct Counts {
    /// Number of open connections.
    pub open: Cell<usize>,
    /// Accepted connections in total.
    pub accepted: Cell<u64>,
    /// Requests that were proxied to the Python server.
    pub proxied: Cell<u64>,
    /// Connections that were proxied as bytes.
    pub tunnelled: Cell<u64>,
    /// Proxied requests and connections for which the Python server was unreachable.
    pub unreachable: Cell<u64>,
    /// Connections that were closed because their clients read nothing.
    pub dropped: Cell<u64>,
    /// Requests whose handler panicked.
    pub panics: Cell<u64>,
}

pub(crate) fn count(cell: &Cell<u64>) {
    cell.set(cell.get() + 1);
}

/// Shutdown signal for [`crate::http::accept`] and its connections.
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
    /// Ends accepting; closes idle connections at once and the others after their current response. Idempotent.
    pub fn close(&self) {
        self.go_to(Phase::Closing);
    }

    /// Ends all connections now. Idempotent.
    pub fn cut(&self) {
        self.go_to(Phase::Cut);
    }

    /// Returns true if [`Stop::close`] or [`Stop::cut`] was called.
    pub fn is_closing(&self) -> bool {
        self.phase.get() >= Phase::Closing
    }

    /// Waits until [`Stop::close`] or [`Stop::cut`] is called.
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
            self.changed.notified().await; // a single thread: the phase cannot change between the check and this
        }
    }
}
