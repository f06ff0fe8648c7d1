//! The quantiser of activations, a block at a time; its values are defined by [`quantize_activations`].

use crate::{
    cpu::isa::Isa,
    quant::{ACTIVATION_BLOCK, quantize_activations},
};

/// One block of 32 columns of one row.
pub(super) struct QuantisedBlock {
    pub q: [i8; ACTIVATION_BLOCK],
    pub d: f32,
    pub s: f32,
    /// Σq of columns 0 to 15 and 16 to 31.
    pub sums: [i32; 2],
}

/// Quantises a block on a machine of this level.
pub(super) fn quantise(isa: Isa, values: &[f32; ACTIVATION_BLOCK]) -> QuantisedBlock {
    let mut block = QuantisedBlock { q: [0; ACTIVATION_BLOCK], d: 0.0, s: 0.0, sums: [0; 2] };
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: both levels include AVX2, which was detected.
        Isa::Avx2 | Isa::Avx512Vnni => unsafe { quantise_avx2(values, &mut block) },
        _ => quantise_plain(values, &mut block),
    }
    block
}

fn quantise_plain(x: &[f32; ACTIVATION_BLOCK], block: &mut QuantisedBlock) {
    quantize_activations(x, &mut block.q, std::slice::from_mut(&mut block.d), std::slice::from_mut(&mut block.s));
    let (first, second) = block.q.split_at(16);
    block.sums = [first, second].map(|half| half.iter().map(|&q| i32::from(q)).sum());
}

/// [`quantise_plain`], 32 columns at once; the same bits.
///
/// # Safety
/// Needs AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn quantise_avx2(x: &[f32; ACTIVATION_BLOCK], block: &mut QuantisedBlock) {
    use std::arch::x86_64::*;
    // SAFETY: four loads of 8 values from 32.
    let x: [__m256; 4] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(x.as_ptr().add(8 * i)) });
    let magnitude = |x: __m256| _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fff_ffff));
    let largest = _mm256_max_epu32(_mm256_max_epu32(magnitude(x[0]), magnitude(x[1])), _mm256_max_epu32(magnitude(x[2]), magnitude(x[3])));
    let largest = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256::<1>(largest));
    let largest = _mm_max_epu32(largest, _mm_shuffle_epi32::<0b01_00_11_10>(largest));
    let largest = _mm_max_epu32(largest, _mm_shuffle_epi32::<0b10_11_00_01>(largest));
    let amax = f32::from_bits(_mm_cvtsi128_si32(largest) as u32);
    if !amax.is_finite() || amax < 1e-30 {
        block.q = [0; ACTIVATION_BLOCK];
        block.d = if amax.is_finite() { 0.0 } else { f32::NAN };
        block.s = block.d;
        block.sums = [0; 2];
        return;
    }
    let inverse = _mm256_set1_ps(127.0 / amax);
    // The default rounding mode is to nearest, ties to even.
    let q = x.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, inverse)));
    let total = |v: __m256i| {
        let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
        let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b01_00_11_10>(v));
        _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<0b10_11_00_01>(v)))
    };
    block.sums = [total(_mm256_add_epi32(q[0], q[1])), total(_mm256_add_epi32(q[2], q[3]))];
    // Packing works within 128-bit halves; the permutation puts the 4-byte words in order again.
    let words = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    let bytes = _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    // SAFETY: 32 bytes into an array of 32.
    unsafe { _mm256_storeu_si256(block.q.as_mut_ptr().cast(), bytes) };
    block.d = amax / 127.0;
    block.s = block.d * (block.sums[0] + block.sums[1]) as f32;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_quantisation_gives_the_same_bits() {
        let mut state = 1_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / 8_388_608.0 - 1.0
        };
        for case in 0..3000 {
            let scale = 2.0_f32.powi(case % 60 - 40) * if case % 50 == 0 { 1e-25 } else { 1.0 };
            let mut x: [f32; 32] = std::array::from_fn(|_| random() * scale);
            match case % 100 {
                7 => x[case as usize / 100] = f32::NAN,
                8 => x[case as usize / 100] = f32::NEG_INFINITY,
                9 => x = [0.0; 32],
                // Ties.
                10 => x = std::array::from_fn(|i| if i == 0 { 127.0 } else { i as f32 - 15.5 }),
                _ => {}
            }
            let empty = || QuantisedBlock { q: [1; 32], d: 1.0, s: 1.0, sums: [1; 2] };
            let mut slow = empty();
            quantise_plain(&x, &mut slow);
            #[cfg(target_arch = "x86_64")]
            if Isa::Avx2.available() {
                let mut fast = empty();
                // SAFETY: AVX2 was detected.
                unsafe { quantise_avx2(&x, &mut fast) };
                assert_eq!((fast.q, fast.sums), (slow.q, slow.sums), "{x:?}");
                let bits = |b: &QuantisedBlock| [b.d, b.s].map(|v| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() });
                assert_eq!(bits(&fast), bits(&slow), "{x:?}");
            }
        }
    }
}
