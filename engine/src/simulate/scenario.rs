use std::{fmt::Write, time::Duration};

use super::{Cost, Lengths, Prefixes, Report, TraceSpec, simulate};
use crate::{
    cache::{CacheLayout, GroupKind, LayerCache},
    scheduler::{Policy, SchedulerConfig},
};

/// One situation and the policies that are compared in it.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub name: &'static str,
    pub about: &'static str,
    pub trace: TraceSpec,
    pub cost: Cost,
    pub config: SchedulerConfig,
    pub policies: Vec<(&'static str, Policy, Option<Duration>)>,
    /// Instead of several policies: cache groups and number of blocks that are compared under the first of them.
    pub memories: Vec<(&'static str, Vec<GroupKind>, usize)>,
}

impl Scenario {
    /// A report for each policy.
    pub fn run(&self) -> impl Iterator<Item = (&'static str, Report)> + '_ {
        let trace = self.trace.generate();
        self.configs().into_iter().map(move |(name, config)| (name, simulate(&config, &self.cost, &trace)))
    }

    fn configs(&self) -> Vec<(&'static str, SchedulerConfig)> {
        let policies = self
            .policies
            .iter()
            .map(|(name, policy, itl_target)| (*name, SchedulerConfig { policy: *policy, itl_target: *itl_target, ..self.config.clone() }));
        let Some((_, config)) = policies.clone().next().filter(|_| !self.memories.is_empty()) else { return policies.collect() };
        let memory = |(name, groups, blocks): &(&'static str, Vec<GroupKind>, usize)| {
            (*name, SchedulerConfig { groups: groups.clone(), blocks: *blocks, ..config.clone() })
        };
        self.memories.iter().map(memory).collect()
    }
}

/// The reports of a scenario as a table.
#[must_use]
pub fn table(scenario: &Scenario) -> String {
    let mut out = format!("{}: {}\n\n{}\n", scenario.name, scenario.about, Report::HEAD);
    for (name, report) in scenario.run() {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "| {name} |{report}");
    }
    out
}

fn machine(blocks: usize, max_sequences: usize, max_rows: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_sequences,
        max_rows,
        max_logit_rows: max_sequences,
        max_prefill_chunk: max_rows,
        block_size: 16,
        groups: vec![GroupKind::Full],
        blocks,
        watermark_blocks: blocks.div_ceil(100),
        prefix_cache: true,
        policy: Policy::default(),
        itl_target: None,
        epoch: 1,
    }
}

/// The situations that the defaults come from. `requests` scales them; 5,000 are what the documentation shows.
#[must_use]
pub fn scenarios(requests: usize) -> Vec<Scenario> {
    vec![
        chat(requests),
        tight(requests),
        prefixes(requests),
        bursts(requests),
        priorities(requests),
        long_prompts(requests),
        windows(requests),
    ]
}

