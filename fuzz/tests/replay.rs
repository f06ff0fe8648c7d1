//! Readers of files that nobody vouches for: no panic, no hang, no memory beyond a few times the file.
//!
//! Every run replays the corpus, then mutates it for `QUIRE_FUZZ_SECONDS` (2) per target, from `QUIRE_FUZZ_SEED` (0). A case
//! that fails is kept as a file, which belongs into the corpus once the fault is mended.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

use std::{
    alloc::{GlobalAlloc, Layout, System},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};

use quire_engine::model::{
    Description,
    checkpoint::{QuantConfig, Tensors},
    description::hf,
    gguf::Gguf,
    safetensors::Safetensors,
    tokenizer::Tokenizer,
};
use quire_fuzz::{Random, corpus, mutate};

/// Bytes held now, and the most since the last reset.
static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

fn took(bytes: usize) {
    PEAK.fetch_max(HELD.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: every call goes on to the system's allocator as it came; counting takes no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above; it came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // The old block may live until the new one is filled.
        took(size);
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// What a reader may take besides a multiple of its file: errors, tables of fixed size.
const CONSTANT: usize = 1 << 20;
/// No reader of a small file needs a fraction of it.
const LONGEST: Duration = Duration::from_secs(30);

struct Target {
    name: &'static str,
    /// Bytes of memory per byte of file.
    factor: usize,
    read: fn(&[u8]),
    /// More seeds, from other tests.
    borrowed: Vec<PathBuf>,
}

fn gguf(bytes: &[u8]) {
    let Ok(gguf) = Gguf::parse(bytes) else { return };
    for (_, entry) in gguf.metadata.sorted() {
        entry.scalars().for_each(drop);
        entry.strings().for_each(drop);
    }
    let _ = Tensors::from_gguf(&gguf).iter().count();
    let _ = Description::from_gguf(&gguf);
}

fn gguf_tokenizer(bytes: &[u8]) {
    if let Ok(gguf) = Gguf::parse(bytes) {
        let _ = Tokenizer::from_gguf(&gguf.metadata);
    }
}

fn safetensors(bytes: &[u8]) {
    let Ok(file) = Safetensors::parse(bytes) else { return };
    let _ = file.tensor("model.embed_tokens.weight");
}

/// Quantised weights are decoded, so memory follows the shapes, which the file's bytes bound.
fn quantised(bytes: &[u8]) {
    for config in [
        r#"{"quant_method":"gptq","bits":4}"#,
        r#"{"quant_method":"awq","bits":4}"#,
        r#"{"quant_method":"compressed-tensors"}"#,
        r#"{"quant_method":"fp8","weight_block_size":[5,7]}"#,
    ] {
        let config = QuantConfig::from_quantization(&serde_json::from_str(config).unwrap()).unwrap();
        let Ok(file) = Safetensors::parse(bytes) else { return };
        let Ok(tensors) = Tensors::from_safetensors(file.tensors().to_vec(), Some(&config)) else { continue };
        for facts in tensors.iter() {
            if let Ok(Some(tensor)) = tensors.get(&facts.name) {
                tensor.view().check("fuzz").expect("what is decoded has the bytes of its shape");
            }
        }
    }
}

fn config(bytes: &[u8]) {
    let Ok(config) = serde_json::from_slice(bytes) else { return };
    let _ = QuantConfig::from_config(&config);
    let _ = QuantConfig::from_quantization(&config);
    let _ = hf::translate(&serde_json::Value::Object(config), &|_| false);
}

fn tokenizer(bytes: &[u8]) {
    let Ok(tokenizer) = quire_router::text::Tokenizer::from_json(bytes) else { return };
    drop(tokenizer);
}

fn targets() -> Vec<Target> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let below = |folder: &str, file: &str| -> Vec<PathBuf> {
        let mut found: Vec<PathBuf> = std::fs::read_dir(root.join(folder))
            .unwrap()
            .map(|entry| entry.unwrap().path().join(file))
            .filter(|path| path.is_file())
            .collect();
        found.sort();
        found
    };
    let checkpoints = below("engine/testdata/quantised", "model.safetensors");
    let configs = [below("engine/testdata/quantised", "config.json"), below("engine/testdata/models", "config.json")].concat();
    let tokenizers = below("router/testdata/tokenizers", "tokenizer.json");
    vec![
        Target { name: "gguf", factor: 4, read: gguf, borrowed: Vec::new() },
        // The artefact is JSON text and its parts.
        Target { name: "gguf", factor: 64, read: gguf_tokenizer, borrowed: Vec::new() },
        Target { name: "safetensors", factor: 4, read: safetensors, borrowed: checkpoints.clone() },
        // Four values of four bytes from one byte of three bits each.
        Target { name: "safetensors", factor: 64, read: quantised, borrowed: checkpoints },
        // Objects of a JSON library take what they take.
        Target { name: "config", factor: 128, read: config, borrowed: configs },
        // As do those of the tokenizer library, twice.
        Target { name: "tokenizer", factor: 128, read: tokenizer, borrowed: tokenizers },
    ]
}

/// Runs one case; what is wrong with it. Also how many times its size it took, the constant aside.
fn run(target: &Target, bytes: &[u8]) -> Result<f64, String> {
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    let begun = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| (target.read)(bytes)));
    let (took, time) = (PEAK.load(Relaxed).saturating_sub(before), begun.elapsed());
    if outcome.is_err() {
        return Err("panicked".to_owned());
    }
    if took > target.factor * bytes.len() + CONSTANT {
        return Err(format!("took {took} bytes of memory for {} bytes of file", bytes.len()));
    }
    if time > LONGEST {
        return Err(format!("took {time:?}"));
    }
    Ok(took as f64 / bytes.len().max(1) as f64)
}

