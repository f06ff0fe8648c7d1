//! The paged cache: where a key and a value lie, writing them, copying a block.
//!
//! Per layer, block and KV head lie the keys as [element][slot of the block], so that the lanes of a register are keys and a
//! score needs no sum across lanes; then the values as [slot of the block][element], elements padded with zeros to whole
//! registers (none where keys hold them); then, for byte types, the scale of each slot's key and of its value, as f32.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, Ordering};

use super::{dispatch::Kernels, memory::Memory, simd::LANES};
use crate::{
    KernelError,
    backend::{KvShape, KvType},
    inputs::HostInputs,
    kv::{VALUE_ALIGN, check_shapes, codec, shape_of},
};

const _: () = assert!(VALUE_ALIGN == LANES);

/// Kernels read E4M3 numbers as 2⁻⁸ of what they are: their scales make up for it.
const FP8_SCALE: f32 = 256.0;
/// Elements that are converted at a time.
const RUN: usize = 64;

/// Keys and values of all cache groups, in one memory of blocks. Of a single shape, all blocks of a layer lie together; of
/// several, all layers of a block do, so that a block can pass from a group to one of another shape.
pub struct CpuKv {
    shapes: Vec<(KvShape, KvLayout)>,
    groups: Vec<usize>,
    memory: Memory,
}

/// The memory as the layers of one group see it.
#[derive(Clone, Copy)]
pub(super) struct KvView<'a> {
    pub shape: &'a KvShape,
    pub layout: &'a KvLayout,
    memory: &'a Memory,
}

impl KvView<'_> {
    /// First byte of a layer.
    pub fn layer(&self, layer: usize) -> *const u8 {
        // SAFETY: callers pass a layer below `shape.layers` (checked by `HostInputs::check_kv`).
        unsafe { self.memory.pointer().add(layer * self.layout.layer) }
    }
}

/// Sizes in bytes, but for `padded`.
#[derive(Clone, Copy)]
pub(super) struct KvLayout {
    /// A value's elements, rounded up to whole registers.
    pub padded: usize,
    /// Where the values of one block and head begin; 0 where keys hold them.
    pub values: usize,
    pub key_scales: usize,
    /// The keys' where keys hold the values.
    pub value_scales: usize,
    /// Keys and values of one block and head.
    pub unit: usize,
    /// All heads of one block of one layer.
    pub bytes: usize,
    /// From a block to the next, in one layer.
    pub block: usize,
    /// From a layer to the next, in one block.
    pub layer: usize,
}

impl KvLayout {
    /// `stride`: from a block to the next; `None`: the blocks of a layer lie together.
    fn new(kv: &KvShape, stride: Option<usize>) -> Option<Self> {
        let (element, scale) = (kv.kv_type.element_bytes(), kv.kv_type.scale_bytes() * kv.block_size);
        let padded = kv.value_dim.next_multiple_of(LANES);
        let keys = kv.key_dim.checked_mul(kv.block_size)?.checked_mul(element)?;
        let values = if kv.shared_values { 0 } else { padded.checked_mul(kv.block_size)?.checked_mul(element)? };
        let key_scales = keys.checked_add(values)?;
        let (value_scales, unit) =
            if kv.shared_values { (key_scales, key_scales + scale) } else { (key_scales + scale, key_scales + 2 * scale) };
        let bytes = unit.checked_mul(kv.kv_heads)?;
        let (block, layer) = match stride {
            Some(stride) => (stride, bytes),
            None => (bytes, bytes.checked_mul(kv.blocks)?),
        };
        Some(Self { padded, values: if kv.shared_values { 0 } else { keys }, key_scales, value_scales, unit, bytes, block, layer })
    }
}

impl CpuKv {
    pub(super) fn new(shapes: &[KvShape], groups: &[usize]) -> Result<Self, KernelError> {
        check_shapes(shapes, groups)?;
        let none = || KernelError::OutOfMemory { what: "KV cache", bytes: usize::MAX };
        let mut layouts = Vec::with_capacity(shapes.len());
        for kv in shapes {
            layouts.push((*kv, KvLayout::new(kv, None).ok_or_else(none)?));
        }
        let mut bytes = 0;
        for (kv, layout) in &layouts {
            bytes = bytes.max(layout.layer.checked_mul(kv.layers).ok_or_else(none)?);
        }
        if shapes.len() > 1 {
            let stride = KvShape::shared_block_bytes(shapes);
            bytes = stride.checked_mul(shapes[0].blocks).ok_or_else(none)?;
            for (kv, layout) in &mut layouts {
                *layout = KvLayout::new(kv, Some(stride)).ok_or_else(none)?;
            }
        }
        Ok(Self { shapes: layouts, groups: groups.to_vec(), memory: Memory::new("KV cache", bytes)? })
    }

