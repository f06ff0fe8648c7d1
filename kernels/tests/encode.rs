//! Encoders: what they lose, against a bound per type and against candle's encoders.

#![allow(clippy::unwrap_used)]

use candle_core::{
    Device, Tensor,
    quantized::{GgmlDType, QTensor},
};
use quire_kernels::quant::{TensorType, dequantize, quantize};

const COLUMNS: usize = 1024;
const ROWS: usize = 64;

/// Normal values, with a spread per row and some outliers, as weights have.
fn weights() -> Vec<f32> {
    let mut state = 0x1234_5678_9abc_def0_u64;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32 + 1e-9
    };
    (0..ROWS * COLUMNS)
        .map(|i| {
            let normal = (-2.0 * uniform().ln()).sqrt() * (std::f32::consts::TAU * uniform()).cos();
            let outlier = if uniform() < 0.002 { 6.0 } else { 1.0 };
            normal * outlier * 0.02 * (1.0 + (i / COLUMNS) as f32 / 32.0)
        })
        .collect()
}

fn round_trip(tensor_type: TensorType, values: &[f32], importance: Option<&[f32]>) -> Vec<f32> {
    let mut bytes = vec![0xA5; values.len() / COLUMNS * tensor_type.row_bytes(COLUMNS)];
    quantize(tensor_type, values, COLUMNS, importance, &mut bytes).unwrap();
    let mut decoded = vec![0.0; values.len()];
    dequantize(tensor_type, &bytes, &mut decoded).unwrap();
    decoded
}

/// Root mean square error over that of the values.
fn loss(values: &[f32], decoded: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let lost: f64 = values.iter().zip(decoded).map(|(x, y)| square(f64::from(*x) - f64::from(*y))).sum();
    (lost / values.iter().map(|x| square(f64::from(*x))).sum::<f64>()).sqrt()
}

#[test]
fn no_type_loses_more_than_its_bits_allow() {
    let values = weights();
    for (tensor_type, most) in [
        (TensorType::F32, 0.0),
        (TensorType::F16, 3e-4),
        (TensorType::BF16, 2e-3),
        (TensorType::Q8_0, 0.0062),
        (TensorType::Q6_K, 0.0215),
        (TensorType::Q5_K, 0.040),
        (TensorType::Q5_1, 0.043),
        (TensorType::Q5_0, 0.047),
        (TensorType::Q4_K, 0.081),
        (TensorType::Q4_1, 0.087),
        (TensorType::Q4_0, 0.094),
        (TensorType::IQ4_NL, 0.086),
        (TensorType::IQ4_XS, 0.087),
        (TensorType::MXFP4, 0.122),
        (TensorType::Q3_K, 0.18),
        (TensorType::Q2_K, 0.34),
    ] {
        let loss = loss(&values, &round_trip(tensor_type, &values, None));
        println!("{:<8} {loss:.5}", tensor_type.name());
        assert!(loss <= most, "{}: {loss}", tensor_type.name());
    }
}

#[test]
fn as_good_as_candle() {
    let values = weights();
    for (tensor_type, theirs) in [
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
    ] {
        let tensor = Tensor::from_slice(&values, (ROWS, COLUMNS), &Device::Cpu).unwrap();
        let tensor = QTensor::quantize(&tensor, theirs).unwrap().dequantize(&Device::Cpu).unwrap();
        let theirs = loss(&values, &tensor.flatten_all().unwrap().to_vec1().unwrap());
        let ours = loss(&values, &round_trip(tensor_type, &values, None));
        println!("{:<8} {ours:.5}, candle {theirs:.5}", tensor_type.name());
        assert!(ours <= theirs * 1.005, "{}: {ours}, candle {theirs}", tensor_type.name());
    }
}

#[test]
fn importance_moves_the_loss_to_what_matters_less() {
    let values = weights();
    let importance: Vec<f32> = (0..COLUMNS).map(|column| if column % 4 == 0 { 100.0 } else { 1.0 }).collect();
    let error = |decoded: &[f32]| -> f64 {
        let lost = |(i, (x, y)): (usize, (&f32, &f32))| f64::from(importance[i % COLUMNS]) * f64::from(x - y).powi(2);
        values.iter().zip(decoded).enumerate().map(lost).sum()
    };
    for tensor_type in TensorType::ALL.into_iter().filter(|t| !t.is_float() && *t != TensorType::Q8_0) {
        let (with, without) = (error(&round_trip(tensor_type, &values, Some(&importance))), error(&round_trip(tensor_type, &values, None)));
        println!("{:<8} {:.3}", tensor_type.name(), with / without);
        assert!(with < 0.97 * without, "{}: {with} of {without}", tensor_type.name());
    }
    // Zeros say nothing.
    let zeros = vec![0.0; COLUMNS];
    let same = round_trip(TensorType::Q4_K, &values, Some(&zeros));
    assert_eq!(same, round_trip(TensorType::Q4_K, &values, None));
}

#[test]
fn decoded_blocks_encode_to_themselves_nearly() {
    // What a block holds exactly is found again: nothing is lost twice.
    let values = weights();
    for tensor_type in [TensorType::Q4_0, TensorType::Q5_0, TensorType::Q8_0, TensorType::Q6_K, TensorType::MXFP4] {
        let once = round_trip(tensor_type, &values, None);
        let twice = loss(&once, &round_trip(tensor_type, &once, None));
        assert!(twice < 0.012, "{}: {twice}", tensor_type.name());
    }
}

#[test]
fn odd_values() {
    for tensor_type in TensorType::ALL {
        let zeros = vec![0.0; COLUMNS];
        assert!(round_trip(tensor_type, &zeros, None).iter().all(|value| *value == 0.0), "{}", tensor_type.name());
        let mut one = zeros.clone();
        one[77] = 1.0;
        let decoded = round_trip(tensor_type, &one, None);
        assert!((decoded[77] - 1.0).abs() < 0.02, "{}: {}", tensor_type.name(), decoded[77]);
        let same = vec![0.75; COLUMNS];
        assert!(loss(&same, &round_trip(tensor_type, &same, None)) < 0.01, "{}", tensor_type.name());
        let tiny = vec![1e-30; COLUMNS];
        assert!(round_trip(tensor_type, &tiny, None).iter().all(|value| value.abs() < 1e-29), "{}", tensor_type.name());
        let huge = vec![3e38; COLUMNS];
        assert!(round_trip(tensor_type, &huge, None).iter().all(|value| value.is_finite()), "{}", tensor_type.name());
        let mut bad = zeros.clone();
        bad[5] = f32::NAN;
        let mut bytes = vec![0; tensor_type.row_bytes(COLUMNS)];
        let error = quantize(tensor_type, &bad, COLUMNS, None, &mut bytes).unwrap_err().to_string();
        assert!(error.contains("column 5"), "{error}");
    }
    assert!(quantize(TensorType::Q4_K, &[0.0; 128], 128, None, &mut [0; 72]).is_err());
    assert!(quantize(TensorType::Q8_0, &[0.0; 64], 32, None, &mut [0; 67]).is_err());
    assert!(quantize(TensorType::Q8_0, &[0.0; 64], 32, Some(&[1.0; 64]), &mut [0; 68]).is_err());
}
