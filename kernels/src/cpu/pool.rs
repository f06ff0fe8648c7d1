//! A fork-join pool: every thread runs the same closure once, with its own index.
//!
//! Owns the worker threads, how they wait (spin for a while, then sleep) and how work is cut. Never knows what it runs.
//! A step of a small model forks some 150 times; waking a sleeping thread costs tens of microseconds, a spinning one well
//! under one, so workers spin as long as that pays and sleep when nothing comes: an idle pool uses no CPU.

use std::{
    any::Any,
    cell::{Cell, UnsafeCell},
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle, Thread},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::KernelError;

/// Longest and shortest time that a worker spins before it sleeps.
const SPIN_MAX: Duration = Duration::from_micros(200);
const SPIN_MIN: Duration = Duration::from_micros(25);
/// How long the caller spins for the last worker before it gives its core away between looks.
const CALLER_SPIN: Duration = Duration::from_micros(100);

thread_local! {
    /// Set while this thread runs a job: a nested run must not wait for the pool.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Counts runs; a worker works when it changes.
    epoch: AtomicU64,
    stop: AtomicBool,
    /// The closure of the current run. Written by the caller while no worker runs.
    job: UnsafeCell<Option<Job>>,
    /// Workers that have not finished the current run.
    running: AtomicUsize,
    /// Per worker: it sleeps, or is about to.
    asleep: Vec<AtomicBool>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written only by the caller that holds the run lock, while `running` is 0, and read by workers only
// between the release-store of `epoch` and their release-decrement of `running`; the closure behind it is Sync.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// Threads that work together. The thread that calls [`Pool::run`] is one of them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<(Thread, Option<JoinHandle<()>>)>,
    /// One run at a time.
    lock: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` threads (at least 1), the caller's included.
    ///
    /// # Errors
    /// A thread can't be started.
    pub fn new(threads: usize) -> Result<Self, KernelError> {
        let count = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            epoch: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            running: AtomicUsize::new(0),
            asleep: (0..count).map(|_| AtomicBool::new(false)).collect(),
            panic: Mutex::new(None),
        });
        let mut pool = Self { shared: Arc::clone(&shared), workers: Vec::with_capacity(count), lock: Mutex::new(()) };
        for worker in 0..count {
            let shared = Arc::clone(&shared);
            let handle = thread::Builder::new()
                .name(format!("quire-cpu-{}", worker + 1))
                .spawn(move || work(&shared, worker))
                .map_err(|error| KernelError::Device(format!("cannot start a worker thread: {error}")))?;
            pool.workers.push((handle.thread().clone(), Some(handle)));
        }
        Ok(pool)
    }

    /// Threads, the caller's included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(0)` here and `f(1) … f(threads - 1)` on the workers, and returns when all have returned. What they wrote is
    /// visible to the caller. A run inside a run calls all indices here, one after the other. Runs of several callers
    /// take turns.
    ///
    /// # Panics
    /// Goes on with the panic of `f`, if one panicked, after all have returned.
    pub fn run<F: Fn(usize) + Sync>(&self, f: F) {
        if self.workers.is_empty() || INSIDE.get() {
            (0..self.threads()).for_each(f);
            return;
        }
        let guard = self.lock.lock();
        let job: &(dyn Fn(usize) + Sync) = &f;
        // SAFETY: only the lifetime changes; this function doesn't return before every worker is done with it.
        let job: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(job) };
        // SAFETY: the lock is held and the last run has ended, so no worker looks at it.
        unsafe { *self.shared.job.get() = Some(job) };
        self.shared.running.store(self.workers.len(), Ordering::Relaxed);
        // SeqCst with the worker's store to `asleep` and its second look at `epoch`: one of the two sees the other.
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.wake();
        let mine = inside(|| f(0));
        self.wait();
        let theirs = self.shared.panic.lock().take();
        drop(guard);
        if let Some(payload) = mine.err().or(theirs) {
            resume_unwind(payload);
        }
    }

    fn wake(&self) {
        for (asleep, (thread, _)) in self.shared.asleep.iter().zip(&self.workers) {
            if asleep.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
    }

    fn wait(&self) {
        let mut start = None;
        let mut spins = 0_u32;
        while self.shared.running.load(Ordering::Acquire) != 0 {
            spins = spins.wrapping_add(1);
            if !spins.is_multiple_of(64) {
                std::hint::spin_loop();
            } else if start.get_or_insert_with(Instant::now).elapsed() > CALLER_SPIN {
                // More threads than free cores: let the late worker have this one.
                thread::yield_now();
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        for (thread, handle) in &mut self.workers {
            thread.unpark();
            if let Some(handle) = handle.take() {
                // A worker catches what its jobs throw, so there is nothing to report.
                let _ = handle.join();
            }
        }
    }
}

/// Runs `f` with the nesting mark set and catches its panic.
fn inside(f: impl FnOnce()) -> thread::Result<()> {
    INSIDE.set(true);
    let result = catch_unwind(AssertUnwindSafe(f));
    INSIDE.set(false);
    result
}

fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    let mut window = SPIN_MAX;
    loop {
        seen = await_change(shared, worker, seen, &mut window);
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        // SAFETY: the epoch changed, so the job was written before and stays until this worker's decrement below.
        if let Some(job) = unsafe { *shared.job.get() } {
            // SAFETY: `run` keeps the closure alive until `running` is 0.
            if let Err(payload) = inside(|| unsafe { (*job)(worker + 1) }) {
                shared.panic.lock().get_or_insert(payload);
            }
        }
        shared.running.fetch_sub(1, Ordering::Release);
    }
}

/// Returns the new epoch once it differs from `seen`. Spins for `window`, which grows when spinning paid, then sleeps.
fn await_change(shared: &Shared, worker: usize, seen: u64, window: &mut Duration) -> u64 {
    let mut start = None;
    let mut spins = 0_u32;
    loop {
        let epoch = shared.epoch.load(Ordering::Acquire);
        if epoch != seen {
            *window = (*window * 2).min(SPIN_MAX);
            return epoch;
        }
        spins = spins.wrapping_add(1);
        if !spins.is_multiple_of(64) {
            std::hint::spin_loop();
        } else if start.get_or_insert_with(Instant::now).elapsed() > *window {
            break;
        }
    }
    *window = (*window / 2).max(SPIN_MIN);
    shared.asleep[worker].store(true, Ordering::SeqCst);
    loop {
        let epoch = shared.epoch.load(Ordering::SeqCst);
        if epoch != seen {
            shared.asleep[worker].store(false, Ordering::SeqCst);
            return epoch;
        }
        thread::park();
    }
}

/// Share `index` of `parts` of `items`, cut at multiples of `granule`; shares differ by at most one granule.
#[must_use]
pub fn split(items: usize, granule: usize, parts: usize, index: usize) -> Range<usize> {
    let granules = items.div_ceil(granule.max(1));
    let cut = |i: usize| (granules * i / parts.max(1) * granule.max(1)).min(items);
    cut(index)..cut(index + 1)
}

/// Hands out ranges of `0 .. items` to whoever asks first.
pub struct Chunks {
    next: AtomicUsize,
    items: usize,
    chunk: usize,
}

impl Chunks {
    /// Chunks of `chunk` items (at least 1).
    #[must_use]
    pub fn new(items: usize, chunk: usize) -> Self {
        Self { next: AtomicUsize::new(0), items, chunk: chunk.max(1) }
    }

    /// The next chunk, until all are given.
    #[must_use]
    pub fn take(&self) -> Option<Range<usize>> {
        let start = self.next.fetch_add(self.chunk, Ordering::Relaxed);
        (start < self.items).then(|| start..(start + self.chunk).min(self.items))
    }
}

/// Physical cores that this process may use: its affinity mask and CPU quota count, siblings of a core count once.
#[must_use]
pub fn default_threads() -> usize {
    let allowed = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    match physical_cores() {
        Some(cores) => allowed.min(cores).max(1),
        None => allowed,
    }
}

/// Distinct cores behind the CPUs of the affinity mask; None where the system doesn't tell.
fn physical_cores() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = std::collections::BTreeSet::new();
    for cpu in parse_cpu_list(list)? {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        cores.insert(parse_cpu_list(&std::fs::read_to_string(path).ok()?)?);
    }
    (!cores.is_empty()).then_some(cores.len())
}

