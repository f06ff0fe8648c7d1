//! The kernels of each instruction set, as tables of function pointers: the one place where a generic kernel meets the
//! target features that it needs.

use super::{
    activation_kernel, attention_kernel,
    attention_kernel::{State, Tile},
    isa::Isa,
    sample_kernel, simd,
};
use crate::backend::Activation;

/// # Safety
/// Each function needs the instruction set of its table and valid pointers.
pub(super) struct Kernels {
    /// [`attention_kernel::attend`] for f32 and f16 caches.
    pub attend_f32: unsafe fn(&Tile, usize),
    pub attend_f16: unsafe fn(&Tile, usize),
    pub clear: unsafe fn(&Tile),
    pub merge: unsafe fn(&Tile, &State, usize),
    pub finish: unsafe fn(&Tile, *mut f32, usize),
    /// [`activation_kernel::gate`].
    pub gate: unsafe fn(Activation, &mut [f32], &[f32]),
    /// [`activation_kernel::narrow`].
    pub narrow: unsafe fn(&[f32], &mut [u16]),
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

            pub(super) static KERNELS: Kernels =
                Kernels { attend_f32, attend_f16, clear, merge, finish, gate, narrow, largest, find, mass, mass_of_keys, collect };

            $(#[target_feature(enable = $features)])?
            unsafe fn attend_f32(tile: &Tile, chunk: usize) {
                unsafe { attention_kernel::attend::<$simd, f32>(tile, chunk) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn attend_f16(tile: &Tile, chunk: usize) {
                unsafe { attention_kernel::attend::<$simd, u16>(tile, chunk) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn clear(tile: &Tile) {
                unsafe { attention_kernel::clear::<$simd>(tile) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn merge(tile: &Tile, piece: &State, chunk: usize) {
                unsafe { attention_kernel::merge::<$simd>(tile, piece, chunk) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn finish(tile: &Tile, out: *mut f32, stride: usize) {
                unsafe { attention_kernel::finish::<$simd>(tile, out, stride) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn gate(activation: Activation, gate: &mut [f32], up: &[f32]) {
                unsafe { activation_kernel::gate::<$simd>(activation, gate, up) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn narrow(x: &[f32], out: &mut [u16]) {
                unsafe { activation_kernel::narrow::<$simd>(x, out) }
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
