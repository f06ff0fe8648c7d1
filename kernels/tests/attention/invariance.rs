//! A row's bits depend on nothing but what it sees: not on the batch, the chunks, the threads, on what lies outside of its mask,
//! or on dead entries of its block table.

use quire_kernels::{
    backend::{KvType, Mask},
    cpu::Isa,
};

use crate::{
    common::Random,
    harness::{Case, Run, cpu},
};

/// Per sequence and position: the bits of the row.
type Bits = Vec<Vec<Vec<u32>>>;

/// Writes and attends in these steps.
fn run(isa: Isa, threads: usize, case: &Case, steps: &[Vec<(usize, usize, usize)>]) -> Bits {
    let mut run = Run::new(cpu(isa, threads), case);
    let mut bits: Bits = case.lengths.iter().map(|&n| vec![Vec::new(); n]).collect();
    let width = case.heads * case.kv.value_dim;
    for step in steps {
        run.write(step);
        let out = run.attend(step);
        assert!(out.iter().all(|x| x.is_finite()), "{} {case:?}", isa.name());
        let rows = step.iter().flat_map(|&(s, from, to)| (from..to).map(move |p| (s, p)));
        for ((s, p), out) in rows.zip(out.chunks(width)) {
            bits[s][p] = out.iter().map(|x| x.to_bits()).collect();
        }
    }
    bits
}

/// All sequences together: each in its own chunk size, decode rows among prefill rows.
fn mixed(lengths: &[usize], chunks: &[usize]) -> Vec<Vec<(usize, usize, usize)>> {
    let mut done = vec![0; lengths.len()];
    let mut steps = Vec::new();
    while done != lengths {
        let mut step = Vec::new();
        for s in 0..lengths.len() {
            let end = lengths[s].min(done[s] + chunks[s % chunks.len()]);
            if end > done[s] {
                step.push((s, done[s], end));
                done[s] = end;
            }
        }
        steps.push(step);
    }
    steps
}

#[test]
fn same_bits_alone_batched_and_chunked() {
    for isa in Isa::all_available() {
        for kv_type in KvType::ALL {
            for (i, mask) in [Mask::Causal, Mask::Window(100), Mask::Window(270), Mask::Chunk(48)].into_iter().enumerate() {
                let case = Case::random(&mut Random(40 + i as u64), kv_type, isa);
                let lengths = if isa == Isa::Portable { vec![290, 20] } else { vec![530, 40, 258, 17] };
                let case = Case { lengths, mask, size: 1.0, ..case };
                let whole: Vec<_> = case.lengths.iter().enumerate().map(|(s, &n)| vec![(s, 0, n)]).collect();
                let want = run(isa, 1, &case, &whole);
                let name = format!("{} {case:?}", isa.name());
                assert!(run(isa, 3, &case, &whole) == want, "threads: {name}");
                assert!(run(isa, 2, &case, &mixed(&case.lengths, &[7])) == want, "chunks of 7: {name}");
                assert!(run(isa, 2, &case, &mixed(&case.lengths, &[300, 1, 16])) == want, "mixed batch: {name}");
            }
        }
    }
}

/// A key or value that is not finite makes every row that sees it not finite, and changes no bit of the others.
#[test]
fn what_is_not_finite_spreads_as_far_as_it_is_seen() {
    for isa in Isa::all_available() {
        for kv_type in KvType::ALL {
            for (i, mask) in [Mask::Causal, Mask::Window(60), Mask::Chunk(64)].into_iter().enumerate() {
                let case = Case::random(&mut Random(90 + i as u64), kv_type, isa);
                let case = Case { lengths: vec![280], mask, size: 1.0, softcap: (i == 1).then_some(5.0), ..case };
                let width = case.heads * case.kv.value_dim;
                let mut clean = Run::new(cpu(isa, 2), &case);
                clean.write(&[(0, 0, 280)]);
                let want = clean.attend(&[(0, 0, 280)]);
                for (bad, in_key) in [(f32::NAN, true), (f32::INFINITY, true), (f32::NEG_INFINITY, false), (f32::NAN, false)] {
                    let mut run = Run::new(cpu(isa, 2), &case);
                    run.write_changed(&[(0, 0, 280)], |_, position, key, value| {
                        if position == 130 {
                            (if in_key { key } else { value }).iter_mut().step_by(3).for_each(|x| *x = bad);
                        }
                    });
                    // (Values that keys hold are not written.)
                    let written = in_key || !case.kv.shared_values;
                    let out = run.attend(&[(0, 0, 280)]);
                    for (p, (got, want)) in out.chunks(width).zip(want.chunks(width)).enumerate() {
                        if written && p >= 130 && mask.first_key(p) <= 130 {
                            let mut heads = got.chunks(case.kv.value_dim);
                            assert!(heads.all(|head| head.iter().any(|x| !x.is_finite())), "{p} {bad} {case:?}");
                        } else {
                            assert_eq!(got, want, "{p} {bad} {} {case:?}", isa.name());
                        }
                    }
                }
            }
        }
    }
}