    /// What the layers of a group see.
    pub(super) fn of(&self, op: &'static str, group: usize) -> Result<KvView<'_>, KernelError> {
        let (shape, layout) = &self.shapes[shape_of(op, &self.groups, group, self.shapes.len())?];
        Ok(KvView { shape, layout, memory: &self.memory })
    }

    pub(super) fn writer(
        &mut self,
        op: &'static str,
        group: usize,
        kernels: &'static Kernels,
        layer: usize,
    ) -> Result<KvWriter, KernelError> {
        let view = self.of(op, group)?;
        Ok(KvWriter { base: view.layer(layer).cast_mut(), shape: *view.shape, layout: *view.layout, kernels })
    }

    /// Copies the blocks that a plan says, all layers of each.
    pub(super) fn copy_blocks(&mut self, inputs: &HostInputs) -> Result<(), KernelError> {
        for (shape, _) in &self.shapes {
            inputs.check_copies(shape)?;
        }
        for &(from, to) in &inputs.plan().block_copies {
            self.copy(from as usize, to as usize);
        }
        Ok(())
    }

    fn copy(&mut self, from: usize, to: usize) {
        let Some((shape, layout)) = self.shapes.first().filter(|(shape, _)| from != to && from.max(to) < shape.blocks) else { return };
        // All layers of a block lie together where there are several shapes.
        let (layers, bytes) = if self.shapes.len() > 1 { (1, layout.block) } else { (shape.layers, layout.bytes) };
        for layer in 0..layers {
            // SAFETY: the layer lies inside the memory; both blocks exist and differ.
            unsafe {
                let base = self.memory.pointer().add(layer * layout.layer);
                std::ptr::copy_nonoverlapping(base.add(from * layout.block), base.add(to * layout.block), bytes);
            }
        }
    }
}

/// Writes keys and values of one layer, from several threads.
#[derive(Clone, Copy)]
pub(super) struct KvWriter {
    base: *mut u8,
    shape: KvShape,
    layout: KvLayout,
    kernels: &'static Kernels,
}

// SAFETY: all writes are atomic, so even a plan that names a slot twice makes no data race.
unsafe impl Send for KvWriter {}
// SAFETY: as above.
unsafe impl Sync for KvWriter {}

impl KvWriter {
    /// Stores the keys and values of all heads of one row; no values where keys hold them.
    ///
    /// # Safety
    /// The cache is still borrowed, the slot lies inside it, and the machine has the kernels' instruction set.
    pub(super) unsafe fn write(&self, slot: usize, keys: &[f32], values: &[f32]) {
        let KvShape { block_size, kv_heads, key_dim, value_dim, kv_type, .. } = self.shape;
        let KvLayout { padded, values: at, key_scales, value_scales, unit, block, .. } = self.layout;
        let (block_index, offset) = (slot / block_size, slot % block_size);
        for head in 0..kv_heads {
            // SAFETY: inside the layer, by the caller's promise; so are the places of this slot below.
            unsafe {
                let unit = self.base.add(block_index * block + head * unit);
                if let Some(key) = keys.get(head * key_dim..).and_then(|keys| keys.get(..key_dim)) {
                    let to = Row { first: unit, start: offset, stride: block_size, scale: unit.add(key_scales).cast::<u32>().add(offset) };
                    self.row(kv_type, key, to);
                }
                if let Some(value) = values.get(head * value_dim..).and_then(|values| values.get(..value_dim)) {
                    let scale = unit.add(value_scales).cast::<u32>().add(offset);
                    self.row(kv_type, value, Row { first: unit.add(at), start: offset * padded, stride: 1, scale });
                }
            }
        }
    }

    /// # Safety
    /// `to` is the place of a row as long as `x`.
    unsafe fn row(&self, kv_type: KvType, x: &[f32], to: Row) {
        // SAFETY: the caller's promise; the instruction set is there.
        unsafe {
            match kv_type {
                KvType::F32 => {
                    for (i, x) in x.iter().enumerate() {
                        to.put::<u32>(i, x.to_bits());
                    }
                }
                KvType::F16 => to.convert::<u16>(x, |x, out| (self.kernels.narrow)(x, out)),
                KvType::Q8 | KvType::Fp8 => {
                    let fp8 = kv_type == KvType::Fp8;
                    let (factor, scale) = codec::scales((self.kernels.magnitude)(x), codec::top(kv_type));
                    let scale = if fp8 { scale * FP8_SCALE } else { scale };
                    AtomicU32::from_ptr(to.scale).store(scale.to_bits(), Ordering::Relaxed);
                    let encode = if fp8 { self.kernels.to_fp8 } else { self.kernels.to_q8 };
                    to.convert::<u8>(x, |x, out| encode(x, factor, out));
                }
            }
        }
    }
}

/// Where a stored row lies: element i at `first`[start + i · stride], in elements.
#[derive(Clone, Copy)]
struct Row {
    first: *mut u8,
    start: usize,
    stride: usize,
    scale: *mut u32,
}

impl Row {
    /// # Safety
    /// Element i of this row, of the size of `T`, is valid for writes.
    #[inline(always)]
    unsafe fn put<T: Stored>(&self, i: usize, x: T) {
        // SAFETY: the caller's promise.
        unsafe { T::put(self.first.cast::<T>().add(self.start + i * self.stride), x) };
    }

