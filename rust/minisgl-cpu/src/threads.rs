//! Thread pool of a step: runs one job on all threads at once, with barriers inside.
//!
//! Invariants: `run` returns only when every thread has finished the job; a waiting thread spins for microseconds, then
//! yields, then sleeps, so that other processes get its core; a sleeping thread wakes on another core than the
//! caller's; a panic in one thread ends the job on all of them and reaches the caller, and no thread waits forever.

#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Time that a waiting thread spins. More would block the awaited thread if both share a core.
const SPIN: Duration = Duration::from_micros(5);
/// Time that a waiting thread then yields its core between checks: about the gap between two steps under load.
const YIELD: Duration = Duration::from_micros(600);
/// Length of one sleep within a job. Between jobs threads sleep until they are woken.
const NAP: Duration = Duration::from_micros(100);
/// Checks between two readings of the clock.
const LOOKS: u32 = 32;
/// Stack size of a thread in bytes, that of a main thread: jobs may run foreign code.
const STACK: usize = 8 << 20;

/// Value with cache lines of its own: writes to neighbours would slow down each check.
#[derive(Default)]
#[repr(align(128))]
struct Padded<T>(T);

/// Waits until `done` returns true, first spinning, then yielding. Returns false after `SPIN + YIELD`.
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

/// Barrier for all threads of a pool. It can be used any number of times.
pub struct Barrier {
    threads: usize,
    arrived: Padded<AtomicUsize>,
    generation: Padded<AtomicUsize>,
    broken: AtomicBool,
}

impl Barrier {
    fn new(threads: usize) -> Self {
        Self {
            threads,
            arrived: Padded(AtomicUsize::new(0)),
            generation: Padded(AtomicUsize::new(0)),
            broken: AtomicBool::new(false),
        }
    }

    /// Blocks until all threads have called it; earlier writes are then visible. Panics if another thread has panicked.
    #[inline]
    pub fn wait(&self) {
        if self.threads == 1 {
            return;
        }
        let generation = self.generation.0.load(Ordering::Acquire);
        if self.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.arrived.0.store(0, Ordering::Relaxed);
            self.generation.0.store(generation.wrapping_add(1), Ordering::Release);
            return;
        }
        let passed = || self.generation.0.load(Ordering::Acquire) != generation || self.broken.load(Ordering::Relaxed);
        while !wait_until(&passed) {
            std::thread::sleep(NAP);
        }
        assert!(
            !self.broken.load(Ordering::Relaxed),
            "another thread of the step panicked"
        );
    }

    /// Resets the barrier after a job, when no thread waits.
    fn reset_after_job(&self) {
        self.arrived.0.store(0, Ordering::Relaxed);
        self.broken.store(false, Ordering::Release);
    }
}

/// Pointer to a job that `run` keeps alive.
type Job = *const (dyn Fn(usize, &Barrier) + Sync);

struct Shared {
    job: UnsafeCell<Option<Job>>,
    generation: Padded<AtomicUsize>,
    left: Padded<AtomicUsize>,
    stop: AtomicBool,
    barrier: Barrier,
    panic: Mutex<Option<String>>,
    /// Sleep state of each thread but the caller.
    sleepers: Vec<Sleeper>,
}

// SAFETY: `job` is written only while no thread runs one (before `generation` is released) and read after `generation`
// is acquired.
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

/// Pool of threads, one of which is the caller of `run`.
pub struct Pool {
    shared: Arc<Shared>,
    others: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts `threads - 1` threads, named `cpu-engine-N`. Errors if the system refuses one.
    pub fn new(threads: usize) -> Result<Self> {
        let threads = threads.max(1);
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            generation: Padded(AtomicUsize::new(0)),
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
                .spawn(move || run_jobs(&shared, thread))
                .map_err(|error| Error::setting(format!("--num-threads {threads}: {error}")))?;
            pool.others.push(handle);
        }
        Ok(pool)
    }

    /// Returns the number of threads that run a job.
    pub fn threads(&self) -> usize {
        self.others.len() + 1
    }

    /// Calls `job(thread, barrier)` on all threads at once and waits for them. A panic in one becomes an error.
    pub fn run(&mut self, job: &(dyn Fn(usize, &Barrier) + Sync)) -> Result<()> {
        let shared = &*self.shared;
        // SAFETY: only the lifetime is changed; all threads are done with `job` when this function returns.
        let lasting: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize, &Barrier) + Sync), Job>(job) };
        // SAFETY: no thread reads the cell between two jobs, and `&mut self` keeps a second job out.
        unsafe { *shared.job.get() = Some(lasting) };
        shared.left.0.store(self.others.len(), Ordering::Relaxed);
        let asleep = |sleeper: &&Sleeper| sleeper.asleep.load(Ordering::Acquire);
        shared.sleepers.iter().filter(asleep).for_each(Sleeper::avoid_this_core);
        shared.generation.0.fetch_add(1, Ordering::Release);
        for thread in &self.others {
            thread.thread().unpark();
        }
        shared.work(0, job);
        let done = || shared.left.0.load(Ordering::Acquire) == 0;
        while !wait_until(&done) {
            std::thread::sleep(NAP);
        }
        shared.barrier.reset_after_job();
        let panic = shared.panic.lock().unwrap_or_else(|e| e.into_inner()).take();
        panic.map_or(Ok(()), |text| {
            Err(Error::step(format!("the forward pass panicked: {text}")))
        })
    }
}