const DEFAULT: fn() -> (&'static str, Policy, Option<Duration>) = || ("default", Policy::default(), None);
const PLAIN: fn() -> (&'static str, Policy, Option<Duration>) = || ("plain", Policy::plain(), None);

fn chat(requests: usize) -> Scenario {
    Scenario {
        name: "chat",
        about: "lengths like ShareGPT's, memory for all, a GPU at about 80 % of what it can do",
        trace: TraceSpec { requests, rate: 32.0, ..TraceSpec::default() },
        cost: Cost::gpu(),
        config: machine(16_384, 256, 2048),
        policies: vec![PLAIN(), DEFAULT()],
        memories: Vec::new(),
    }
}

fn tight(requests: usize) -> Scenario {
    let growth = |growth_reserve| Policy { growth_reserve, ..Policy::default() };
    Scenario {
        name: "tight",
        about: "the same, but the memory holds hardly as many as come",
        trace: TraceSpec { requests, rate: 20.0, ..TraceSpec::default() },
        cost: Cost::gpu(),
        config: machine(1_536, 256, 2048),
        policies: vec![
            PLAIN(),
            ("growth 0", growth(0.0), None),
            ("growth 0.5", growth(0.5), None),
            ("growth 0.75 (default)", growth(0.75), None),
            ("growth 1", growth(1.0), None),
            ("growth 1.5", growth(1.5), None),
        ],
        memories: Vec::new(),
    }
}

fn prefixes(requests: usize) -> Scenario {
    Scenario {
        name: "prefixes",
        about: "four of five prompts begin with one of 16 system prompts of 1,024 tokens",
        trace: TraceSpec { requests, rate: 24.0, prefixes: Some(Prefixes { count: 16, tokens: 1024, share: 0.8 }), ..TraceSpec::default() },
        cost: Cost::gpu(),
        config: machine(4_096, 256, 2048),
        policies: vec![PLAIN(), DEFAULT()],
        memories: Vec::new(),
    }
}

fn bursts(requests: usize) -> Scenario {
    let bypass = |bypass_depth, bypass_passes| Policy { bypass_depth, bypass_passes, ..Policy::default() };
    Scenario {
        name: "bursts",
        about: "bursts of 50, prompts of very different lengths, little memory",
        trace: TraceSpec {
            requests,
            rate: 10.0,
            burst: 50,
            prompt: Lengths { median: 150.0, sigma: 1.6, min: 4, max: 8192 },
            ..TraceSpec::default()
        },
        cost: Cost::gpu(),
        config: machine(1_536, 256, 2048),
        policies: vec![
            PLAIN(),
            ("no bypass", bypass(0, 0), None),
            ("1 deep, 4 passes", bypass(1, 4), None),
            ("4 deep, 16 passes (default)", bypass(4, 16), None),
            ("16 deep, 64 passes", bypass(16, 64), None),
        ],
        memories: Vec::new(),
    }
}

fn priorities(requests: usize) -> Scenario {
    let ageing = |seconds| Policy { ageing: Duration::from_secs(seconds), ..Policy::default() };
    Scenario {
        name: "priorities",
        about: "half of the requests have low priority, little memory, close to what it can do",
        trace: TraceSpec { requests, rate: 14.5, low_priority: 0.5, ..TraceSpec::default() },
        cost: Cost::gpu(),
        config: machine(1_024, 256, 2048),
        policies: vec![("absolute", ageing(0), None), ("ageing 5 s (default)", ageing(5), None), ("ageing 30 s", ageing(30), None)],
        memories: Vec::new(),
    }
}

fn long_prompts(requests: usize) -> Scenario {
    let target = |ms| Some(Duration::from_millis(ms));
    Scenario {
        name: "long prompts",
        about: "streams on two cores, and now and then a prompt of 6,000 tokens",
        trace: TraceSpec {
            requests: requests.div_ceil(5),
            rate: 0.8,
            prompt: Lengths { median: 60.0, sigma: 0.5, min: 4, max: 256 },
            long: Some((requests.div_ceil(100), 6_000)),
            ..TraceSpec::default()
        },
        cost: Cost::small_cpu(),
        config: machine(4_096, 64, 512),
        policies: vec![
            ("no target (default)", Policy::default(), None),
            ("target 100 ms", Policy::default(), target(100)),
            ("target 50 ms", Policy::default(), target(50)),
            ("target 30 ms", Policy::default(), target(30)),
        ],
        memories: Vec::new(),
    }
}

/// Gemma 3 4B: 34 layers, five of six of which see 1,024 positions. The same bytes for all: blocks of all layers, or seven
/// times as many of five layers.
fn windows(requests: usize) -> Scenario {
    let layers: Vec<_> = (1..=34)
        .map(|layer| if layer % 6 == 0 { GroupKind::Full } else { GroupKind::Window { tokens: 1024 } })
        .map(|kind| Some(LayerCache { kind, shape: 0, width: 2048 }))
        .collect();
    let layout = CacheLayout::new(&layers);
    let each = layout.layers_per_block().first().copied().unwrap_or(1);
    let groups = || layout.groups().to_vec();
    Scenario {
        name: "windows",
        about: "long prompts; every layer keeps everything, or five of six keep what their window of 1,024 needs; the same memory",
        trace: TraceSpec {
            requests: requests.div_ceil(2),
            rate: 3.0,
            prompt: Lengths { median: 3_000.0, sigma: 0.8, min: 64, max: 16_384 },
            ..TraceSpec::default()
        },
        cost: Cost::gpu(),
        config: machine(4_096, 256, 2048),
        policies: vec![DEFAULT()],
        memories: vec![
            ("all layers full, ample", vec![GroupKind::Full], 32_768),
            ("windows, ample", groups(), 32_768 * 34 / each),
            ("all layers full, tight", vec![GroupKind::Full], 4_096),
            ("windows, tight", groups(), 4_096 * 34 / each),
        ],
    }
}