    /// Puts what `convert` makes of `x`.
    ///
    /// # Safety
    /// As of `put`, for all elements of `x`.
    #[inline(always)]
    unsafe fn convert<T: Stored>(&self, x: &[f32], convert: impl Fn(&[f32], &mut [T])) {
        let mut run = [T::default(); RUN];
        for (i, x) in x.chunks(RUN).enumerate() {
            convert(x, &mut run[..x.len()]);
            for (j, &x) in run[..x.len()].iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe { self.put(i * RUN + j, x) };
            }
        }
    }
}

/// Bits of one stored element.
trait Stored: Copy + Default {
    /// # Safety
    /// `to` is valid for writes and aligned; all concurrent accesses are atomic.
    unsafe fn put(to: *mut Self, x: Self);
}

macro_rules! stored {
    ($($bits:ty, $atomic:ty;)+) => {
        $(
            impl Stored for $bits {
                #[inline(always)]
                unsafe fn put(to: *mut Self, x: Self) {
                    // SAFETY: the caller's promise.
                    unsafe { <$atomic>::from_ptr(to) }.store(x, Ordering::Relaxed);
                }
            }
        )+
    };
}

stored! {
    u8, AtomicU8;
    u16, AtomicU16;
    u32, AtomicU32;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_bytes_that_the_shape_says() {
        for kv_type in KvType::ALL {
            for (key_dim, value_dim, shared_values) in [(64, 64, false), (5, 5, false), (24, 16, false), (16, 24, false), (36, 24, true)] {
                let kv = KvShape { layers: 2, blocks: 3, block_size: 16, kv_heads: 2, key_dim, value_dim, shared_values, kv_type };
                let layout = KvLayout::new(&kv, None).unwrap();
                assert_eq!(layout.layer * kv.layers, kv.block_bytes() * kv.blocks, "{kv:?}");
            }
        }
    }

    #[test]
    fn blocks_of_several_shapes_have_one_size_and_lie_apart() {
        let small = KvShape {
            layers: 5,
            blocks: 7,
            block_size: 16,
            kv_heads: 2,
            key_dim: 24,
            value_dim: 16,
            shared_values: false,
            kv_type: KvType::Q8,
        };
        let large = KvShape { layers: 2, kv_heads: 3, key_dim: 64, value_dim: 64, ..small };
        let kv = CpuKv::new(&[small, large], &[1, 0, 0]).unwrap();
        let stride = KvShape::shared_block_bytes(&[small, large]);
        for group in 0..3 {
            let view = kv.of("test", group).unwrap();
            assert_eq!(*view.shape, if group == 0 { large } else { small });
            assert_eq!((view.layout.block, view.layout.layer), (stride, view.layout.bytes));
            assert!(view.layout.layer * view.shape.layers <= stride);
        }
        assert!(kv.of("test", 3).is_err());
        for (shapes, groups, what) in [
            (vec![], vec![], "no shape"),
            (vec![small, KvShape { blocks: 8, ..large }], vec![0], "7 blocks of 16 beside"),
            (vec![small], vec![1], "groups of shapes"),
        ] {
            let error = CpuKv::new(&shapes, &groups).err().unwrap().to_string();
            assert!(error.contains(what) || error.contains("8 blocks of 16"), "{error}");
        }
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let kv = KvShape {
            layers: 1,
            blocks: 1,
            block_size: 16,
            kv_heads: 1,
            key_dim: 16,
            value_dim: 16,
            shared_values: false,
            kv_type: KvType::Q8,
        };
        assert!(CpuKv::new(&[kv], &[]).is_ok());
        for (bad, what) in [
            (KvShape { block_size: 24, ..kv }, "block size 24"),
            (KvShape { key_dim: 0, ..kv }, "no heads"),
            (KvShape { value_dim: 17, shared_values: true, ..kv }, "values of 17"),
            (KvShape { blocks: usize::MAX / 64, ..kv }, "cannot allocate"),
        ] {
            let error = CpuKv::new(&[bad], &[]).err().unwrap().to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