/// `0-3,8` as the kernel writes it.
fn parse_cpu_list(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
        // A mask never names more CPUs than Linux can have.
        if last >= 1 << 16 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_runs_once_and_sees_borrowed_data() {
        for threads in [1, 2, 3, 5] {
            let pool = Pool::new(threads).unwrap();
            for _ in 0..200 {
                let hits: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
                pool.run(|i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_run_after_workers_fell_asleep_still_runs_everywhere() {
        let pool = Pool::new(3).unwrap();
        for pause in [0, 1, 5] {
            thread::sleep(Duration::from_millis(pause));
            let hits = AtomicUsize::new(0);
            pool.run(|_| {
                hits.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(hits.load(Ordering::Relaxed), 3);
        }
    }

    #[test]
    fn panic_of_any_thread_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(3).unwrap();
        for guilty in 0..3 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(|i| {
                    if i == guilty {
                        panic!("thread {i}");
                    }
                });
            }));
            let payload = caught.unwrap_err();
            assert_eq!(payload.downcast_ref::<String>().unwrap(), &format!("thread {guilty}"));
            let hits = AtomicUsize::new(0);
            pool.run(|_| {
                hits.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(hits.load(Ordering::Relaxed), 3);
        }
    }

    #[test]
    fn nested_and_concurrent_runs_do_not_deadlock() {
        let pool = Pool::new(2).unwrap();
        let hits = AtomicUsize::new(0);
        pool.run(|_| {
            pool.run(|_| {
                hits.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(hits.load(Ordering::Relaxed), 4);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        pool.run(|_| {
                            hits.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(hits.load(Ordering::Relaxed), 4 + 4 * 50 * 2);
    }

    #[test]
    fn shares_cover_all_items_once_at_granule_borders() {
        for items in [0, 1, 15, 16, 17, 100, 576] {
            for parts in 1..7 {
                let mut end = 0;
                for i in 0..parts {
                    let share = split(items, 16, parts, i);
                    assert_eq!(share.start, end);
                    assert!(share.start.is_multiple_of(16) || share.start == items);
                    end = share.end;
                }
                assert_eq!(end, items);
            }
        }
        let chunks = Chunks::new(10, 4);
        let taken: Vec<_> = std::iter::from_fn(|| chunks.take()).collect();
        assert_eq!(taken, [0..4, 4..8, 8..10]);
    }

    #[test]
    fn cpu_lists_parse_and_threads_are_sane() {
        assert_eq!(parse_cpu_list(" 0-2,5,7-8\n"), Some(vec![0, 1, 2, 5, 7, 8]));
        assert_eq!(parse_cpu_list("x"), None);
        let threads = default_threads();
        assert!(threads >= 1 && threads <= thread::available_parallelism().unwrap().get());
    }

    /// An idle pool sleeps: its workers use almost no CPU time. (Linux tells the time per thread.)
    #[test]
    #[cfg(target_os = "linux")]
    fn idle_workers_use_no_cpu() {
        let pool = Pool::new(2).unwrap();
        pool.run(|_| {});
        thread::sleep(Duration::from_millis(20));
        let ticks = || std::fs::read_to_string("/proc/thread-self/schedstat").map(|s| s.split(' ').next().unwrap().parse::<u64>().unwrap());
        let Ok(_) = ticks() else { return };
        let before = AtomicU64::new(0);
        let after = AtomicU64::new(0);
        pool.run(|i| {
            if i == 1 {
                before.store(ticks().unwrap(), Ordering::Relaxed);
            }
        });
        thread::sleep(Duration::from_millis(200));
        pool.run(|i| {
            if i == 1 {
                after.store(ticks().unwrap(), Ordering::Relaxed);
            }
        });
        let used = Duration::from_nanos(after.load(Ordering::Relaxed) - before.load(Ordering::Relaxed));
        assert!(used < Duration::from_millis(50), "an idle worker used {used:?} in 200 ms");
    }
}
