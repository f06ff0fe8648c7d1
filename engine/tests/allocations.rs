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
    time::Duration,
};

use quire_engine::{
    cache::GroupKind,
    config::EngineConfig,
    core::{EngineHandle, EventReceiver, KvFigures},
    model,
    runner::{Executor, Ticket},
    scheduler::{NewSequence, Outcome, Plan, Policy, Scheduler, SchedulerConfig},
};
use quire_kernels::{
    KernelError,
    plan::{StepLimits, StepOutput, StepPlan},
};
use quire_proto::{
    block_hash::{BlockHash, chain},
    worker::v1::{GenerateRequest, Sampling, Stopping, generate_event::Event},
};

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
    /// Rows of the step; allocations in submit and wait so far; those outside so far.
    entries: Vec<[AtomicU64; 3]>,
}

impl Log {
    fn entry(&self, step: usize) -> [u64; 3] {
        self.entries[step].each_ref().map(|value| value.load(Ordering::Relaxed))
    }

    fn wait_for(&self, steps: usize) {
        while self.steps.load(Ordering::Acquire) < steps {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// An executor that counts.
struct Watched {
    inner: Box<dyn Executor>,
    log: Arc<Log>,
    rows: u64,
    inside: u64,
    outside: u64,
    left: u64,
}

impl Watched {
    fn inside<T>(&mut self, work: impl FnOnce(&mut dyn Executor) -> T) -> T {
        let entered = count();
        self.outside += entered - self.left;
        let result = work(self.inner.as_mut());
        self.left = count();
        self.inside += self.left - entered;
        result
    }
}

impl Executor for Watched {
    fn limits(&self) -> StepLimits {
        self.inner.limits()
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<Ticket, KernelError> {
        self.rows = plan.rows() as u64;
        self.inside(|inner| inner.submit(plan))
    }

    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), KernelError> {
        let result = self.inside(|inner| inner.wait(ticket, out));
        let step = self.log.steps.load(Ordering::Relaxed);
        for (kept, value) in self.log.entries[step].iter().zip([self.rows, self.inside, self.outside]) {
            kept.store(value, Ordering::Relaxed);
        }
        self.log.steps.store(step + 1, Ordering::Release);
        result
    }
}

fn engine(threads: usize, step_ahead: usize) -> (EngineHandle, Arc<Log>) {
    let config =
        EngineConfig { threads, step_ahead, kv_blocks: 1024, max_sequences: 64, max_batched_tokens: 64, ..EngineConfig::default() };
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/models/llama-Q4_1.gguf");
    let loaded = model::load(&path, Vec::new(), &config).unwrap();
    let log = Arc::new(Log { steps: AtomicUsize::new(0), entries: (0..STEPS).map(|_| Default::default()).collect() });
    let watched = Watched { inner: loaded.executor, log: Arc::clone(&log), rows: 0, inside: 0, outside: 0, left: 0 };
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

/// Steps that are looked at: after the prompts, and before the first sequence ends.
const FROM: usize = 48;
const WINDOW: usize = 128;
/// Messages of one piece of a stream's queue.
const QUEUE_PIECE: usize = 32;

/// Device and loop allocate nothing; what is left are the queues of events, of which nobody reads: a piece for every 32 tokens.
fn steady(threads: usize, step_ahead: usize, sequences: usize) {
    let (handle, log) = engine(threads, step_ahead);
    let tokens = FROM + WINDOW + 16;
    let open: Vec<_> = (0..sequences).map(|i| handle.generate(request(i as u32, tokens as u32)).unwrap()).collect();
    log.wait_for(FROM + WINDOW + 1);
    let (first, last) = (log.entry(FROM), log.entry(FROM + WINDOW));
    for step in FROM..=FROM + WINDOW {
        assert_eq!(log.entry(step)[0] as usize, sequences, "step {step} is not one of decodes alone");
    }
    let what = format!("{threads} threads, {step_ahead} ahead, {sequences} sequences, {WINDOW} steps");
    let (inside, outside) = (last[1] - first[1], last[2] - first[2]);
    println!("{what}: {inside} allocations in the device, {outside} outside, all of them queues of events");
    assert_eq!(inside, 0, "{what}: the device");
    assert_eq!(outside as usize, sequences * WINDOW / QUEUE_PIECE, "{what}: scheduler, fill, commit, events");
    for events in open {
        assert_eq!(listen(events), tokens);
    }
    handle.shutdown();
}

#[test]
fn a_step_of_one_sequence_allocates_nothing() {
    steady(1, 0, 1);
    steady(2, 0, 1);
}

#[test]
fn a_step_of_thirty_two_sequences_allocates_nothing() {
    steady(1, 0, 32);
    steady(2, 0, 32);
}

#[test]
fn nor_does_one_that_was_planned_ahead() {
    steady(1, 1, 1);
    steady(1, 1, 32);
}

#[test]
fn the_scheduler_alone_allocates_nothing() {
    const BLOCK: usize = 16;
    const STEPS: usize = 100;
    // Room for growth: none is preempted. And not enough for those that wait.
    let blocks = 256 * (16 + 2 + STEPS / BLOCK) + 200;
    let mut scheduler = Scheduler::new(SchedulerConfig {
        max_sequences: 512,
        max_rows: 2048,
        max_logit_rows: 512,
        max_prefill_chunk: 2048,
        block_size: BLOCK,
        groups: vec![GroupKind::Full],
        blocks,
        watermark_blocks: blocks / 100,
        prefix_cache: true,
        policy: Policy { growth_cap: 64, ..Policy::default() },
        itl_target: Some(Duration::from_millis(50)),
        epoch: 1,
    });
    let (mut plan, mut outcomes) = (Plan::default(), Vec::new());
    let mut step = |scheduler: &mut Scheduler| {
        scheduler.plan(Duration::ZERO, &mut plan);
        outcomes.clear();
        outcomes.extend(plan.entries.iter().map(|entry| if entry.samples { Outcome::Token(7) } else { Outcome::Computed }));
        scheduler.commit(&plan, &outcomes);
        scheduler.observe(&plan, Duration::from_millis(20));
        (plan.decode_rows, plan.step)
    };
    for number in 0..256 {
        scheduler.add(sequence(number, 250)).unwrap();
    }
    // Prompts first, so that nothing is expected to grow beyond what there is.
    while scheduler.waiting() > 0 || step(&mut scheduler).0 < 256 {
        assert!(step(&mut scheduler).1 < 1_000, "{} of 256 are in", scheduler.running());
    }
    for number in 256..1256 {
        scheduler.add(sequence(number, if number < 261 { 32_000 } else { 256 })).unwrap();
    }
    for _ in 0..4 {
        step(&mut scheduler);
    }
    let before = count();
    for _ in 0..STEPS - 16 {
        assert_eq!(step(&mut scheduler).0, 256);
    }
    assert_eq!(count() - before, 0);
    assert_eq!((scheduler.running(), scheduler.waiting()), (256, 1000));
}

fn sequence(number: u32, len: u32) -> NewSequence {
    let tokens: Vec<u32> = (0..len).map(|i| number * 100_000 + i).collect();
    let root = BlockHash::root("", b"");
    NewSequence {
        prompt_len: tokens.len(),
        hashes: chain(root, &tokens, 16),
        use_index: true,
        max_len: tokens.len() + 200,
        tokens,
        root,
        priority: 0,
        arrival: u64::from(number),
        arrived: Duration::ZERO,
        deadline: None,
        score_prompt: false,
        step_ahead: true,
        fork_of: None,
    }
}