fn fail(target: &Target, bytes: &[u8], problem: &str) -> ! {
    let path = std::env::temp_dir().join(format!("quire-fuzz-{}-{}.bin", target.name, std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    panic!("{}: {problem}; the file is kept as {}", target.name, path.display());
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not `{text}`")))
}

#[test]
fn no_file_hurts() {
    let (seconds, first) = (number("QUIRE_FUZZ_SECONDS", 2), number("QUIRE_FUZZ_SEED", 0));
    // Panics are reported with the file that caused them.
    std::panic::set_hook(Box::new(|_| {}));
    let mut report = Vec::new();
    let result = catch_unwind(AssertUnwindSafe(|| {
        for target in targets() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
            let mut seeds: Vec<Vec<u8>> = corpus(&folder).unwrap().into_iter().map(|(_, bytes)| bytes).collect();
            seeds.extend(target.borrowed.iter().map(|path| std::fs::read(path).unwrap()));
            assert!(!seeds.is_empty(), "{}: no seeds", target.name);
            let mut most: f64 = 0.0;
            for seed in &seeds {
                most = run(&target, seed).unwrap_or_else(|problem| fail(&target, seed, &problem)).max(most);
            }
            let (mut cases, mut random, begun) = (0_u64, Random::new(first), Instant::now());
            while begun.elapsed() < Duration::from_secs(seconds) {
                let seed = &seeds[random.below(seeds.len())];
                let bytes = mutate(seed, &seeds, &mut random);
                if let Err(problem) = run(&target, &bytes) {
                    fail(&target, &bytes, &problem);
                }
                cases += 1;
            }
            report.push(format!("{:<12} {cases} cases, seeds take at most {most:.1} × their size", target.name));
        }
    }));
    drop(std::panic::take_hook());
    println!("{}", report.join("\n"));
    // The hook was silent, so this says what it was.
    if let Err(problem) = result {
        panic!("{}", problem.downcast_ref::<String>().map_or("a target failed", String::as_str));
    }
}
