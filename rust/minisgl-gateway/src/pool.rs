//! A bounded pool of threads for what takes long: parsing, rendering and encoding. A lane for short work, one for long:
//! a long text delays no short one; and two for questions to Python, which may have to wait for its turn.
//!
//! Invariants: a panic in one piece of work is that piece's only.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;
const MOST_THREADS: usize = 4; // of a lane

/// Where work waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Under a millisecond or so.
    Short,
    /// Anything else.
    Long,
    /// What waits for Python.
    Ask,
    /// The same, of receipts: a grammar that takes long delays no end of an answer.
    Receipt,
}

/// A bounded pool of threads. They end when it is dropped.
pub struct Pool([Sender<Job>; 4]); // by lane

impl Pool {
    /// Starts the threads.
    pub fn new() -> std::io::Result<Pool> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / 4).clamp(1, MOST_THREADS);
        let (short, long) = (lane("encode-short", threads)?, lane("encode-long", threads)?);
        Ok(Pool([short, long, lane("ask", 1)?, lane("receipt", 1)?]))
    }

    /// The result of `work`; None if it panicked.
    pub async fn run<T: Send + 'static>(&self, lane: Lane, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (sender, receiver) = oneshot::channel();
        let job: Job = Box::new(move || {
            if !sender.is_closed()
                && let Ok(result) = catch_unwind(AssertUnwindSafe(work))
            {
                let _ = sender.send(result); // nobody waits any more
            }
        });
        self.0[lane as usize].send(job).ok()?;
        receiver.await.ok()
    }
}

fn lane(name: &str, threads: usize) -> std::io::Result<Sender<Job>> {
    let (sender, receiver) = channel::<Job>();
    let receiver = Arc::new(Mutex::new(receiver));
    for _ in 0..threads {
        let receiver = Arc::clone(&receiver);
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work_off(&receiver))?;
    }
    Ok(sender)
}

fn work_off(jobs: &Mutex<Receiver<Job>>) {
    loop {
        let job = match jobs.lock() {
            Ok(jobs) => jobs.recv(),
            Err(_) => return,
        };
        match job {
            Ok(job) => job(),
            Err(_) => return,
        }
    }
}
