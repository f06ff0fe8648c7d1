//! f32 → blocks.
//!
//! All block types but Q8_0 are searched for the scales that lose least, weighted by how much each value matters: by its
//! column's importance where that is known (the mean square of what the column is multiplied with), else by a rule of
//! the type that has proved itself in practice.

use super::{TensorType, float, iq4, k_quants, q4, q5, q8};
use crate::KernelError;

/// How much an error matters where nothing is known of the inputs.
#[derive(Clone, Copy)]
enum Rule {
    Same,
    Magnitude,
    /// Magnitude and the root mean square of the 32 values around.
    MagnitudeAndMean,
    Square,
}

type Encoder = fn(&[f32], &[f32], &mut [u8]);

fn encoder(tensor_type: TensorType) -> (Encoder, Rule) {
    match tensor_type {
        TensorType::F32 => (float::encode_f32, Rule::Same),
        TensorType::F16 => (float::encode_f16, Rule::Same),
        TensorType::BF16 => (float::encode_bf16, Rule::Same),
        TensorType::Q4_0 => (q4::encode_q4_0, Rule::Same),
        TensorType::Q4_1 => (q4::encode_q4_1, Rule::Same),
        TensorType::Q5_0 => (q5::encode_q5_0, Rule::Same),
        TensorType::Q5_1 => (q5::encode_q5_1, Rule::Same),
        TensorType::Q8_0 => (q8::encode_q8_0, Rule::Same),
        TensorType::Q2_K => (k_quants::encode_q2_k, Rule::Magnitude),
        TensorType::Q3_K => (k_quants::encode_q3_k, Rule::Magnitude),
        TensorType::Q4_K => (k_quants::encode_q4_k, Rule::MagnitudeAndMean),
        TensorType::Q5_K => (k_quants::encode_q5_k, Rule::MagnitudeAndMean),
        TensorType::Q6_K => (k_quants::encode_q6_k, Rule::Square),
        TensorType::IQ4_NL => (iq4::encode_iq4_nl, Rule::Magnitude),
        TensorType::IQ4_XS => (iq4::encode_iq4_xs, Rule::Magnitude),
        TensorType::MXFP4 => (iq4::encode_mxfp4, Rule::Same),
    }
}

/// Encodes whole rows of `columns` values. `importance`, one number of 0 or more per column, says how much errors in it
/// matter; only their proportions count.
///
/// # Errors
/// [`KernelError::Shape`] where a length does not fit: rows are whole blocks, and `out` has their bytes; or where a value is
/// not finite, as no block holds that.
pub fn quantize(
    tensor_type: TensorType,
    values: &[f32],
    columns: usize,
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), KernelError> {
    let fail = |detail: String| Err(KernelError::Shape { op: "quantize", detail });
    let (len, bytes) = (tensor_type.block_len(), tensor_type.block_bytes());
    if columns == 0 || !columns.is_multiple_of(len) || !values.len().is_multiple_of(columns) {
        return fail(format!("{} values in rows of {columns} are no whole blocks of {}", values.len(), tensor_type.name()));
    }
    if out.len() != values.len() / len * bytes {
        return fail(format!("{} values of {} do not take {} bytes", values.len(), tensor_type.name(), out.len()));
    }
    if importance.is_some_and(|importance| importance.len() != columns) {
        return fail(format!("the importance of {columns} columns has another length"));
    }
    if let Some(at) = values.iter().position(|value| !value.is_finite()) {
        return fail(format!("row {} column {} is {}", at / columns, at % columns, values[at]));
    }
    let (encode, rule) = encoder(tensor_type);
    let mut weights = vec![1.0; len];
    for (row, out) in values.chunks_exact(columns).zip(out.chunks_exact_mut(columns / len * bytes)) {
        for (block, (x, out)) in row.chunks_exact(len).zip(out.chunks_exact_mut(bytes)).enumerate() {
            if len > 1 {
                weigh(rule, x, importance.map(|importance| &importance[block * len..][..len]), &mut weights);
            }
            encode(x, &weights, out);
        }
    }
    Ok(())
}

fn weigh(rule: Rule, x: &[f32], importance: Option<&[f32]>, weights: &mut [f32]) {
    let mean_square = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    if let Some(importance) = importance.filter(|importance| importance.iter().sum::<f32>() > 0.0) {
        let spread = 2.0 * mean_square(x);
        for ((weight, x), importance) in weights.iter_mut().zip(x).zip(importance) {
            *weight = importance * (spread + x * x).sqrt();
        }
        return;
    }
    match rule {
        Rule::Same => weights.fill(1.0),
        Rule::Magnitude => weights.iter_mut().zip(x).for_each(|(weight, x)| *weight = x.abs()),
        Rule::Square => weights.iter_mut().zip(x).for_each(|(weight, x)| *weight = x * x),
        Rule::MagnitudeAndMean => {
            for (weights, x) in weights.chunks_mut(32).zip(x.chunks(32)) {
                let mean = mean_square(x).sqrt();
                weights.iter_mut().zip(x).for_each(|(weight, x)| *weight = mean + x.abs());
            }
        }
    }
}
