//! Execution of a plan: threads with a runtime of one thread each, which share only counters.
//!
//! Invariants: in an open loop no request waits for another one's response; a cancelled run ends within a tenth of a
//! second, and requests in flight count as failed.

use std::future::Future;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::exchange::exchange;
use crate::http::Connection;
use crate::plan::{Arrivals, Plan};
use crate::record::Shared;
use crate::record::{Failure, Record};

const LOOK_FOR_STOP: Duration = Duration::from_millis(50);
/// Records in a block. One growing list would be copied as a whole, which stalls the thread and all its streams for 200
/// ms at a quarter of a million requests.
const RECORDS_A_BLOCK: usize = 1024;

/// Outcome of a run.
#[derive(Debug)]
pub struct Outcome {
    /// Records of the requests that were begun, by index.
    pub records: Vec<Record>,
    /// Start of the run in seconds of the monotonic clock.
    pub started: f64,
    /// Duration of the run in seconds.
    pub duration_s: f64,
    /// CPU seconds of the generator's threads.
    pub cpu_s: f64,
}

/// Context that the tasks of a thread share.
struct Context {
    plan: Arc<Plan>,
    shared: Arc<Shared>,
    start: Instant,
    /// Index of the first request of each chain.
    firsts: Arc<Vec<usize>>,
    /// Next chain for a client, over all threads.
    next: Arc<AtomicUsize>,
    records: Mutex<Vec<Vec<Record>>>,
    idle: Mutex<Vec<Connection>>,
}

/// Sends all requests and waits for their ends. Blocks the calling thread, which dispatches due requests to the others.
/// Fails if the plan is invalid or a thread panics.
pub fn run(plan: Plan, shared: &Arc<Shared>) -> Result<Outcome, String> {
    plan.check()?;
    let cpu_before = thread_cpu_s();
    let plan = Arc::new(plan);
    let firsts = Arc::new(first_of_each(&plan.chains));
    let next = Arc::new(AtomicUsize::new(0));
    let (started, start) = (monotonic_s(), Instant::now());
    let mut senders = Vec::new();
    let mut threads = Vec::new();
    for number in 0..plan.threads {
        let context = Arc::new(Context {
            plan: Arc::clone(&plan),
            shared: Arc::clone(shared),
            start,
            firsts: Arc::clone(&firsts),
            next: Arc::clone(&next),
            records: Mutex::default(),
            idle: Mutex::default(),
        });
        let (sender, due) = unbounded_channel();
        senders.push(sender);
        threads.push(thread::spawn(move || work(&context, number, due)));
    }
    dispatch(&plan, shared, start, &senders);
    drop(senders);
    let (mut records, mut cpu_s) = (Vec::new(), 0.0);
    for thread in threads {
        let (thread_records, cpu) = thread.join().map_err(|_| "a thread panicked".to_owned())??;
        records.extend(thread_records);
        cpu_s += cpu;
    }
    records.sort_unstable_by_key(|record| record.index);
    Ok(Outcome {
        records,
        started,
        duration_s: start.elapsed().as_secs_f64(),
        cpu_s: cpu_s + thread_cpu_s() - cpu_before,
    })
}

/// Dispatches each chain to a thread when it is due (open loop). The operating system's sleep is finer than a runtime's
/// timer, which ticks in milliseconds.
fn dispatch(plan: &Plan, shared: &Shared, start: Instant, threads: &[UnboundedSender<usize>]) {
    let Arrivals::At(times) = &plan.arrivals else {
        return;
    };
    for (chain, time) in times.iter().enumerate() {
        let due = Duration::from_secs_f64(*time);
        while let Some(left) = due.checked_sub(start.elapsed()) {
            if shared.stop.load(Relaxed) {
                return;
            }
            thread::sleep(left.min(LOOK_FOR_STOP));
        }
        if threads[chain % threads.len()].send(chain).is_err() {
            return; // that thread has ended: the run was cancelled
        }
    }
}

fn first_of_each(chains: &[usize]) -> Vec<usize> {
    let mut next = 0;
    let first = |length: &usize| {
        next += length;
        next - length
    };
    chains.iter().map(first).collect()
}

/// Returns `part / whole` of small client counts.
#[allow(clippy::as_conversions)]
fn share(part: usize, whole: usize) -> f64 {
    part as f64 / whole as f64
}

