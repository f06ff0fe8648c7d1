//! A device without arithmetic: it remembers which token was written to which slot, and the next token is a hash of all
//! tokens that a row reads through its block table. So a wrong table, slot, position or a block reused too early changes
//! the output.

#![allow(dead_code)]

pub mod replica;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use quire_engine::{
    cache::GroupKind,
    config::EngineConfig,
    core::{EngineHandle, EventReceiver, KvFigures},
    model::{ModelCard, SamplingDefaults},
    runner::{Executor, Ticket},
};
use quire_kernels::{
    KernelError,
    plan::{GroupPlan, NO_TOKEN, SAMPLED_ROW, StepLimits, StepOutput, StepPlan},
};
use quire_proto::worker::v1::{FinishReason, Finished, GenerateRequest, Sampling, Started, Stopping, Token, generate_event::Event};

pub const VOCAB: usize = 1000;
pub const EOS: u32 = 2;
/// A sequence that holds this token has no finite logits.
pub const POISON: u32 = 666;
/// A step that computes this token panics.
pub const PANIC: u32 = 667;
/// A step that computes this token fails.
pub const BROKEN: u32 = 668;

/// Not `NO_TOKEN`, which a row computes whose input was no token.
const EMPTY: u32 = u32::MAX - 1;

#[derive(Clone, Default)]
pub struct Switches {
    /// Microseconds that a step takes.
    pub step_us: Arc<AtomicUsize>,
    /// While set, a step does not end.
    pub hold: Arc<AtomicBool>,
    /// The largest number of sequences seen in a step.
    pub widest: Arc<AtomicUsize>,
    /// Blocks copied.
    pub copied: Arc<AtomicUsize>,
    /// While set, every step panics.
    pub broken: Arc<AtomicBool>,
    /// Rows that named a token of a step under way.
    pub placeholders: Arc<AtomicUsize>,
}

pub struct Fake {
    memory: Vec<u32>,
    /// The first one keeps everything.
    groups: Vec<GroupKind>,
    block_size: usize,
    limits: StepLimits,
    switches: Switches,
    ticket: u64,
    /// Tokens of the last step that had any.
    sampled: Vec<u32>,
    result: StepOutput,
    /// Steps that were not waited for.
    done: VecDeque<(Ticket, StepOutput)>,
}

fn mix(state: u64, value: u64) -> u64 {
    let mut z = (state ^ value).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 27)
}

/// What stands for the logits of a prefix.
pub fn state(tokens: impl IntoIterator<Item = u32>) -> u64 {
    tokens.into_iter().fold(1, |state, token| mix(state, u64::from(token)))
}

/// What stands for the log-probability of a token after a prefix.
pub fn logprob(state: u64, token: u32) -> f32 {
    -((mix(state, u64::from(token)) % 1000) as f32) / 100.0
}

fn draw(state: u64, temperature: f32, seed: u64, number: u32, banned: &[u32]) -> u32 {
    let random = if temperature > 0.0 { mix(seed, u64::from(number)) } else { 0 };
    let mut token = (mix(state, random) % VOCAB as u64) as u32;
    while banned.contains(&token) || (POISON..=BROKEN).contains(&token) {
        token = (token + 1) % VOCAB as u32;
    }
    token
}

/// The greedy continuation of a prompt, up to `n` tokens or the end token, by definition.
pub fn expected(prompt: &[u32], n: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    while tokens.len() < prompt.len() + n {
        let token = draw(state(tokens.iter().copied()), 0.0, 0, 0, &[]);
        tokens.push(token);
        if token == EOS {
            break;
        }
    }
    tokens.split_off(prompt.len())
}

