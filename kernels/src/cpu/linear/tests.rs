use half::f16;
use proptest::prelude::*;

use super::*;
use crate::quant::{TensorType, dequantize, quantize_activations};

const TYPES: [TensorType; 15] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q8_0,
    TensorType::Q3_K,
    TensorType::Q4_K,
    TensorType::Q6_K,
    TensorType::IQ4_NL,
    TensorType::Q5_1,
    TensorType::Q5_K,
    TensorType::IQ4_XS,
    TensorType::MXFP4,
];

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// −1 to 1.
    fn value(&mut self) -> f32 {
        self.next() as f32 / (1_u64 << 30) as f32 - 1.0
    }
}

/// Random valid blocks: any quants, finite scales, extremes of both included.
fn weights(tensor_type: TensorType, rows: usize, columns: usize, random: &mut Random) -> Vec<u8> {
    let blocks = rows * columns / tensor_type.block_len();
    let mut bytes = Vec::with_capacity(rows * tensor_type.row_bytes(columns));
    for _ in 0..blocks {
        let extreme = random.next() % 8;
        let mut block: Vec<u8> = (0..tensor_type.block_bytes())
            .map(|_| match extreme {
                0 => 0x80,
                1 => 0xff,
                _ => random.next() as u8,
            })
            .collect();
        let value = random.value();
        let scale = f16::from_f32(0.05 * value).to_le_bytes();
        match tensor_type {
            TensorType::F32 => block = value.to_le_bytes().to_vec(),
            TensorType::F16 => block = f16::from_f32(value).to_le_bytes().to_vec(),
            TensorType::BF16 => block = half::bf16::from_f32(value).to_le_bytes().to_vec(),
            TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4_K | TensorType::Q5_K => {
                block[..2].copy_from_slice(&scale);
                block[2..4].copy_from_slice(&f16::from_f32(0.1 * random.value()).to_le_bytes());
            }
            TensorType::MXFP4 => block[0] = 120 + random.next() as u8 % 12,
            TensorType::Q6_K => block[208..].copy_from_slice(&scale),
            TensorType::Q3_K => block[108..].copy_from_slice(&scale),
            _ => block[..2].copy_from_slice(&scale),
        }
        bytes.extend(block);
    }
    bytes
}

fn inputs(rows: usize, columns: usize, random: &mut Random) -> Vec<f32> {
    let mut x: Vec<f32> = (0..rows * columns).map(|_| random.value()).collect();
    // Blocks whose bytes are all 127 or −127: the largest sums.
    for (i, block) in x.chunks_mut(32).enumerate().filter(|(i, _)| i % 5 == 0) {
        block.fill(if i % 2 == 0 { 1.0 } else { -0.5 });
    }
    x
}

fn prepare(isa: Isa, forms: Forms, rows: usize, columns: usize, x: &[f32]) -> Activations {
    let mut activations = Activations::new(isa, rows, columns, 2).unwrap();
    let pool = Pool::new(2).unwrap();
    activations.fill(&pool, rows, columns, forms, |r, out| out.copy_from_slice(&x[r * columns..][..columns])).unwrap();
    activations
}

fn product(linear: &PackedLinear, groups: Range<usize>, rows: usize, x: &[f32]) -> Vec<f32> {
    let activations = prepare(linear.isa, linear.forms(), rows, linear.columns(), x);
    let mut out = vec![f32::NAN; rows * linear.rows()];
    let sink = |r: usize, first: usize, values: &[f32]| out[r * linear.rows() + first..][..values.len()].copy_from_slice(values);
    linear.matmul(groups, &activations, sink).unwrap();
    out
}

