//! Models in fewer bits: which types tensors get, what they lose, and that what is written reads.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

mod gguf_writer;

use std::path::{Path, PathBuf};

use gguf_writer::{Value, Writer};
use quire_engine::{
    config::EngineConfig,
    model::{
        checkpoint::Tensors,
        executor_on,
        gguf::{Gguf, GgufFile},
        quantize::{Importance, Mix, QuantizeOptions, Summary, quantize_file, requantise},
    },
};
use quire_kernels::{
    cpu::{CpuBackend, CpuOptions},
    quant::{TensorType, TensorView, dequantize},
};

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/models").join(name)
}

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("quire-quantize-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn options(mix: &str) -> QuantizeOptions {
    QuantizeOptions { mix: Mix::from_name(mix).unwrap(), pure: false, output: None, embedding: None, importance: None }
}

fn quantize(from: &Path, to: &Path, options: &QuantizeOptions) -> Summary {
    let file = GgufFile::open(from).unwrap();
    let mut steps = 0;
    let summary = quantize_file(&file.parse().unwrap(), to, options, &mut |done, all, _| {
        assert!(done == steps && done < all);
        steps += 1;
    });
    summary.unwrap()
}

fn loss(before: &[f32], after: &[f32]) -> f64 {
    let lost: f64 = before.iter().zip(after).map(|(x, y)| f64::from(x - y).powi(2)).sum();
    (lost / before.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>()).sqrt()
}

#[test]
fn every_mix_writes_a_file_that_reads_and_loses_little() {
    let folder = Folder::new("every");
    let source = testdata("llama-F32.gguf");
    let file = GgufFile::open(&source).unwrap();
    let before = file.parse().unwrap();
    let before_tensors = Tensors::from_gguf(&before);
    for name in Mix::names() {
        let path = folder.0.join(format!("{name}.gguf"));
        let summary = quantize(&source, &path, &options(name));
        let written = GgufFile::open(&path).unwrap();
        let after = written.parse().unwrap();
        assert_eq!(summary.after, after.tensor_bytes(), "{name}");
        assert_eq!(after.metadata.unsigned("general.file_type").unwrap(), Some(u64::from(Mix::from_name(name).unwrap().file_type())));
        for (key, entry) in before.metadata.sorted() {
            let same = after.metadata.get(key).is_some_and(|found| found.raw == entry.raw && found.element == entry.element);
            assert!(same || key == "general.file_type" || key == "general.quantization_version", "{name}: {key}");
        }
        let tensors = Tensors::from_gguf(&after);
        for facts in before_tensors.iter() {
            let (before, after) = (before_tensors.needed(&facts.name).unwrap(), tensors.needed(&facts.name).unwrap());
            assert_eq!(before.shape, after.shape);
            let lost = loss(&before.to_f32().unwrap(), &after.to_f32().unwrap());
            if facts.name.contains("norm") {
                assert_eq!((after.tensor_type, lost), (TensorType::F32, 0.0), "{name}: {}", facts.name);
            } else {
                // Rows of 64 and 96 values: the K types give way to those of 32.
                assert!(lost < 0.13, "{name}: {} became {} and lost {lost}", facts.name, after.tensor_type.name());
            }
        }
    }
}

#[test]
fn the_mixture_is_that_of_the_reference() {
    let folder = Folder::new("mixture");
    let (source, path) = (testdata("llama256-Q4_K_M-mix.gguf"), folder.0.join("again.gguf"));
    let pure = QuantizeOptions { pure: true, ..options("q8_0") };
    let summary = quantize(&source, &folder.0.join("q8_0.gguf"), &pure);
    assert!(summary.requantised > 0 && !folder.0.join("q8_0.gguf.partial").exists());
    quantize(&folder.0.join("q8_0.gguf"), &path, &options("q4_k_m"));
    let (reference, ours) = (GgufFile::open(&source).unwrap(), GgufFile::open(&path).unwrap());
    let (reference, ours) = (reference.parse().unwrap(), ours.parse().unwrap());
    for tensor in reference.tensors() {
        assert_eq!(ours.tensor(tensor.name).unwrap().tensor_type, tensor.tensor_type, "{}", tensor.name);
    }
    // What is asked for by name wins.
    let asked = QuantizeOptions { output: Some(TensorType::Q8_0), embedding: Some(TensorType::Q5_K), ..options("q4_k_m") };
    quantize(&source, &path, &asked);
    let asked = GgufFile::open(&path).unwrap();
    let asked = asked.parse().unwrap();
    let type_of = |name: &str| asked.tensor(name).unwrap().tensor_type.name;
    assert_eq!((type_of("output.weight"), type_of("token_embd.weight")), ("Q8_0", "Q5_K"));
}