impl Fake {
    fn compute(&mut self, plan: &StepPlan) {
        assert!(!self.switches.broken.load(Ordering::Relaxed), "broken for good");
        let group = &plan.groups[0];
        for &(from, to) in &plan.block_copies {
            let from = from as usize * self.block_size;
            self.memory.copy_within(from..from + self.block_size, to as usize * self.block_size);
            self.switches.copied.fetch_add(1, Ordering::Relaxed);
        }
        // All rows are written before any of them reads.
        for (row, input) in plan.inputs.iter().enumerate() {
            let token = if input & SAMPLED_ROW == 0 { *input } else { self.sampled[(input & !SAMPLED_ROW) as usize] };
            self.switches.placeholders.fetch_add((token != *input) as usize, Ordering::Relaxed);
            assert!(token != PANIC, "told to panic");
            plan.groups.iter().for_each(|group| self.memory[group.slots[row] as usize] = token);
        }
        (1..plan.groups.len()).for_each(|number| self.check_window(plan, number));
        let mut wanted = plan.logit_rows.iter().enumerate().peekable();
        self.result.clear();
        self.result.top_starts.push(0);
        for s in 0..plan.sequences() {
            let rows = plan.row_starts[s] as usize..plan.row_starts[s + 1] as usize;
            assert_eq!(plan.context_lens[s], plan.positions[rows.end - 1] + 1);
            let table = &group.block_tables[s * group.stride..][..group.stride];
            for row in rows {
                let Some((i, _)) = wanted.next_if(|(_, logit_row)| **logit_row as usize == row) else { continue };
                let past = (0..=plan.positions[row] as usize)
                    .map(|position| self.memory[table[position / self.block_size] as usize * self.block_size + position % self.block_size]);
                let past: Vec<u32> = past.collect();
                assert!(!past.contains(&EMPTY), "a row reads what was never written");
                self.row(plan, i, &past);
            }
        }
        assert!(wanted.next().is_none(), "logit rows do not ascend");
        if !self.result.ids.is_empty() {
            self.sampled.clone_from(&self.result.ids);
        }
    }

    fn at(&self, plan: &StepPlan, group: usize, sequence: usize, position: usize) -> u32 {
        let GroupPlan { block_tables, stride, .. } = &plan.groups[group];
        let block = block_tables[sequence * stride + position / self.block_size] as usize;
        self.memory[block * self.block_size + position % self.block_size]
    }

    /// What the rows of a step see in another group is what the first one, which keeps everything, has there.
    fn check_window(&self, plan: &StepPlan, group: usize) {
        for s in 0..plan.sequences() {
            let first = plan.positions[plan.row_starts[s] as usize] as usize;
            for position in self.groups[group].first_visible(first)..plan.context_lens[s] as usize {
                assert_eq!(self.at(plan, group, s, position), self.at(plan, 0, s, position), "group {group}, position {position}");
            }
        }
    }

    fn row(&mut self, plan: &StepPlan, i: usize, past: &[u32]) {
        let s = &plan.sampling;
        let state = state(past.iter().copied());
        let biases = s.bias_starts[i] as usize..s.bias_starts[i + 1] as usize;
        let banned: Vec<u32> = biases.filter(|b| s.bias_values[*b] == f32::NEG_INFINITY).map(|b| s.bias_ids[b]).collect();
        let id = match s.targets[i] {
            _ if past.contains(&POISON) || past.contains(&NO_TOKEN) => NO_TOKEN,
            NO_TOKEN => draw(state, s.temperature[i], s.seed[i], s.draw[i], &banned),
            target => target,
        };
        self.result.ids.push(id);
        self.result.logprobs.push(if s.logprobs[i] >= 0 { logprob(state, id) } else { f32::NAN });
        for k in 0..s.logprobs[i].max(0) as u32 {
            self.result.top_ids.push(k);
            self.result.top_logprobs.push(-(k as f32));
        }
        self.result.top_starts.push(self.result.top_ids.len() as u32);
    }
}

