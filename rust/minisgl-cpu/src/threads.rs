//! The threads that a step runs on: one job on all of them at once, with barriers inside.
//!
//! Invariants: `run` returns only when every thread is done with the job; a thread that waits spins for microseconds,
//! then gives way, then sleeps, so that other processes on the same cores get them; one that sleeps wakes on another core
//! than the caller's; a panic in one thread ends the job on all of them and reaches the caller, none waits for ever.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// How long a thread that waits keeps its core to itself: what pieces of work differ by. Longer, and a thread that
/// shares its core with the one it waits for keeps that one from coming.
const SPIN: Duration = Duration::from_micros(5);
/// How long it then offers its core to others before each look, which costs nothing where nobody wants it: about the
/// gap between two steps of a loaded server.
const YIELD: Duration = Duration::from_micros(600);
/// How long it sleeps at a time inside of a job. Between jobs it sleeps until it is woken.
const NAP: Duration = Duration::from_micros(100);
/// Looks between two readings of the clock.
const LOOKS: u32 = 32;
/// Bytes of a thread's stack, as of the thread that calls: jobs may run code of others.
const STACK: usize = 8 << 20;

/// On lines of their own: neighbours that others write would slow each look down.
#[repr(align(128))]
struct Padded<T>(T);

/// Waits until `done`, politely. False if it took longer than spinning and giving way.
fn wait_until(done: &impl Fn() -> bool) -> bool {
    let mut looks = 0_u32;
    let mut began = None;
    loop {
        if done() {
            return true;
        }
        looks += 1;
        if !looks.is_multiple_of(LOOKS) {
            std::hint::spin_loop();
            continue;
        }
        let waited = began.get_or_insert_with(Instant::now).elapsed();
        if waited > SPIN + YIELD {
            return false;
        }
        if waited > SPIN {
            std::thread::yield_now();
        }
    }
}

/// All threads of a pool meet at `wait`, as often as they like.
pub struct Barrier {
    threads: usize,
    arrived: Padded<AtomicUsize>,
    turn: Padded<AtomicUsize>,
    broken: AtomicBool,
}

impl Barrier {
    fn new(threads: usize) -> Self {
        Self {
            threads,
            arrived: Padded(AtomicUsize::new(0)),
            turn: Padded(AtomicUsize::new(0)),
            broken: AtomicBool::new(false),
        }
    }

    /// Returns when all threads have called it; what each wrote before is seen by all after. Panics when another thread
    /// of the job has panicked.
    #[inline]
    pub fn wait(&self) {
        if self.threads == 1 {
            return;
        }
        let turn = self.turn.0.load(Ordering::Acquire);
        if self.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.arrived.0.store(0, Ordering::Relaxed);
            self.turn.0.store(turn.wrapping_add(1), Ordering::Release);
            return;
        }
        let passed = || self.turn.0.load(Ordering::Acquire) != turn || self.broken.load(Ordering::Relaxed);
        while !wait_until(&passed) {
            std::thread::sleep(NAP);
        }
        assert!(
            !self.broken.load(Ordering::Relaxed),
            "another thread of the step panicked"
        );
    }

    /// Nobody waits here any more: `arrived` may have any value.
    fn mend(&self) {
        self.arrived.0.store(0, Ordering::Relaxed);
        self.broken.store(false, Ordering::Release);
    }
}

/// A job as the threads see it; `run` outlives its use.
type Job = *const (dyn Fn(usize, &Barrier) + Sync);

struct Shared {
    job: UnsafeCell<Option<Job>>,
    turn: Padded<AtomicUsize>,
    left: Padded<AtomicUsize>,
    stop: AtomicBool,
    barrier: Barrier,
    panic: Mutex<Option<String>>,
    /// Of each thread but the caller.
    sleepers: Vec<Sleeper>,
}

// SAFETY: `job` is written only while no thread runs one (before `turn` is released) and read after `turn` is acquired.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is only followed while `run` keeps its target alive.
unsafe impl Send for Shared {}

impl Shared {
    fn work(&self, thread: usize, job: &(dyn Fn(usize, &Barrier) + Sync)) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(thread, &self.barrier))) {
            let text = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
                .unwrap_or_default();
            self.barrier.broken.store(true, Ordering::Release);
            let mut first = self.panic.lock().unwrap_or_else(|e| e.into_inner());
            first.get_or_insert(text);
        }
    }
}

