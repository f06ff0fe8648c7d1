//! The paged cache: where a key and a value lie, writing one, copying a block.
//!
//! Per layer, block and KV head lie the keys as [element][slot of the block], so that the lanes of a register are keys and a
//! score needs no sum across lanes; then the values as [slot of the block][element], elements padded with zeros to whole
//! registers. (So heads of an odd size take a little more than [`KvShape::block_bytes`].)

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};

use super::{memory::Memory, simd::LANES};
use crate::{
    KernelError,
    backend::{CHUNK, KvShape, KvType},
    inputs::shape,
};

/// Keys and values of one cache group.
pub struct CpuKv {
    pub(super) shape: KvShape,
    pub(super) layout: KvLayout,
    memory: Memory,
}

/// Sizes in elements.
#[derive(Clone, Copy)]
pub(super) struct KvLayout {
    /// A head's elements, rounded up to whole registers.
    pub padded: usize,
    /// Keys of one block and head.
    pub keys: usize,
    /// Keys and values of one block and head.
    pub unit: usize,
    /// All heads of one block of one layer.
    pub block: usize,
    /// All blocks of one layer.
    pub layer: usize,
}

impl CpuKv {
    pub(super) fn new(kv: &KvShape) -> Result<Self, KernelError> {
        let good = kv.block_size > 0 && kv.block_size.is_multiple_of(LANES) && CHUNK.is_multiple_of(kv.block_size);
        shape("kv", good, || format!("block size {}: not a multiple of {LANES} that divides {CHUNK}", kv.block_size))?;
        shape("kv", kv.head_dim > 0 && kv.kv_heads > 0, || "no heads".into())?;
        let padded = kv.head_dim.next_multiple_of(LANES);
        let keys = kv.head_dim * kv.block_size;
        let unit = keys + padded * kv.block_size;
        let block = unit * kv.kv_heads;
        let layout = KvLayout { padded, keys, unit, block, layer: block * kv.blocks };
        let bytes = block.checked_mul(kv.blocks).and_then(|n| n.checked_mul(kv.layers)).and_then(|n| n.checked_mul(kv.kv_type.bytes()));
        let bytes = bytes.ok_or(KernelError::OutOfMemory { what: "KV cache", bytes: usize::MAX })?;
        Ok(Self { shape: *kv, layout, memory: Memory::new("KV cache", bytes)? })
    }

    /// First byte of a layer.
    pub(super) fn layer(&self, layer: usize) -> *const u8 {
        // SAFETY: callers pass a layer below `shape.layers` (checked by `HostInputs::check_kv`).
        unsafe { self.memory.pointer().add(layer * self.layout.layer * self.shape.kv_type.bytes()) }
    }

    pub(super) fn writer(&mut self, layer: usize) -> KvWriter {
        KvWriter { base: self.layer(layer).cast_mut(), shape: self.shape, layout: self.layout }
    }

    /// Copies a block of every layer.
    pub(super) fn copy(&mut self, from: usize, to: usize) {
        if from == to || from.max(to) >= self.shape.blocks {
            return;
        }
        let bytes = self.layout.block * self.shape.kv_type.bytes();
        for layer in 0..self.shape.layers {
            let base = self.layer(layer).cast_mut();
            // SAFETY: both blocks exist and differ.
            unsafe { std::ptr::copy_nonoverlapping(base.add(from * bytes), base.add(to * bytes), bytes) };
        }
    }
}

/// Writes keys and values of one layer, from several threads.
#[derive(Clone, Copy)]
pub(super) struct KvWriter {
    base: *mut u8,
    shape: KvShape,
    layout: KvLayout,
}

// SAFETY: all writes are atomic, so even a plan that names a slot twice makes no data race.
unsafe impl Send for KvWriter {}
// SAFETY: as above.
unsafe impl Sync for KvWriter {}

impl KvWriter {
    /// Stores a head's key and value, already in the cache's type: bits of f16, or of f32 in `u32`.
    ///
    /// # Safety
    /// The cache is still borrowed, its type has the size of `T`, and slot and head lie inside it.
    pub(super) unsafe fn write<T: Stored>(&self, slot: usize, head: usize, key: &[T], value: &[T]) {
        let block_size = self.shape.block_size;
        let (block, offset) = (slot / block_size, slot % block_size);
        // SAFETY: inside the layer, by the caller's promise.
        let unit = unsafe { self.base.cast::<T>().add(block * self.layout.block + head * self.layout.unit) };
        for (i, &x) in key.iter().take(self.shape.head_dim).enumerate() {
            // SAFETY: element i of this slot's key.
            unsafe { T::put(unit.add(i * block_size + offset), x) };
        }
        for (i, &x) in value.iter().take(self.shape.head_dim).enumerate() {
            // SAFETY: element i of this slot's value.
            unsafe { T::put(unit.add(self.layout.keys + offset * self.layout.padded + i), x) };
        }
    }

    pub(super) fn kv_type(&self) -> KvType {
        self.shape.kv_type
    }
}

/// Bits of one stored element.
pub(super) trait Stored: Copy {
    /// # Safety
    /// `to` is valid for writes and aligned; all concurrent accesses are atomic.
    unsafe fn put(to: *mut Self, x: Self);
}

impl Stored for u16 {
    #[inline(always)]
    unsafe fn put(to: *mut Self, x: Self) {
        // SAFETY: the caller's promise.
        unsafe { AtomicU16::from_ptr(to) }.store(x, Ordering::Relaxed);
    }
}

impl Stored for u32 {
    #[inline(always)]
    unsafe fn put(to: *mut Self, x: Self) {
        // SAFETY: the caller's promise.
        unsafe { AtomicU32::from_ptr(to) }.store(x, Ordering::Relaxed);
    }
}