/// In f64, with the activations as the definition quantises them; and Σ|w·x|, the scale of rounding errors.
fn expected(part: &TensorView<'_>, row: usize, x: &[f32]) -> (f64, f64) {
    let mut w = vec![0.0; part.columns];
    dequantize(part.tensor_type, part.row(row), &mut w).unwrap();
    let mut x = x.to_vec();
    if !part.tensor_type.is_float() {
        let (mut q, mut d, mut s) = (vec![0; x.len()], vec![0.0; x.len() / 32], vec![0.0; x.len() / 32]);
        quantize_activations(&x, &mut q, &mut d, &mut s);
        x = q.iter().enumerate().map(|(i, &q)| d[i / 32] * f32::from(q)).collect();
    }
    w.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
}

fn columns_of(tensor_type: TensorType, blocks: usize) -> usize {
    match tensor_type.block_len() {
        1 => 5 * blocks - 2,
        len => len * blocks,
    }
}

#[test]
fn every_type_and_level_equals_the_definition() {
    let pool = Pool::new(2).unwrap();
    let mut random = Random(7);
    for tensor_type in TYPES {
        for (rows, blocks) in [(1, 1), (16, 2), (37, 3), (50, 6)] {
            let columns = columns_of(tensor_type, blocks);
            let data = weights(tensor_type, rows, columns, &mut random);
            let part = TensorView { tensor_type, rows, columns, data: &data };
            let x = inputs(9, columns, &mut random);
            for isa in Isa::all_available() {
                let linear = PackedLinear::pack(isa, &pool, &[part], None, Precision::Byte).unwrap();
                let out = product(&linear, 0..linear.groups(), 9, &x);
                for (i, &out) in out.iter().enumerate() {
                    let (sum, size) = expected(&part, i % rows, &x[i / rows * columns..][..columns]);
                    let error = (f64::from(out) - sum).abs();
                    assert!(error <= 1e-6 * size, "{tensor_type:?} {} {rows}×{columns} output {i}: {out}, not {sum}", isa.name());
                }
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_batch() {
    let pool = Pool::new(1).unwrap();
    let mut random = Random(8);
    for tensor_type in TYPES {
        let (rows, columns) = (40, columns_of(tensor_type, 2));
        let data = weights(tensor_type, rows, columns, &mut random);
        let x = inputs(19, columns, &mut random);
        let part = TensorView { tensor_type, rows, columns, data: &data };
        for (isa, precision) in Isa::all_available().into_iter().flat_map(|isa| [(isa, Precision::Byte), (isa, Precision::TwoBytes)]) {
            let linear = PackedLinear::pack(isa, &pool, &[part], Some(&[0.25; 40]), precision).unwrap();
            let alone: Vec<f32> = x.chunks(columns).flat_map(|x| product(&linear, 0..linear.groups(), 1, x)).collect();
            for batch in 1..=19 {
                let together = product(&linear, 0..linear.groups(), batch, &x[..batch * columns]);
                assert_eq!(bits(&together), bits(&alone[..batch * rows]), "{tensor_type:?} {} {precision:?} batch {batch}", isa.name());
            }
        }
    }
}

/// Two bytes see the input almost as f32 does: a thousandth of what one byte may be off.
#[test]
fn two_bytes_are_fine() {
    let pool = Pool::new(1).unwrap();
    let mut random = Random(11);
    for tensor_type in TYPES {
        let (rows, columns) = (20, columns_of(tensor_type, 3));
        let data = weights(tensor_type, rows, columns, &mut random);
        let part = TensorView { tensor_type, rows, columns, data: &data };
        let x = inputs(3, columns, &mut random);
        let mut decoded = vec![0.0; columns];
        for isa in Isa::all_available() {
            let linear = PackedLinear::pack(isa, &pool, &[part], None, Precision::TwoBytes).unwrap();
            for (i, &out) in product(&linear, 0..linear.groups(), 3, &x).iter().enumerate() {
                dequantize(tensor_type, part.row(i % rows), &mut decoded).unwrap();
                let products = decoded.iter().zip(&x[i / rows * columns..]).map(|(&w, &x)| f64::from(w) * f64::from(x));
                let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                assert!((f64::from(out) - sum).abs() <= 2e-5 * size, "{tensor_type:?} {} output {i}: {out}, not {sum}", isa.name());
            }
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Integer sums are exact and the fused steps are the same, so vector levels, and the matrix unit, agree to the last bit.
#[test]
fn vector_levels_agree() {
    if !Isa::Avx512Vnni.available() {
        println!("skipped: no AVX-512 VNNI here");
        return;
    }
    let pool = Pool::new(1).unwrap();
    let mut random = Random(9);
    for tensor_type in TYPES {
        let columns = columns_of(tensor_type, 3);
        let data = weights(tensor_type, 48, columns, &mut random);
        let part = TensorView { tensor_type, rows: 48, columns, data: &data };
        let x = inputs(21, columns, &mut random);
        let [narrow, wide] = [Isa::Avx2, Isa::Avx512Vnni].map(|isa| {
            let linear = PackedLinear::pack(isa, &pool, &[part], None, Precision::Byte).unwrap();
            bits(&product(&linear, 0..linear.groups(), 21, &x))
        });
        assert_eq!(narrow, wide, "{tensor_type:?}");
    }
}

#[test]
fn gathered_rows_are_the_decoded_ones() {
    let pool = Pool::new(1).unwrap();
    let mut random = Random(10);
    for tensor_type in TYPES {
        let (rows, columns) = (35, columns_of(tensor_type, 2));
        let data = weights(tensor_type, rows, columns, &mut random);
        let part = TensorView { tensor_type, rows, columns, data: &data };
        let linear = PackedLinear::pack(Isa::Portable, &pool, &[part], None, Precision::Byte).unwrap();
        let (mut row, mut decoded) = (vec![0.0; columns], vec![0.0; columns]);
        for r in 0..rows {
            linear.gather_row(r, &mut row).unwrap();
            dequantize(tensor_type, part.row(r), &mut decoded).unwrap();
            // Adding an offset of zero may turn −0 into 0.
            assert_eq!(row, decoded, "{tensor_type:?} row {r}");
        }
        assert!(linear.gather_row(rows, &mut row).is_err());
        assert!(linear.gather_row(0, &mut row[1..]).is_err());
    }
}

#[test]
fn parts_of_different_types_are_stacked_and_bias_is_added_last() {
    let pool = Pool::new(2).unwrap();
    let mut random = Random(11);
    let parts = [(TensorType::Q4_K, 20), (TensorType::F16, 7), (TensorType::Q6_K, 33)];
    let data = parts.map(|(tensor_type, rows)| weights(tensor_type, rows, 256, &mut random));
    let views: Vec<TensorView<'_>> =
        parts.iter().zip(&data).map(|(&(tensor_type, rows), data)| TensorView { tensor_type, rows, columns: 256, data }).collect();
    let bias: Vec<f32> = (0..60).map(|i| i as f32 - 30.0).collect();
    let x = inputs(10, 256, &mut random);
    for isa in Isa::all_available() {
        let plain = PackedLinear::pack(isa, &pool, &views, None, Precision::Byte).unwrap();
        let biased = PackedLinear::pack(isa, &pool, &views, Some(&bias), Precision::Byte).unwrap();
        assert_eq!((plain.rows(), plain.groups(), plain.columns()), (60, 2 + 1 + 3, 256));
        assert_eq!(plain.forms(), Forms { quantised: true, float: true, fine: false });
        let covered: Vec<usize> = (0..plain.groups()).flat_map(|group| plain.group_rows(group)).collect();
        assert_eq!(covered, (0..60).collect::<Vec<_>>());
        let (out, with_bias) = (product(&plain, 0..6, 10, &x), product(&biased, 0..6, 10, &x));
        let mut first = 0;
        for view in &views {
            let alone = PackedLinear::pack(isa, &pool, &[*view], None, Precision::Byte).unwrap();
            let alone_out = product(&alone, 0..alone.groups(), 10, &x);
            for r in 0..10 {
                assert_eq!(bits(&out[r * 60 + first..][..view.rows]), bits(&alone_out[r * view.rows..][..view.rows]));
            }
            first += view.rows;
        }
        for (i, value) in with_bias.iter().enumerate() {
            assert_eq!(value.to_bits(), (out[i] + bias[i % 60]).to_bits());
        }
        // Only the asked-for groups are written.
        let some = product(&plain, 2..4, 10, &x);
        for (i, value) in some.iter().enumerate() {
            assert_eq!(value.is_nan(), !(20..43).contains(&(i % 60)));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let pool = Pool::new(1).unwrap();
    let data = [0_u8; 4 * 34];
    let part = TensorView { tensor_type: TensorType::Q8_0, rows: 4, columns: 32, data: &data };
    let pack = |parts: &[TensorView<'_>], bias| PackedLinear::pack(Isa::Portable, &pool, parts, bias, Precision::Byte);
    assert!(pack(&[TensorView { rows: 5, ..part }], None).is_err());
    assert!(pack(&[part, TensorView { rows: 2, columns: 64, ..part }], None).is_err());
    assert!(pack(&[part], Some(&[0.0; 3])).is_err());
    let linear = pack(&[part], None).unwrap();
    let refused = |activations: &Activations, groups| linear.matmul(groups, activations, |_, _, _| {}).is_err();
    let x = [0.5; 64];
    let good = prepare(Isa::Portable, linear.forms(), 2, 32, &x);
    assert!(!refused(&good, 0..1));
    assert!(refused(&good, 0..2));
    assert!(refused(&prepare(Isa::Portable, linear.forms(), 1, 64, &x), 0..1));
    assert!(refused(&prepare(Isa::Portable, Forms { float: true, ..Forms::default() }, 2, 32, &x), 0..1));
    if Isa::Avx2.available() {
        assert!(refused(&prepare(Isa::Avx2, linear.forms(), 2, 32, &x), 0..1));
    }
}

#[test]
fn a_non_finite_activation_makes_its_row_non_finite_and_no_other() {
    let pool = Pool::new(1).unwrap();
    let mut random = Random(12);
    for tensor_type in [TensorType::Q4_0, TensorType::Q4_1, TensorType::Q6_K] {
        let columns = 256;
        let data = weights(tensor_type, 16, columns, &mut random);
        let mut x = inputs(3, columns, &mut random);
        x[columns + 40] = f32::INFINITY;
        for isa in Isa::all_available() {
            let linear =
                PackedLinear::pack(isa, &pool, &[TensorView { tensor_type, rows: 16, columns, data: &data }], None, Precision::Byte)
                    .unwrap();
            let out = product(&linear, 0..1, 3, &x);
            assert!(out.iter().enumerate().all(|(i, value)| value.is_finite() == (i / 16 != 1)), "{tensor_type:?} {}", isa.name());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn random_shapes_equal_the_definition(
        seed in any::<u64>(), kind in 0..TYPES.len(), rows in 1_usize..70, blocks in 1_usize..5, batch in 1_usize..20,
    ) {
        let mut random = Random(seed);
        let tensor_type = TYPES[kind];
        let columns = columns_of(tensor_type, blocks);
        let data = weights(tensor_type, rows, columns, &mut random);
        let part = TensorView { tensor_type, rows, columns, data: &data };
        let x = inputs(batch, columns, &mut random);
        let pool = Pool::new(1).unwrap();
        for isa in Isa::all_available() {
            let linear = PackedLinear::pack(isa, &pool, &[part], None, Precision::Byte).unwrap();
            for (i, out) in product(&linear, 0..linear.groups(), batch, &x).into_iter().enumerate() {
                let (sum, size) = expected(&part, i % rows, &x[i / rows * columns..][..columns]);
                prop_assert!((f64::from(out) - sum).abs() <= 1e-6 * size, "{tensor_type:?} {} output {i}: {out}, not {sum}", isa.name());
            }
        }
    }
}