/// Runs jobs until the pool is dropped: the main loop of every thread but the caller.
fn run_jobs(shared: &Shared, thread: usize) {
    let sleeper = &shared.sleepers[thread - 1];
    sleeper.begin();
    let mut seen = 0_usize;
    loop {
        let called = || shared.generation.0.load(Ordering::Acquire) != seen;
        while !wait_until(&called) {
            sleeper.asleep.store(true, Ordering::Release);
            std::thread::park();
        }
        sleeper.wake();
        seen = seen.wrapping_add(1);
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        // SAFETY: `run` wrote the cell before it released `generation`, and keeps the job alive until `left` is 0.
        if let Some(job) = unsafe { *shared.job.get() } {
            // SAFETY: the pointer is valid, as above: `run` keeps the job alive.
            shared.work(thread, unsafe { &*job });
        }
        shared.left.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.generation.0.fetch_add(1, Ordering::Release);
        for thread in self.others.drain(..) {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Sleep state of a thread between jobs. Linux may wake a thread on the caller's core, where both take turns while
/// another core is idle (worklog/2026-11-28-on-another-processor.md). The caller therefore removes its own core from
/// the thread's affinity, and the thread restores it on waking.
#[derive(Default)]
struct Sleeper {
    /// System's id of the thread; 0 if unknown.
    id: AtomicI32,
    asleep: AtomicBool,
    #[cfg(target_os = "linux")]
    cores: Mutex<Option<libc::cpu_set_t>>,
}

#[cfg(target_os = "linux")]
impl Sleeper {
    /// Stores the thread's id. Called in the thread.
    fn begin(&self) {
        // SAFETY: the call has no arguments and only returns an id.
        self.id.store(unsafe { libc::gettid() }, Ordering::Release);
    }

    /// Removes the current core from the sleeping thread's affinity. Called before a job starts, by the caller.
    fn avoid_this_core(&self) {
        let id = self.id.load(Ordering::Acquire);
        let mut previous = self.cores.lock().unwrap_or_else(|e| e.into_inner());
        if previous.is_some() {
            return;
        }
        // SAFETY: the arguments are integers and a set that outlives the call; a failed call changes nothing.
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
                *previous = Some(all);
            }
        }
    }

    /// Restores the thread's affinity. Called in the thread.
    fn wake(&self) {
        self.asleep.store(false, Ordering::Release);
        if let Some(all) = self.cores.lock().unwrap_or_else(|e| e.into_inner()).take() {
            // SAFETY: the arguments are an integer and a set that outlives the call.
            unsafe { libc::sched_setaffinity(0, size_of_val(&all), &raw const all) };
        }
    }
}

/// Returns the cores that a thread may use, `None` if the system call fails.
#[cfg(target_os = "linux")]
fn cores_of(id: i32) -> Option<libc::cpu_set_t> {
    // SAFETY: all zeros is a valid set, and its size is passed.
    unsafe {
        let mut all: libc::cpu_set_t = std::mem::zeroed();
        (libc::sched_getaffinity(id, size_of_val(&all), &raw mut all) == 0).then_some(all)
    }
}

#[cfg(not(target_os = "linux"))]
impl Sleeper {
    fn begin(&self) {}
    fn avoid_this_core(&self) {}
    fn wake(&self) {
        self.asleep.store(false, Ordering::Release);
    }
}

/// Time at which the threads of a job leave the rest of its work items to a later job.
pub struct Deadline {
    began: Instant,
    /// Nanoseconds from `began`.
    at: AtomicU64,
    has_passed: AtomicBool,
}

impl Default for Deadline {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            at: AtomicU64::new(0),
            has_passed: AtomicBool::new(false),
        }
    }
}

