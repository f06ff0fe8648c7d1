//! Quantised checkpoints against values that an independent script computed (`testdata/quantised/make.py`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // tests

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use quire_engine::model::{
    checkpoint::{Checkpoint, HfFolder},
    safetensors::SafetensorsFiles,
};
use quire_kernels::quant::TensorType;

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/quantised").join(name)
}

fn open(path: &Path) -> HfFolder {
    match Checkpoint::open(path).unwrap() {
        Checkpoint::HuggingFace(folder) => folder,
        Checkpoint::Gguf(_) => panic!("a folder with a config"),
    }
}

/// Compares a folder with its golden values; the types that its tensors became.
fn types(name: &str) -> BTreeMap<String, TensorType> {
    let folder = open(&testdata(name).join("model.safetensors"));
    let tensors = folder.tensors().unwrap();
    let golden = SafetensorsFiles::open(&testdata(name).join("golden.safetensors")).unwrap();
    let golden = golden.parse().unwrap();
    let names: Vec<&str> = tensors.iter().map(|facts| facts.name.as_str()).collect();
    assert_eq!(names, golden.iter().map(|tensor| tensor.name.as_ref()).collect::<Vec<_>>(), "{name}");
    let mut types = BTreeMap::new();
    for golden in golden {
        let tensor = tensors.needed(&golden.name).unwrap();
        assert_eq!((&tensor.shape, &tensors.facts(&golden.name).unwrap().shape), (&golden.shape, &golden.shape), "{name}");
        tensor.view().check("test").unwrap();
        let values = tensor.to_f32().unwrap();
        for (i, (value, golden)) in values.iter().zip(golden.data.as_chunks::<4>().0).enumerate() {
            let golden = f32::from_le_bytes(*golden);
            assert!(*value == golden, "{name}: {} value {i}: {value} is not {golden}", tensor.name);
        }
        types.insert(tensor.name, tensor.tensor_type);
    }
    types
}

#[test]
fn gptq() {
    let types = types("gptq");
    assert_eq!(types["sym.weight"], TensorType::Q4_0);
    assert_eq!(types["eight.weight"], TensorType::Q8_0);
    // Columns of a group are apart, so no block holds them.
    assert_eq!(types["order.weight"], TensorType::F32);
    assert_eq!(types["asym.weight"], TensorType::F32);
    assert!(!types.contains_key("sym.bias") && types.contains_key("asym.bias"));
    self::types("gptq-v2");
}

#[test]
fn awq() {
    let types = types("awq");
    assert_eq!((types["sym.weight"], types["asym.weight"]), (TensorType::Q4_0, TensorType::F32));
}

#[test]
fn compressed_tensors() {
    let types = types("packed");
    assert_eq!((types["group.weight"], types["eight.weight"]), (TensorType::Q4_0, TensorType::Q8_0));
    assert_eq!(self::types("int8")["channel.weight"], TensorType::Q8_0);
}

#[test]
fn fp8() {
    let types = types("fp8");
    assert_eq!((types["channel.weight"], types["two.weight"]), (TensorType::F32, TensorType::BF16));
    self::types("fp8-block");
}

#[test]
fn four_bit_floats() {
    assert_eq!(types("mxfp4")["experts.down_proj_blocks"], TensorType::MXFP4);
    types("nvfp4");
}

/// A copy of a folder with one text of its header changed for another of the same length.
fn broken(name: &str, from: &str, to: &str) -> String {
    assert_eq!(from.len(), to.len());
    let bytes = std::fs::read(testdata(name).join("model.safetensors")).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).expect("the text to change");
    let mut bytes = bytes;
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    let folder = std::env::temp_dir().join(format!("quire-quantised-{}-{name}-{at}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(testdata(name).join("config.json"), folder.join("config.json")).unwrap();
    std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
    let error = open(&folder).tensors().map(|_| ()).expect_err("a damaged checkpoint was accepted").to_string();
    std::fs::remove_dir_all(&folder).unwrap();
    error
}

#[test]
fn parts_that_do_not_fit_are_named() {
    for (name, from, to, needles) in [
        ("gptq", "asym.scales", "asym.scalex", ["`asym.scales`", "is missing"]),
        ("gptq", "[2, 32]", "[32, 2]", ["asym.qweight", "shape"]),
        ("gptq", "\"asym.g_idx\": {\"dtype\": \"I32\"", "\"asym.g_idx\": {\"dtype\": \"F32\"", ["asym.g_idx", "type F32"]),
        ("awq", "[2, 4]", "[4, 2]", ["asym.qzeros", "[4, 2]"]),
        ("packed", "[20, 8]", "[8, 20]", ["group.weight_packed", "[8, 20]"]),
        ("fp8", "[24, 1]", "[4, 06]", ["header", "invalid number"]),
        ("fp8", "[24, 1]", "[4,  6]", ["channel.weight_scale", "[4, 6]"]),
        ("mxfp4", "[2, 6, 2]", "[2, 3, 4]", ["experts.down_proj_blocks", "[2, 6, 2, 16]"]),
    ] {
        let error = broken(name, from, to);
        assert!(needles.iter().all(|needle| error.contains(needle)), "{name} {to}: {error}");
    }
}

#[test]
fn layouts_that_are_not_known_are_refused() {
    use quire_engine::model::checkpoint::QuantConfig;
    for (config, needles) in [
        (r#"{"quant_method":"bitsandbytes"}"#, ["`bitsandbytes`", "supported: gptq"]),
        (r#"{"quant_method":"awq","version":"gemv"}"#, ["`gemv`", "supported: gemm"]),
        (r#"{"quant_method":"gptq","checkpoint_format":"marlin"}"#, ["`marlin`", "gptq_v2"]),
        (r#"{"quant_method":"gptq","bits":5}"#, ["5 bits", "supported: 2, 3, 4, 8"]),
        (r#"{"quant_method":"compressed-tensors","format":"marlin-24"}"#, ["marlin-24", "pack-quantized"]),
        (r#"{"quant_method":"fp8","weight_block_size":[128,0]}"#, ["[128,0]", "1 or more"]),
        (r#"{"bits":4}"#, ["quant_method", "supported"]),
    ] {
        let config = format!(r#"{{"quantization_config":{config}}}"#);
        let error = QuantConfig::from_config(&serde_json::from_str(&config).unwrap()).unwrap_err().to_string();
        assert!(needles.iter().all(|needle| error.contains(needle)) && error.contains("quantization_config"), "{config}: {error}");
    }
    assert_eq!(QuantConfig::from_config(&serde_json::from_str("{}").unwrap()).unwrap(), None);
}
