//! Decoders against golden blocks (from the `gguf` Python package) and against candle's own decoders.

#![allow(clippy::unwrap_used)]

use std::{borrow::Cow, path::PathBuf};

use candle_core::{
    Device,
    quantized::{GgmlDType, QStorage, QTensor},
};
use quire_kernels::quant::{TensorType, dequantize};

const ROWS: usize = 4;
const COLUMNS: usize = 512;

/// Stored blocks and golden values of one type: 4 rows × 512 columns.
fn golden(tensor_type: TensorType) -> (Vec<u8>, Vec<f32>) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/blocks");
    let read = |suffix: &str| std::fs::read(folder.join(format!("{}.{suffix}", tensor_type.name()))).unwrap();
    let values = read("f32").as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    (read("bin"), values)
}

fn decode(tensor_type: TensorType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::NAN; bytes.len() / tensor_type.block_bytes() * tensor_type.block_len()];
    dequantize(tensor_type, bytes, &mut values).unwrap();
    values
}

#[test]
fn every_type_equals_the_golden_values_to_the_last_bit() {
    for tensor_type in TensorType::ALL.into_iter().filter(|&t| t != TensorType::F32) {
        let (bytes, golden) = golden(tensor_type);
        assert_eq!(bytes.len(), ROWS * tensor_type.row_bytes(COLUMNS), "{}", tensor_type.name());
        let values = decode(tensor_type, &bytes);
        assert_eq!(values.len(), golden.len());
        for (i, (value, golden)) in values.iter().zip(&golden).enumerate() {
            // Zeros may differ in sign where a product is subtracted from a product.
            assert!(
                value.to_bits() == golden.to_bits() || (*value == 0.0 && *golden == 0.0),
                "{} value {i}: {value} is not {golden}",
                tensor_type.name()
            );
        }
    }
}

#[test]
fn f32_is_itself() {
    let values = [1.5_f32, -0.0, f32::MIN_POSITIVE, 3e38];
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(decode(TensorType::F32, &bytes).map_bits(), values.to_vec().map_bits());
}

trait MapBits {
    fn map_bits(&self) -> Vec<u32>;
}

impl MapBits for Vec<f32> {
    fn map_bits(&self) -> Vec<u32> {
        self.iter().map(|value| value.to_bits()).collect()
    }
}

#[test]
fn candle_decodes_the_same_values() {
    let pairs = [
        (TensorType::F16, GgmlDType::F16),
        (TensorType::BF16, GgmlDType::BF16),
        (TensorType::Q4_0, GgmlDType::Q4_0),
        (TensorType::Q4_1, GgmlDType::Q4_1),
        (TensorType::Q5_0, GgmlDType::Q5_0),
        (TensorType::Q5_1, GgmlDType::Q5_1),
        (TensorType::Q8_0, GgmlDType::Q8_0),
        (TensorType::Q2_K, GgmlDType::Q2K),
        (TensorType::Q3_K, GgmlDType::Q3K),
        (TensorType::Q4_K, GgmlDType::Q4K),
        (TensorType::Q5_K, GgmlDType::Q5K),
        (TensorType::Q6_K, GgmlDType::Q6K),
    ];
    for (tensor_type, candle_type) in pairs {
        let (bytes, _) = golden(tensor_type);
        let storage = QStorage::from_data(Cow::Borrowed(&bytes), &Device::Cpu, candle_type).unwrap();
        let tensor = QTensor::new(storage, (ROWS, COLUMNS)).unwrap().dequantize(&Device::Cpu).unwrap();
        let theirs: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
        for (i, (ours, theirs)) in decode(tensor_type, &bytes).iter().zip(&theirs).enumerate() {
            let tolerance = 1e-6 * theirs.abs();
            assert!((ours - theirs).abs() <= tolerance, "{} value {i}: {ours}, candle {theirs}", tensor_type.name());
        }
    }
}
