//! Nothing allocates in the steady state of a step: the real loop, over the real model on the CPU, with every allocation counted
//! by the thread that makes it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use quire_engine::{
    config::EngineConfig,
    core::{EngineHandle, EventReceiver, KvFigures},
    model,
    runner::{Executor, Ticket},
};
use quire_kernels::{
    KernelError,
    plan::{StepLimits, StepOutput, StepPlan},
};
use quire_proto::worker::v1::{GenerateRequest, Sampling, Stopping, generate_event::Event};

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// Allocations of this thread so far.
fn count() -> u64 {
    COUNT.with(Cell::get)
}

struct Counting;

// SAFETY: every call goes on to the system's allocator as it came; counting touches a cell of this thread and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above; it came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const STEPS: usize = 4096;

/// What the step thread allocated, step by step.
struct Log {
    steps: AtomicUsize,
    /// Rows of the step; allocations in submit and wait; those between it and the step before.
    entries: Vec<[AtomicU64; 3]>,
}

/// An executor that counts.
struct Watched {
    inner: Box<dyn Executor>,
    log: Arc<Log>,
    left: u64,
    entered: u64,
}

impl Executor for Watched {
    fn limits(&self) -> StepLimits {
        self.inner.limits()
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<Ticket, KernelError> {
        self.entered = count();
        let [rows, _, between] = &self.log.entries[self.log.steps.load(Ordering::Relaxed)];
        rows.store(plan.rows() as u64, Ordering::Relaxed);
        between.store(self.entered - self.left, Ordering::Relaxed);
        self.inner.submit(plan)
    }

    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), KernelError> {
        let result = self.inner.wait(ticket, out);
        self.left = count();
        let step = self.log.steps.load(Ordering::Relaxed);
        self.log.entries[step][1].store(self.left - self.entered, Ordering::Relaxed);
        self.log.steps.store(step + 1, Ordering::Release);
        result
    }
}

fn engine(threads: usize) -> (EngineHandle, Arc<Log>) {
    let config = EngineConfig { threads, kv_blocks: 512, max_sequences: 64, max_batched_tokens: 64, ..EngineConfig::default() };
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/models/llama-Q4_1.gguf");
    let loaded = model::load(&path, Vec::new(), &config).unwrap();
    let log = Arc::new(Log { steps: AtomicUsize::new(0), entries: (0..STEPS).map(|_| Default::default()).collect() });
    let watched = Watched { inner: loaded.executor, log: Arc::clone(&log), left: 0, entered: 0 };
    (EngineHandle::spawn(Box::new(watched), KvFigures::from(&loaded.memory), loaded.card, &config).unwrap(), log)
}

fn request(number: u32, tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt_ids: (0..20).map(|i| 5 + (number * 131 + i * 17) % 200).collect(),
        sampling: Some(Sampling { temperature: 0.8, top_p: 0.95, top_k: 40, seed: number.into(), ..Sampling::default() }),
        stopping: Some(Stopping { max_tokens: tokens, ignore_eos: true, ..Stopping::default() }),
        ..GenerateRequest::default()
    }
}

fn listen(mut events: EventReceiver) -> usize {
    let mut tokens = 0;
    while let Some(event) = events.blocking_recv() {
        tokens += usize::from(matches!(event.event, Some(Event::Token(_))));
    }
    tokens
}

#[test]
fn look() {
    for threads in [1, 2] {
        for sequences in [1u32, 32] {
            let (handle, log) = engine(threads);
            let open: Vec<_> = (0..sequences).map(|i| handle.generate(request(i, 200)).unwrap()).collect();
            for events in open {
                assert_eq!(listen(events), 200);
            }
            handle.shutdown();
            let steps = log.steps.load(Ordering::Acquire);
            println!("{threads} threads, {sequences} sequences, {steps} steps");
            for step in 0..steps {
                let [rows, inside, between] = &log.entries[step];
                let (rows, inside, between) = (rows.load(Ordering::Relaxed), inside.load(Ordering::Relaxed), between.load(Ordering::Relaxed));
                if inside + between > 0 {
                    println!("  {step}: {rows} rows: {inside} inside, {between} between");
                }
            }
        }
    }
}