/// `threads` threads, the caller of `run` among them.
pub struct Pool {
    shared: Arc<Shared>,
    others: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Threads are named for whoever looks at the process.
    pub fn new(threads: usize) -> Result<Self> {
        let threads = threads.max(1);
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            turn: Padded(AtomicUsize::new(0)),
            left: Padded(AtomicUsize::new(0)),
            stop: AtomicBool::new(false),
            barrier: Barrier::new(threads),
            panic: Mutex::new(None),
            sleepers: (1..threads).map(|_| Sleeper::default()).collect(),
        });
        let mut pool = Self {
            shared: Arc::clone(&shared),
            others: Vec::new(),
        };
        for thread in 1..threads {
            let shared = Arc::clone(&shared);
            let handle = std::thread::Builder::new()
                .name(format!("cpu-engine-{thread}"))
                .stack_size(STACK)
                .spawn(move || follow(&shared, thread))
                .map_err(|error| Error::setting(format!("--num-threads {threads}: {error}")))?;
            pool.others.push(handle);
        }
        Ok(pool)
    }

    /// How many threads run a job.
    pub fn threads(&self) -> usize {
        self.others.len() + 1
    }

    /// Call `job` with 0.. on all threads at once, and with the barrier at which they may meet meanwhile. A panic in
    /// one of them is an error of the step.
    pub fn run(&mut self, job: &(dyn Fn(usize, &Barrier) + Sync)) -> Result<()> {
        let shared = &*self.shared;
        // SAFETY: only the lifetime is changed; all threads are done with `job` when this function returns.
        let lasting: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize, &Barrier) + Sync), Job>(job) };
        // SAFETY: no thread reads the cell between two jobs, and `&mut self` keeps a second job out.
        unsafe { *shared.job.get() = Some(lasting) };
        shared.left.0.store(self.others.len(), Ordering::Relaxed);
        let asleep = |sleeper: &&Sleeper| sleeper.asleep.load(Ordering::Acquire);
        shared.sleepers.iter().filter(asleep).for_each(Sleeper::leave_this_core);
        shared.turn.0.fetch_add(1, Ordering::Release);
        for thread in &self.others {
            thread.thread().unpark();
        }
        shared.work(0, job);
        let done = || shared.left.0.load(Ordering::Acquire) == 0;
        while !wait_until(&done) {
            std::thread::sleep(NAP);
        }
        shared.barrier.mend();
        let panic = shared.panic.lock().unwrap_or_else(|e| e.into_inner()).take();
        panic.map_or(Ok(()), |text| Err(Error::step(format!("the forward panicked: {text}"))))
    }
}

/// What every thread but the caller does.
fn follow(shared: &Shared, thread: usize) {
    let sleeper = &shared.sleepers[thread - 1];
    sleeper.begin();
    let mut seen = 0_usize;
    loop {
        let called = || shared.turn.0.load(Ordering::Acquire) != seen;
        while !wait_until(&called) {
            sleeper.asleep.store(true, Ordering::Release);
            std::thread::park();
        }
        sleeper.wake();
        seen = seen.wrapping_add(1);
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        // SAFETY: `run` wrote the cell before it released `turn`, and keeps the job alive until `left` is 0.
        if let Some(job) = unsafe { *shared.job.get() } {
            // SAFETY: as above.
            shared.work(thread, unsafe { &*job });
        }
        shared.left.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.turn.0.fetch_add(1, Ordering::Release);
        for thread in self.others.drain(..) {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// A thread that sleeps between jobs. Linux may wake it on the core of the one who calls, where both take turns for
/// milliseconds beside a core that is idle; a virtual machine of two cores did (worklog/2026-11-28-on-another-processor.md).
/// So the caller removes its own core from the thread's affinity, which the thread restores when it wakes.
#[derive(Default)]
struct Sleeper {
    /// As the system knows it; 0: not at all.
    id: AtomicI32,
    asleep: AtomicBool,
    #[cfg(target_os = "linux")]
    cores: Mutex<Option<libc::cpu_set_t>>,
}

#[cfg(target_os = "linux")]
impl Sleeper {
    /// In the thread.
    fn begin(&self) {
        // SAFETY: it asks for a number.
        self.id.store(unsafe { libc::gettid() }, Ordering::Release);
    }

    /// By the caller, before the turn: who sees that sees this, too.
    fn leave_this_core(&self) {
        let id = self.id.load(Ordering::Acquire);
        let mut kept = self.cores.lock().unwrap_or_else(|e| e.into_inner());
        if kept.is_some() {
            return;
        }
        // SAFETY: numbers alone are handed over, and a set that outlives the call; one that is refused changes nothing.
        unsafe {
            let (Some(all), Ok(here)) = (cores_of(id), usize::try_from(libc::sched_getcpu())) else {
                return;
            };
            let mut others = all;
            if here < libc::CPU_SETSIZE as usize {
                libc::CPU_CLR(here, &mut others);
            }
            let size = size_of_val(&others);
            if libc::CPU_COUNT(&others) > 0 && libc::sched_setaffinity(id, size, &raw const others) == 0 {
                *kept = Some(all);
            }
        }
    }

    /// In the thread: all of its cores are its own again.
    fn wake(&self) {
        self.asleep.store(false, Ordering::Release);
        if let Some(all) = self.cores.lock().unwrap_or_else(|e| e.into_inner()).take() {
            // SAFETY: as above.
            unsafe { libc::sched_setaffinity(0, size_of_val(&all), &raw const all) };
        }
    }
}

/// The cores that a thread may use, if the system tells.
#[cfg(target_os = "linux")]
fn cores_of(id: i32) -> Option<libc::cpu_set_t> {
    // SAFETY: a set of zeros is one, and has room for what is written.
    unsafe {
        let mut all: libc::cpu_set_t = std::mem::zeroed();
        (libc::sched_getaffinity(id, size_of_val(&all), &raw mut all) == 0).then_some(all)
    }
}

#[cfg(not(target_os = "linux"))]
impl Sleeper {
    fn begin(&self) {}
    fn leave_this_core(&self) {}
    fn wake(&self) {
        self.asleep.store(false, Ordering::Release);
    }
}

/// Work that threads take from piece by piece: whoever is done early takes more.
pub struct Counter(Padded<AtomicUsize>);

impl Default for Counter {
    fn default() -> Self {
        Self(Padded(AtomicUsize::new(0)))
    }
}

impl Counter {
    /// From the start again; while no thread takes from it.
    pub fn reset(&self) {
        self.0.0.store(0, Ordering::Relaxed);
    }

    /// The next piece of `0..total`, if any is left.
    #[inline]
    pub fn take(&self, total: usize) -> Option<usize> {
        let next = self.0.0.fetch_add(1, Ordering::Relaxed);
        (next < total).then_some(next)
    }
}

/// As many threads as there are cores that this process may use: its affinity and its cgroup's quota count, and two
/// hardware threads of one core count once, since they share what computes.
pub fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    cores().map_or(allowed, |cores| allowed.min(cores)).max(1)
}

/// Distinct cores among the processors of the affinity mask, as Linux tells.
#[cfg(target_os = "linux")]
fn cores() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = std::collections::BTreeSet::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        for cpu in first.parse::<u32>().ok()?..=last.parse::<u32>().ok()? {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            cores.insert(std::fs::read_to_string(path).ok()?);
        }
    }
    (!cores.is_empty()).then_some(cores.len())
}

