//! Small sequences for small schedulers.

#![allow(dead_code)]

use std::time::Duration;

use quire_engine::{
    cache::GroupKind,
    scheduler::{NewSequence, Policy, SchedulerConfig},
};
use quire_proto::block_hash::{BlockHash, chain};

pub const B: usize = 4;

pub fn config(blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_sequences: 8,
        max_rows: 32,
        max_logit_rows: 8,
        max_prefill_chunk: 32,
        block_size: B,
        groups: vec![GroupKind::Full],
        blocks,
        watermark_blocks: 1,
        prefix_cache: true,
        policy: Policy::plain(),
        itl_target: None,
        epoch: 1,
    }
}

pub fn sequence(tokens: Vec<u32>, output: usize, arrival: u64) -> NewSequence {
    let root = BlockHash::root("", b"");
    NewSequence {
        prompt_len: tokens.len(),
        hashes: chain(root, &tokens, B),
        use_index: true,
        max_len: tokens.len() + output,
        tokens,
        root,
        priority: 0,
        arrival,
        arrived: Duration::ZERO,
        deadline: None,
        score_prompt: false,
        step_ahead: true,
        fork_of: None,
    }
}

pub fn distinct(base: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| base * 10_000 + i).collect()
}
