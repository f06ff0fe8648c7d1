//! Plans for whole models: several sequences in a step, any number of cache groups, chunks; and what a golden file holds.

#![allow(dead_code)]

use std::path::Path;

use quire_engine::runner::{Executor, ModelExecutor};
use quire_kernels::{
    backend::Backend,
    plan::{GroupPlan, NO_ADAPTER, NO_TOKEN, StepPlan},
};
use serde_json::Value as Json;

pub const BLOCK: usize = 16;

pub struct Prompt {
    pub ids: Vec<u32>,
    pub last_logits: Vec<f32>,
    pub greedy: Vec<u32>,
}

pub struct Scored {
    pub prompt: usize,
    /// From the second token on.
    pub logprobs: Vec<f32>,
    pub argmax: Vec<u32>,
}

pub struct Golden {
    pub prompts: Vec<Prompt>,
    pub scored: Option<Scored>,
}

pub fn ids(value: &Json) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub fn floats(value: &Json) -> Vec<f32> {
    value.as_array().unwrap().iter().filter_map(Json::as_f64).map(|x| x as f32).collect()
}

impl Golden {
    /// `None`: the folder holds no decoder's golden values.
    pub fn read(folder: &Path) -> Option<Self> {
        let json: Json = serde_json::from_slice(&std::fs::read(folder.join("golden.json")).ok()?).unwrap();
        let prompts = json["prompts"].as_array()?;
        let prompt = |p: &Json| Prompt { ids: ids(&p["ids"]), last_logits: floats(&p["last_logits"]), greedy: ids(&p["greedy"]) };
        let scored = json.get("prompt_logprobs").map(|s| Scored {
            prompt: s["prompt"].as_u64().unwrap() as usize,
            logprobs: floats(&s["logprobs"]),
            argmax: ids(&s["argmax"]),
        });
        Some(Self { prompts: prompts.iter().map(prompt).collect(), scored })
    }
}

/// Rows of one sequence: which one, its tokens, the position of the first, and how many of the last rows want logits.
pub struct Rows<'a> {
    pub sequence: usize,
    pub ids: &'a [u32],
    pub start: usize,
    pub logits: usize,
}

/// One step; `span` is the length of a block table. Blocks go backwards through the pool, so that tables are used; each sequence has its own in each group.
pub fn plan(rows: &[Rows<'_>], groups: usize, blocks: usize, span: usize) -> StepPlan {
    let block = |sequence: usize, group: usize, index: usize| {
        let number = (sequence * groups + group) * span + index;
        assert!(index < span && number < blocks, "the test has too few blocks");
        blocks - 1 - number
    };
    let mut plan =
        StepPlan { row_starts: vec![0], groups: vec![GroupPlan { stride: span, ..GroupPlan::default() }; groups], ..StepPlan::default() };
    for rows in rows {
        let end = rows.start + rows.ids.len();
        plan.inputs.extend(rows.ids);
        plan.positions.extend((rows.start..end).map(|position| position as u32));
        plan.adapters.extend(rows.ids.iter().map(|_| NO_ADAPTER));
        let last = plan.inputs.len() as u32;
        plan.row_starts.push(last);
        plan.context_lens.push(end as u32);
        plan.logit_rows.extend(last - rows.logits as u32..last);
        for (number, group) in plan.groups.iter_mut().enumerate() {
            let place = |position: usize| block(rows.sequence, number, position / BLOCK) * BLOCK + position % BLOCK;
            group.slots.extend((rows.start..end).map(|position| place(position) as u32));
            let used = end.div_ceil(BLOCK);
            group.block_tables.extend((0..span).map(|i| if i < used { block(rows.sequence, number, i) as u32 } else { 0 }));
        }
    }
    let n = plan.logit_rows.len();
    let s = &mut plan.sampling;
    s.targets = vec![NO_TOKEN; n];
    (s.temperature, s.top_p, s.min_p, s.repetition) = (vec![0.0; n], vec![1.0; n], vec![0.0; n], vec![1.0; n]);
    (s.presence, s.frequency) = (vec![0.0; n], vec![0.0; n]);
    (s.top_k, s.seed, s.draw, s.logprobs, s.mask_rows) = (vec![0; n], vec![0; n], vec![0; n], vec![-1; n], vec![-1; n]);
    (s.bias_starts, s.history_starts) = (vec![0; n + 1], vec![0; n + 1]);
    plan
}

/// A model that runs plans.
pub struct Runner<'e, B: Backend> {
    pub executor: &'e mut ModelExecutor<B>,
    pub groups: usize,
    pub blocks: usize,
}