#[test]
fn a_split_model_becomes_one_file_without_its_parts() {
    let folder = Folder::new("split");
    for part in 0..2_u16 {
        let writer = Writer::default()
            .key("split.no", Value(2, part.to_le_bytes().into()))
            .key("split.count", Value(2, 2_u16.to_le_bytes().into()))
            .key("general.architecture", Value::string("llama"))
            .f32_tensor(&format!("blk.{part}.attn_q.weight"), &[32, 2]);
        std::fs::write(folder.0.join(format!("m-{:05}-of-00002.gguf", part + 1)), writer.bytes()).unwrap();
    }
    let path = folder.0.join("whole.gguf");
    quantize(&folder.0.join("m-00001-of-00002.gguf"), &path, &options("q8_0"));
    let bytes = std::fs::read(&path).unwrap();
    let whole = Gguf::parse(&bytes).unwrap();
    assert_eq!((whole.tensors().len(), whole.metadata.get("split.count").is_some()), (2, false));
}

/// Both forms: entries of (name, numbers).
fn matrices(folder: &Path, name: &str, values: &[f32], calls: i32) -> [PathBuf; 2] {
    let sums: Vec<u8> = values.iter().flat_map(|value| (value * calls as f32).to_le_bytes()).collect();
    let mut old = 1_i32.to_le_bytes().to_vec();
    for (length, bytes) in [(name.len(), name.as_bytes()), (calls as usize, b""), (values.len(), sums.as_slice())] {
        old.extend((length as i32).to_le_bytes());
        old.extend(bytes);
    }
    let new = Writer::default()
        .key("general.type", Value::string("imatrix"))
        .tensor(&format!("{name}.in_sum2"), &[values.len() as u64, 1], 0, sums)
        .tensor(&format!("{name}.counts"), &[1, 1], 0, (calls as f32).to_le_bytes().into());
    let paths = ["old.dat", "new.gguf"].map(|file| folder.join(file));
    std::fs::write(&paths[0], old).unwrap();
    std::fs::write(&paths[1], new.bytes()).unwrap();
    paths
}

#[test]
fn importance_in_either_form_says_the_same() {
    let folder = Folder::new("importance");
    let name = "blk.0.ffn_gate.weight";
    let values: Vec<f32> = (0..64).map(|column| if column % 8 == 0 { 50.0 } else { 0.5 }).collect();
    let mut written = Vec::new();
    for (index, path) in matrices(&folder.0, name, &values, 7).iter().enumerate() {
        let importance = Importance::open(path).unwrap();
        assert_eq!(importance.of(name, 64).unwrap(), Some(&values[..]));
        assert_eq!(importance.of("another", 64).unwrap(), None);
        assert!(importance.of(name, 60).unwrap_err().contains("64 values for rows of 60"));
        let to = folder.0.join(format!("{index}.gguf"));
        quantize(&testdata("llama-F32.gguf"), &to, &QuantizeOptions { importance: Some(importance), ..options("q4_0") });
        written.push(std::fs::read(to).unwrap());
    }
    assert_eq!(written[0], written[1]);
    let plain = folder.0.join("plain.gguf");
    quantize(&testdata("llama-F32.gguf"), &plain, &options("q4_0"));
    assert_ne!(written[0], std::fs::read(plain).unwrap());
    // Cut, or of nonsense.
    let old = std::fs::read(folder.0.join("old.dat")).unwrap();
    for bytes in [&old[..old.len() - 1], b"\xff\xff\xff\xff", b""] {
        std::fs::write(folder.0.join("bad.dat"), bytes).unwrap();
        let error = Importance::open(&folder.0.join("bad.dat")).unwrap_err().to_string();
        assert!(error.contains("bad.dat") && error.contains("importance matrix"), "{error}");
    }
}