#[cfg(not(target_os = "linux"))]
fn cores() -> Option<usize> {
    None
}

/// Runs `work` in a thread that has the processor when others leave it, and little of it otherwise: some, since others may
/// wait for what the system does in its name.
pub fn beside_others<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let done = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            // SAFETY: numbers alone are handed over; on Linux they are about this thread. Without it, it is only less kind.
            #[cfg(target_os = "linux")]
            let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
            work()
        });
        worker.join()
    });
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_see_what_was_written_before_a_barrier() {
        for threads in 1..5 {
            let mut pool = Pool::new(threads).unwrap();
            let cells: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for round in 1..50 {
                pool.run(&|thread, barrier| {
                    for step in 1..4 {
                        cells[thread].store(round * 10 + step, Ordering::Relaxed);
                        barrier.wait();
                        for cell in &cells {
                            assert_eq!(cell.load(Ordering::Relaxed), round * 10 + step);
                        }
                        barrier.wait();
                    }
                })
                .unwrap();
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let mut pool = Pool::new(3).unwrap();
        for thread_that_fails in 0..3 {
            let error = pool
                .run(&|thread, barrier| {
                    assert!(thread != thread_that_fails, "on purpose");
                    barrier.wait();
                })
                .unwrap_err();
            assert!(error.to_string().contains("panicked"), "{error}");
            let ran = AtomicUsize::new(0);
            pool.run(&|_, barrier| {
                barrier.wait();
                ran.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            assert_eq!(ran.load(Ordering::Relaxed), 3);
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_thread_that_sleeps_wakes_on_another_core_and_has_all_of_them_then() {
        // SAFETY: it counts what it is given.
        let count = |cores: Option<libc::cpu_set_t>| cores.map_or(0, |cores| unsafe { libc::CPU_COUNT(&cores) });
        let mut pool = Pool::new(2).unwrap();
        let (shared, all) = (Arc::clone(&pool.shared), count(cores_of(0)));
        let sleeper = &shared.sleepers[0];
        while !sleeper.asleep.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        sleeper.leave_this_core();
        let left = count(cores_of(sleeper.id.load(Ordering::Acquire)));
        assert_eq!(left, if all > 1 { all - 1 } else { 1 });
        let awake = AtomicI32::new(0);
        pool.run(&|thread, _| {
            if thread == 1 {
                awake.store(count(cores_of(0)), Ordering::Relaxed);
            }
        })
        .unwrap();
        assert_eq!(awake.into_inner(), all);
    }

    #[test]
    fn a_counter_hands_each_piece_out_once() {
        let mut pool = Pool::new(4).unwrap();
        let (counter, taken) = (Counter::default(), Mutex::new(Vec::new()));
        pool.run(&|_, _| {
            while let Some(piece) = counter.take(1000) {
                taken.lock().unwrap().push(piece);
            }
        })
        .unwrap();
        let mut taken = taken.into_inner().unwrap();
        taken.sort_unstable();
        assert_eq!(taken, (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn there_is_at_least_one_thread() {
        assert!(default_threads() >= 1);
    }
}