impl<B: Backend> Runner<'_, B> {
    fn vocabulary(&self) -> usize {
        self.executor.decoder().description().vocabulary
    }

    /// Logits of each sequence's last token: all prompts in the same steps, at most `chunk` rows of each in one.
    pub fn prefill(&mut self, prompts: &[&[u32]], chunk: usize) -> Vec<Vec<f32>> {
        let vocabulary = self.vocabulary();
        let mut last = vec![Vec::new(); prompts.len()];
        let longest = prompts.iter().map(|ids| ids.len()).max().unwrap_or(0);
        for start in (0..longest).step_by(chunk) {
            let rows: Vec<Rows<'_>> = prompts
                .iter()
                .enumerate()
                .filter(|(_, ids)| start < ids.len())
                .map(|(sequence, ids)| {
                    let end = ids.len().min(start + chunk);
                    Rows { sequence, ids: &ids[start..end], start, logits: usize::from(end == ids.len()) }
                })
                .collect();
            let logits =
                self.executor.logits_of(&plan(&rows, self.groups, self.blocks, self.executor.limits().blocks_per_sequence)).unwrap();
            let done = rows.iter().filter(|rows| rows.logits == 1).map(|rows| rows.sequence);
            for (sequence, row) in done.zip(logits.chunks(vocabulary)) {
                last[sequence] = row.to_vec();
            }
        }
        last
    }

    /// Logits of the last prompt token, then what greedy decoding gives, all sequences together.
    pub fn greedy(&mut self, prompts: &[&[u32]], chunk: usize, steps: usize) -> Vec<(Vec<f32>, Vec<u32>)> {
        let vocabulary = self.vocabulary();
        let last = self.prefill(prompts, chunk);
        let mut given: Vec<Vec<u32>> = last.iter().map(|logits| vec![argmax(logits)]).collect();
        for step in 1..steps {
            let rows: Vec<Rows<'_>> = prompts
                .iter()
                .zip(&given)
                .enumerate()
                .map(|(sequence, (ids, given))| Rows { sequence, ids: &given[step - 1..], start: ids.len() + step - 1, logits: 1 })
                .collect();
            let logits =
                self.executor.logits_of(&plan(&rows, self.groups, self.blocks, self.executor.limits().blocks_per_sequence)).unwrap();
            for (given, row) in given.iter_mut().zip(logits.chunks(vocabulary)) {
                given.push(argmax(row));
            }
        }
        last.into_iter().zip(given).collect()
    }

    /// For each token but the first, its log-probability and the likeliest one's id.
    pub fn score(&mut self, ids: &[u32], chunk: usize) -> Vec<(f32, u32)> {
        let vocabulary = self.vocabulary();
        let mut scores = Vec::new();
        for start in (0..ids.len() - 1).step_by(chunk) {
            let end = (start + chunk).min(ids.len() - 1);
            let rows = [Rows { sequence: 0, ids: &ids[start..end], start, logits: end - start }];
            let logits =
                self.executor.logits_of(&plan(&rows, self.groups, self.blocks, self.executor.limits().blocks_per_sequence)).unwrap();
            for (row, next) in logits.chunks(vocabulary).zip(&ids[start + 1..]) {
                scores.push((log_softmax(row, *next), argmax(row)));
            }
        }
        scores
    }

    pub fn rows(&self) -> usize {
        self.executor.limits().rows
    }
}

/// The first of the largest.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as u32
}

fn log_softmax(logits: &[f32], id: u32) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    (f64::from(logits[id as usize] - max) - sum.ln()) as f32
}

pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| if (a - b).is_finite() { (a - b).abs() } else { f32::INFINITY }).fold(0.0, f32::max)
}