#[test]
fn failures_name_the_tensor_and_leave_no_file() {
    let folder = Folder::new("failures");
    let mut writer = Writer::default().key("general.architecture", Value::string("llama"));
    let values: Vec<u8> = (0..64).flat_map(|i| if i == 40 { f32::NAN } else { 1.0 }.to_le_bytes()).collect();
    writer = writer.tensor("blk.0.attn_q.weight", &[32, 2], 0, values);
    let bytes = writer.bytes();
    let to = folder.0.join("out.gguf");
    let error = quantize_file(&Gguf::parse(&bytes).unwrap(), &to, &options("q8_0"), &mut |_, _, _| {}).unwrap_err().to_string();
    assert!(error.contains("`blk.0.attn_q.weight`") && error.contains("row 1 column 8 is NaN"), "{error}");
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
    let nowhere = folder.0.join("missing/out.gguf");
    let error = quantize_file(&Gguf::parse(&bytes).unwrap(), &nowhere, &options("f32"), &mut |_, _, _| {}).unwrap_err().to_string();
    assert!(error.contains("cannot write") && error.contains("missing"), "{error}");
}

#[test]
fn pieces_of_a_tensor_are_as_the_whole() {
    // More values than one thread takes at a time, and two matrices with an importance each.
    let (rows, columns) = (1200, 512);
    let values: Vec<f32> = (0..rows * columns).map(|i| ((i * 7919 % 1013) as f32 - 506.0) / 500.0).collect();
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let view = TensorView { tensor_type: TensorType::F32, rows, columns, data: &data };
    let importance: Vec<f32> = (0..2 * columns).map(|i| if (i < columns) == (i % 2 == 0) { 100.0 } else { 1.0 }).collect();
    let bytes = requantise(&view, TensorType::Q4_0, Some(&importance)).unwrap();
    let mut whole = vec![0; bytes.len()];
    for half in 0..2 {
        let (values, importance) = (&values[half * rows / 2 * columns..][..rows / 2 * columns], &importance[half * columns..][..columns]);
        let out = &mut whole[half * rows / 2 * TensorType::Q4_0.row_bytes(columns)..][..rows / 2 * TensorType::Q4_0.row_bytes(columns)];
        quire_kernels::quant::quantize(TensorType::Q4_0, values, columns, Some(importance), out).unwrap();
    }
    assert!(bytes == whole);
    let mut decoded = vec![0.0; rows * columns];
    dequantize(TensorType::Q4_0, &bytes, &mut decoded).unwrap();
    assert!(loss(&values, &decoded) < 0.1);
    assert!(requantise(&TensorView { columns: 500, ..view }, TensorType::Q4_0, None).is_err());
    assert!(requantise(&view, TensorType::Q4_0, Some(&importance[..600])).is_err());
}

#[test]
fn quantised_at_load_is_as_quantised_before() {
    let folder = Folder::new("load");
    let (source, path) = (testdata("llama-F32.gguf"), folder.0.join("q8_0.gguf"));
    quantize(&source, &path, &QuantizeOptions { pure: true, ..options("q8_0") });
    let load = |path: &Path, quantize: Option<TensorType>| {
        let config = EngineConfig { quantize, max_context: 64, kv_blocks: 16, ..EngineConfig::default() };
        let loaded = executor_on(CpuBackend::new(CpuOptions::default()).unwrap(), path, vec!["m".to_owned()], &config).unwrap();
        (loaded.memory.weights_bytes, loaded.card.weights_hash)
    };
    let (plain, at_load, before) = (load(&source, None), load(&source, Some(TensorType::Q8_0)), load(&path, None));
    assert_eq!(at_load.0, before.0);
    assert!(at_load.0 < plain.0 && at_load.1 != plain.1);
    // So memory is planned for what will be packed, not for what is stored.
    let (source_file, file) = (GgufFile::open(&source).unwrap(), GgufFile::open(&path).unwrap());
    let (source, file) = (Tensors::from_gguf(&source_file.parse().unwrap()), Tensors::from_gguf(&file.parse().unwrap()));
    assert_eq!(source.bytes_in(TensorType::Q8_0), file.bytes());
    // What is smaller already stays.
    assert_eq!(load(&path, Some(TensorType::F16)).0, before.0);
}