impl Executor for Fake {
    fn limits(&self) -> StepLimits {
        self.limits
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<Ticket, KernelError> {
        assert!(
            plan.rows() <= self.limits.rows && plan.sequences() <= self.limits.sequences && plan.logit_rows.len() <= self.limits.logit_rows
        );
        assert_eq!(plan.inputs.len(), plan.groups[0].slots.len());
        self.switches.widest.fetch_max(plan.sequences(), Ordering::Relaxed);
        if plan.inputs.contains(&BROKEN) {
            return Err(KernelError::Device("told to fail".to_owned()));
        }
        self.compute(plan);
        self.ticket += 1;
        self.done.push_back((Ticket(self.ticket), std::mem::take(&mut self.result)));
        assert!(self.done.len() <= 2, "too far ahead");
        Ok(Ticket(self.ticket))
    }

    fn wait(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), KernelError> {
        let (next, result) = self.done.pop_front().unwrap();
        assert_eq!(ticket, next);
        std::thread::sleep(Duration::from_micros(self.switches.step_us.load(Ordering::Relaxed) as u64));
        while self.switches.hold.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        *out = result;
        Ok(())
    }
}

pub fn card(name: &str) -> ModelCard {
    ModelCard {
        names: vec![name.to_owned(), format!("{name}-alias")],
        architecture: "fake".to_owned(),
        parameters: 1,
        weights: "F32".to_owned(),
        weights_hash: "00".to_owned(),
        created: 1,
        trained_context: 512,
        max_context: 512,
        vocab_size: VOCAB,
        bos_id: Some(1),
        add_bos: true,
        eos_ids: vec![EOS],
        sampling: SamplingDefaults::default(),
        backend: "fake".to_owned(),
        instruction_set: "none".to_owned(),
        kv_type: "f16".to_owned(),
        threads: 1,
    }
}

/// Steps ahead, from the environment, so that every test can run both ways.
pub fn step_ahead() -> usize {
    std::env::var("QUIRE_STEP_AHEAD").map_or(0, |text| text.parse().unwrap())
}

/// An engine over the fake device.
pub fn engine(blocks: usize, change: impl FnOnce(&mut EngineConfig)) -> (EngineHandle, Switches) {
    engine_of(&[GroupKind::Full], blocks, change)
}

/// The same, of a model whose layers form several cache groups; the first one keeps everything.
pub fn engine_of(groups: &[GroupKind], blocks: usize, change: impl FnOnce(&mut EngineConfig)) -> (EngineHandle, Switches) {
    let switches = Switches::default();
    let mut config = EngineConfig { max_batched_tokens: 64, step_ahead: step_ahead(), ..EngineConfig::default() };
    change(&mut config);
    let kv = KvFigures { blocks, block_size: config.block_size, groups: groups.to_vec() };
    let limits = StepLimits { rows: 64, sequences: 64, logit_rows: 64, blocks_per_sequence: 512 / config.block_size, top_logprobs: 20 };
    let fake = Fake {
        memory: vec![EMPTY; blocks * config.block_size],
        groups: groups.to_vec(),
        block_size: config.block_size,
        limits,
        switches: switches.clone(),
        ticket: 0,
        sampled: Vec::new(),
        done: VecDeque::new(),
        result: StepOutput::default(),
    };
    (EngineHandle::spawn(Box::new(fake), kv, card("fake"), &config).unwrap(), switches)
}

pub fn request(prompt_ids: Vec<u32>, max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        request_id: "test".to_owned(),
        model: "fake".to_owned(),
        prompt_ids,
        sampling: Some(Sampling::default()),
        stopping: Some(Stopping { max_tokens, ..Stopping::default() }),
        ..GenerateRequest::default()
    }
}

/// A prompt of `len` tokens, differing from that of other seeds from its first token on.
pub fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 10 + (mix(u64::from(seed) + 1, u64::from(i)) % 600) as u32).collect()
}

/// Everything that a request said.
#[derive(Debug, Default)]
pub struct Said {
    pub started: Option<Started>,
    pub tokens: Vec<Token>,
    pub finished: Vec<Finished>,
}

impl Said {
    pub fn ids(&self, choice: u32) -> Vec<u32> {
        self.tokens.iter().filter(|token| token.choice == choice).map(|token| token.id).collect()
    }

    pub fn reason(&self) -> FinishReason {
        assert_eq!(self.finished.len(), 1);
        self.finished[0].reason()
    }

    /// Takes an event, checking the grammar: Started, tokens at ascending positions, Finished.
    pub fn hear(&mut self, event: Event) {
        match event {
            Event::Started(started) => {
                assert!(self.started.is_none() && self.tokens.is_empty(), "Started comes once and first");
                self.started = Some(started);
            }
            Event::Token(token) => {
                assert!(self.started.is_some());
                assert!(self.finished.iter().all(|finished| finished.choice != token.choice), "a token after the end");
                if let Some(last) = self.tokens.iter().rev().find(|other| other.choice == token.choice) {
                    assert_eq!(token.position, last.position + 1);
                }
                self.tokens.push(token);
            }
            Event::Finished(finished) => self.finished.push(finished),
        }
    }
}

/// Listens to the end.
pub async fn listen(mut events: EventReceiver) -> Said {
    let mut said = Said::default();
    while let Some(event) = events.recv().await {
        said.hear(event.event.unwrap());
    }
    assert!(events.finished(), "the stream ended early: {said:?}");
    said
}

/// Waits until nothing is left in the engine.
pub async fn at_rest(handle: &EngineHandle) {
    for _ in 0..400 {
        let load = handle.load();
        // What a step under way still writes to comes back when it ends.
        if load.requests == 0 && (load.kv_blocks_used == 0 || step_ahead() == 0) {
            assert_eq!((load.running, load.waiting, load.waiting_prompt_tokens, load.kv_blocks_used), (0, 0, 0, 0), "{load:?}");
            assert_eq!(load.step_age, Duration::ZERO);
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("not at rest after two seconds: {:?}", handle.load());
}
