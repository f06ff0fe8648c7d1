//! The kernels of each instruction set, as tables of function pointers: the one place where a generic kernel meets the
//! target features that it needs.

use super::{
    activation_kernel, attention_kernel, attention_softmax,
    attention_tile::{self, State, Tile},
    isa::Isa,
    sample_kernel, simd,
};
use crate::{backend::Activation, kv::codec};

/// # Safety
/// Each function needs the instruction set of its table and valid pointers.
pub(super) struct Kernels {
    /// [`attention_kernel::attend`] by the cache's type.
    pub attend_f32: unsafe fn(&Tile, usize),
    pub attend_f16: unsafe fn(&Tile, usize),
    pub attend_q8: unsafe fn(&Tile, usize),
    pub attend_fp8: unsafe fn(&Tile, usize),
    pub clear: unsafe fn(&Tile),
    pub merge: unsafe fn(&Tile, &State, usize),
    pub finish: unsafe fn(&Tile, *mut f32, usize),
    /// [`activation_kernel::gate`].
    pub gate: unsafe fn(Activation, &mut [f32], &[f32]),
    /// [`activation_kernel::activate`].
    pub activate: unsafe fn(Activation, &mut [f32]),
    /// [`activation_kernel::narrow`].
    pub narrow: unsafe fn(&[f32], &mut [u16]),
    /// [`codec::largest`].
    pub magnitude: unsafe fn(&[f32]) -> u32,
    /// Bytes of x · factor, or zeros for factor 0.
    pub to_q8: unsafe fn(&[f32], f32, &mut [u8]),
    pub to_fp8: unsafe fn(&[f32], f32, &mut [u8]),
    pub largest: unsafe fn(&[f32]) -> Option<f32>,
    pub find: unsafe fn(&[f32], f32) -> usize,
    pub mass: unsafe fn(&[f32], f32, f32) -> f64,
    pub mass_of_keys: unsafe fn(&[u64], f32, f32) -> f64,
    pub collect: unsafe fn(&[f32], f32, &mut Vec<u64>),
}

macro_rules! table {
    ($name:ident, $simd:ty, $mass:ident, $mass_of_keys:ident $(, $features:literal)?) => {
        mod $name {
            #![allow(clippy::undocumented_unsafe_blocks)] // Instantiations: callers keep the promises of the kernels.
            use super::*;

            pub(super) static KERNELS: Kernels = Kernels {
                attend_f32,
                attend_f16,
                attend_q8,
                attend_fp8,
                clear,
                merge,
                finish,
                gate,
                activate,
                narrow,
                magnitude,
                to_q8,
                to_fp8,
                largest,
                find,
                mass,
                mass_of_keys,
                collect,
            };

            $(#[target_feature(enable = $features)])?
            unsafe fn attend_f32(tile: &Tile, chunk: usize) {
                unsafe { attention_kernel::attend::<$simd, attention_tile::Single>(tile, chunk) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn attend_f16(tile: &Tile, chunk: usize) {
                unsafe { attention_kernel::attend::<$simd, attention_tile::Half>(tile, chunk) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn attend_q8(tile: &Tile, chunk: usize) {
                unsafe { attention_kernel::attend::<$simd, attention_tile::Q8>(tile, chunk) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn attend_fp8(tile: &Tile, chunk: usize) {
                unsafe { attention_kernel::attend::<$simd, attention_tile::Fp8>(tile, chunk) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn clear(tile: &Tile) {
                unsafe { attention_softmax::clear::<$simd>(tile) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn merge(tile: &Tile, piece: &State, chunk: usize) {
                unsafe { attention_softmax::merge::<$simd>(tile, piece, chunk) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn finish(tile: &Tile, out: *mut f32, stride: usize) {
                unsafe { attention_softmax::finish::<$simd>(tile, out, stride) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn gate(activation: Activation, gate: &mut [f32], up: &[f32]) {
                unsafe { activation_kernel::gate::<$simd>(activation, gate, up) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn activate(activation: Activation, x: &mut [f32]) {
                unsafe { activation_kernel::activate::<$simd>(activation, x) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn narrow(x: &[f32], out: &mut [u16]) {
                unsafe { activation_kernel::narrow::<$simd>(x, out) }
            }
            // Plain code, compiled for each level.
            $(#[target_feature(enable = $features)])?
            unsafe fn magnitude(x: &[f32]) -> u32 {
                codec::largest(x)
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn to_q8(x: &[f32], factor: f32, out: &mut [u8]) {
                if factor == 0.0 {
                    return out.fill(0);
                }
                out.iter_mut().zip(x).for_each(|(out, x)| *out = codec::to_q8(x * factor));
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn to_fp8(x: &[f32], factor: f32, out: &mut [u8]) {
                if factor == 0.0 {
                    return out.fill(0);
                }
                out.iter_mut().zip(x).for_each(|(out, x)| *out = codec::to_fp8(x * factor));
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn largest(logits: &[f32]) -> Option<f32> {
                unsafe { sample_kernel::largest::<$simd>(logits) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn find(logits: &[f32], value: f32) -> usize {
                unsafe { sample_kernel::find::<$simd>(logits, value) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn mass(logits: &[f32], max: f32, temperature: f32) -> f64 {
                unsafe { sample_kernel::$mass::<$simd>(logits, max, temperature) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn mass_of_keys(keys: &[u64], max: f32, temperature: f32) -> f64 {
                unsafe { sample_kernel::$mass_of_keys::<$simd>(keys, max, temperature) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn collect(logits: &[f32], least: f32, keys: &mut Vec<u64>) {
                unsafe { sample_kernel::collect::<$simd>(logits, least, keys) }
            }
        }
    };
}

table!(portable, simd::Portable, mass_by_definition, mass_of_keys_by_definition);
#[cfg(target_arch = "x86_64")]
table!(avx2, simd::Avx2, mass, mass_of_keys, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
table!(avx512, simd::Avx512, mass, mass_of_keys, "avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl");

/// The table of a level that this machine has.
pub(super) fn kernels(isa: Isa) -> &'static Kernels {
    #[cfg(target_arch = "x86_64")]
    {
        if isa >= Isa::Avx512Vnni {
            return &avx512::KERNELS;
        }
        if isa >= Isa::Avx2 {
            return &avx2::KERNELS;
        }
    }
    let _ = isa;
    &portable::KERNELS
}
