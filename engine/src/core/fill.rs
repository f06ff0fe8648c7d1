//! The scheduler's plan → flat arrays.

use quire_kernels::plan::{NO_ADAPTER, SAMPLED_ROW, StepPlan};

use super::emit::Choices;
use crate::{
    cache::BlockId,
    sampling,
    scheduler::{Plan, Scheduled, Scheduler, Sequence},
};

/// Fills `out` (cleared first) with the rows of `plan`.
pub(crate) fn fill(plan: &Plan, scheduler: &Scheduler, choices: &Choices, out: &mut StepPlan) {
    out.clear();
    sampling::begin(&mut out.sampling);
    out.row_starts.push(0);
    out.block_copies.extend(plan.copies.iter().map(|(from, to)| (from.0, to.0)));
    let block_size = scheduler.cache().block_size();
    let sequences = || plan.entries.iter().filter_map(|entry| scheduler.sequence(entry.sequence).map(|sequence| (entry, sequence)));
    for (number, group) in out.groups.iter_mut().enumerate() {
        group.stride = sequences().map(|(_, sequence)| sequence.table(number).len()).max().unwrap_or(0);
        for (entry, sequence) in sequences() {
            let table = sequence.table(number);
            group.slots.extend((entry.start..entry.start + entry.len).map(|position| {
                let block = table[position / block_size];
                block.0 * block_size as u32 + (position % block_size) as u32
            }));
            let end = group.block_tables.len() + group.stride;
            // What left the window is never read, but the device checks that every entry is a block.
            group.block_tables.extend(table.iter().map(|block| if *block == BlockId::DEAD { 0 } else { block.0 }));
            group.block_tables.resize(end, 0);
        }
    }
    for (entry, sequence) in sequences() {
        let end = entry.start + entry.len;
        logit_rows(entry, sequence, choices, out);
        let known = end - usize::from(entry.placeholder.is_some());
        out.inputs.extend_from_slice(&sequence.tokens()[entry.start..known]);
        out.inputs.extend(entry.placeholder.map(|row| SAMPLED_ROW | row));
        out.positions.extend(entry.start as u32..end as u32);
        out.adapters.resize(out.inputs.len(), NO_ADAPTER);
        out.row_starts.push(out.inputs.len() as u32);
        out.context_lens.push(end as u32);
    }
}

fn logit_rows(entry: &Scheduled, sequence: &Sequence, choices: &Choices, out: &mut StepPlan) {
    let first = out.inputs.len();
    let choice = choices.get(entry.sequence);
    let prompt_logprobs = choice.map_or(-1, |choice| choice.prompt_logprobs);
    for row in entry.scored.0..entry.scored.1 {
        out.logit_rows.push((first + row) as u32);
        sampling::score_row(&mut out.sampling, sequence.tokens()[entry.start + row + 1], prompt_logprobs);
    }
    if let Some(choice) = choice.filter(|_| entry.samples) {
        out.logit_rows.push((first + entry.len - 1) as u32);
        choice.sampler.row(&mut out.sampling, usize::from(entry.placeholder.is_some()));
    }
}