impl Deadline {
    /// Sets the time to `slice` from now. No thread may use the deadline meanwhile.
    pub fn begin(&self, slice: Duration) {
        let nanos = self.began.elapsed().saturating_add(slice).as_nanos();
        self.at.store(nanos.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
        self.has_passed.store(false, Ordering::Relaxed);
    }

    /// Returns true if an earlier `check` did.
    pub fn has_passed(&self) -> bool {
        self.has_passed.load(Ordering::Relaxed)
    }

    /// Compares the time with the clock. Returns true if it has passed.
    pub fn check(&self) -> bool {
        let has_passed = self.began.elapsed().as_nanos() >= u128::from(self.at.load(Ordering::Relaxed));
        if has_passed {
            self.has_passed.store(true, Ordering::Relaxed);
        }
        has_passed
    }
}

/// Work counter that hands out item indices to threads: a thread that finishes early takes more.
#[derive(Default)]
pub struct Counter(Padded<(AtomicUsize, Option<Arc<Deadline>>)>);

impl Counter {
    /// Restarts at 0. No thread may use the counter meanwhile.
    pub fn reset(&self) {
        self.0.0.0.store(0, Ordering::Relaxed);
    }

    /// Hands out no item after `deadline` has passed, so that the job, run again, continues with the next item. If the
    /// job's counters have one deadline and a barrier between two of them, no item of the second is handed out before
    /// all items of the first are.
    pub fn end_at(&mut self, deadline: &Arc<Deadline>) {
        self.0.0.1 = Some(Arc::clone(deadline));
    }

    /// Claims the next item of `0..total`. `None` if none are left.
    #[inline]
    pub fn claim(&self, total: usize) -> Option<usize> {
        let Padded((next, deadline)) = &self.0;
        if deadline.as_ref().is_some_and(|deadline| deadline.has_passed()) {
            return None;
        }
        let next = next.fetch_add(1, Ordering::Relaxed);
        let item = (next < total).then_some(next);
        // only now, so that each job does an item, whatever the time
        if let (Some(_), Some(deadline)) = (item, deadline) {
            deadline.check();
        }
        item
    }
}

/// Returns the cores that this process may use, by affinity and cgroup quota. Hardware threads of a core count once.
pub fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    cores().map_or(allowed, |cores| allowed.min(cores)).max(1)
}

/// Counts the physical cores in the affinity mask, `None` if Linux does not tell.
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

/// Runs `work` in a thread of the lowest priority, which still gets some CPU time, and waits for it.
pub fn beside_others<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let done = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            // SAFETY: the arguments are integers; on Linux they refer to this thread. A failure only leaves the
            // priority.
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
    fn writes_before_a_barrier_are_visible_after_it() {
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
    fn job_with_a_deadline_does_each_item_once_and_its_phases_in_order() {
        let slices = [Duration::ZERO, Duration::from_micros(50), Duration::MAX];
        for (threads, slice) in (1..4).flat_map(|threads| slices.map(|slice| (threads, slice))) {
            let mut pool = Pool::new(threads).unwrap();
            let deadline = Arc::new(Deadline::default());
            let mut counters: [Counter; 3] = Default::default();
            counters.iter_mut().for_each(|counter| counter.end_at(&deadline));
            let done: [AtomicUsize; 3] = Default::default();
            let mut jobs = 0;
            loop {
                jobs += 1;
                deadline.begin(slice);
                pool.run(&|_, barrier| {
                    for (phase, counter) in counters.iter().enumerate() {
                        while counter.claim(40).is_some() {
                            let before = phase.checked_sub(1).map(|before| done[before].load(Ordering::Relaxed));
                            assert!(before.is_none_or(|before| before == 40), "a phase began early");
                            done[phase].fetch_add(1, Ordering::Relaxed);
                        }
                        barrier.wait();
                    }
                })
                .unwrap();
                if !deadline.has_passed() {
                    break;
                }
            }
            assert_eq!(done.map(AtomicUsize::into_inner), [40; 3]);
            let most = if slice == Duration::MAX { 1 } else { 121 };
            assert!(
                jobs <= most && (slice > Duration::ZERO || jobs > 120 / threads),
                "{jobs} jobs"
            );
        }
    }

    #[test]
    fn panic_becomes_an_error_and_the_pool_stays_usable() {
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
    fn sleeping_thread_wakes_on_another_core_and_regains_its_affinity() {
        // SAFETY: `cores` is a valid set.
        let count = |cores: Option<libc::cpu_set_t>| cores.map_or(0, |cores| unsafe { libc::CPU_COUNT(&cores) });
        let mut pool = Pool::new(2).unwrap();
        let (shared, all) = (Arc::clone(&pool.shared), count(cores_of(0)));
        let sleeper = &shared.sleepers[0];
        while !sleeper.asleep.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        sleeper.avoid_this_core();
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
    fn counter_hands_out_each_item_once() {
        let mut pool = Pool::new(4).unwrap();
        let (counter, taken) = (Counter::default(), Mutex::new(Vec::new()));
        pool.run(&|_, _| {
            while let Some(piece) = counter.claim(1000) {
                taken.lock().unwrap().push(piece);
            }
        })
        .unwrap();
        let mut taken = taken.into_inner().unwrap();
        taken.sort_unstable();
        assert_eq!(taken, (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn default_threads_is_at_least_one() {
        assert!(default_threads() >= 1);
    }
}