/// Runs a thread of the generator; returns its records and its CPU seconds.
fn work(context: &Arc<Context>, number: usize, due: UnboundedReceiver<usize>) -> Result<(Vec<Record>, f64), String> {
    let cpu_before = thread_cpu_s();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| error.to_string())?;
    let all = async {
        match context.plan.arrivals {
            Arrivals::At(_) => open_loop(context, due).await,
            Arrivals::Clients { count, ramp_s, .. } => {
                let mine = (number..count).step_by(context.plan.threads);
                let delays = mine.map(|client| ramp_s * share(client, count));
                closed_loop(context, delays).await
            }
        }
    };
    let result = runtime.block_on(unless_stopped(&context.shared, all));
    drop(runtime); // cancels every task
    result?;
    let blocks = std::mem::take(&mut *context.records.lock().unwrap_or_else(PoisonError::into_inner));
    let mut records: Vec<Record> = blocks.into_iter().flatten().collect();
    for record in &mut records {
        if record.end.is_none() {
            record.failure = Some(Failure::Cancelled);
            record.end = Some(context.start.elapsed().as_secs_f64());
        }
    }
    Ok((records, thread_cpu_s() - cpu_before))
}

async fn unless_stopped(shared: &Shared, all: impl Future<Output = Result<(), String>>) -> Result<(), String> {
    let mut all = std::pin::pin!(all);
    loop {
        match timeout(LOOK_FOR_STOP, &mut all).await {
            Ok(result) => return result,
            Err(_) if shared.stop.load(Relaxed) => return Ok(()),
            Err(_) => {}
        }
    }
}

async fn open_loop(context: &Arc<Context>, mut due: UnboundedReceiver<usize>) -> Result<(), String> {
    let mut tasks = JoinSet::new();
    while let Some(chain) = due.recv().await {
        let context = Arc::clone(context);
        tasks.spawn(async move {
            let mut idle = pool(&context).pop();
            context.chain(chain, &mut idle).await;
            if let Some(connection) = idle {
                pool(&context).push(connection);
            }
        });
        while let Some(ended) = tasks.try_join_next() {
            ended.map_err(|error| error.to_string())?;
        }
    }
    join(tasks).await
}

async fn closed_loop(context: &Arc<Context>, delays: impl Iterator<Item = f64>) -> Result<(), String> {
    let mut tasks = JoinSet::new();
    for delay in delays {
        let context = Arc::clone(context);
        tasks.spawn(async move {
            if delay > 0.0 {
                sleep(Duration::from_secs_f64(delay)).await;
            }
            let mut idle = None;
            while !context.is_over() {
                let chain = context.next.fetch_add(1, Relaxed);
                if chain >= context.firsts.len() {
                    break;
                }
                context.chain(chain, &mut idle).await;
            }
        });
    }
    join(tasks).await
}

async fn join(mut tasks: JoinSet<()>) -> Result<(), String> {
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn pool(context: &Context) -> std::sync::MutexGuard<'_, Vec<Connection>> {
    context.idle.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Context {
    /// Returns true if no more requests are to be begun.
    fn is_over(&self) -> bool {
        match self.plan.arrivals {
            Arrivals::At(_) => false,
            Arrivals::Clients { stop_after_s, .. } => self.start.elapsed().as_secs_f64() >= stop_after_s,
        }
    }

    /// Sends the requests of a chain, one after the other.
    async fn chain(&self, chain: usize, idle: &mut Option<Connection>) {
        for turn in 0..self.plan.chains[chain] {
            if turn > 0 && self.is_over() {
                return;
            }
            let now = self.start.elapsed().as_secs_f64();
            let scheduled = match &self.plan.arrivals {
                Arrivals::At(times) if turn == 0 => times[chain],
                _ => now,
            };
            let guard = RecordGuard {
                context: self,
                record: Record::new(self.firsts[chain] + turn, scheduled),
            };
            guard.exchange(idle).await;
        }
    }
}

/// A record that is stored when dropped, however its request ends, also if its task is cancelled.
struct RecordGuard<'a> {
    context: &'a Context,
    record: Record,
}

impl RecordGuard<'_> {
    async fn exchange(mut self, idle: &mut Option<Connection>) {
        let Context {
            plan, shared, start, ..
        } = self.context;
        exchange(plan, shared, *start, idle, &mut self.record).await;
    }
}

impl Drop for RecordGuard<'_> {
    fn drop(&mut self) {
        let record = std::mem::take(&mut self.record);
        let mut blocks = self.context.records.lock().unwrap_or_else(PoisonError::into_inner);
        match blocks.last_mut() {
            Some(block) if block.len() < RECORDS_A_BLOCK => block.push(record),
            _ => {
                let mut block = Vec::with_capacity(RECORDS_A_BLOCK);
                block.push(record);
                blocks.push(block);
            }
        }
    }
}

/// Returns the CPU seconds, user and system, that the calling thread has used.
pub fn thread_cpu_s() -> f64 {
    read(ClockId::ThreadCPUTime)
}

/// Returns the seconds of the monotonic clock, the one that `Instant` and Python's `time.monotonic` read.
pub fn monotonic_s() -> f64 {
    read(ClockId::Monotonic)
}

fn read(clock: ClockId) -> f64 {
    Duration::try_from(clock_gettime(clock)).map_or(0.0, |time| time.as_secs_f64())
}
