//! Aligned zeroed memory that costs nothing until it is touched, and pointers that threads share.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
};

use crate::KernelError;

/// A cache line, and the widest register.
const ALIGN: usize = 64;
/// Up to this alignment the allocator hands out fresh pages as they are, without writing zeros to them.
const NATURAL: usize = 16;

/// Bytes that begin at a multiple of 64, zeroed; pages come into being when they are first touched.
pub(super) struct Memory {
    base: NonNull<u8>,
    offset: usize,
    layout: Layout,
}

// SAFETY: it owns its bytes like a Vec does.
unsafe impl Send for Memory {}
// SAFETY: shared access gives out only a pointer; who follows it answers for it.
unsafe impl Sync for Memory {}

impl Memory {
    pub(super) fn new(what: &'static str, bytes: usize) -> Result<Self, KernelError> {
        let none = || KernelError::OutOfMemory { what, bytes };
        let layout = Layout::from_size_align(bytes.checked_add(ALIGN).ok_or_else(none)?, NATURAL).map_err(|_| none())?;
        // SAFETY: the layout's size is not 0.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(none)?;
        let offset = base.as_ptr().align_offset(ALIGN);
        Ok(Self { base, offset, layout })
    }

    pub(super) fn pointer(&self) -> *mut u8 {
        // SAFETY: offset < 64, and the allocation is 64 bytes longer than what was asked for.
        unsafe { self.base.as_ptr().add(self.offset) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

/// f32 memory of the CPU backend.
pub struct CpuBuffer {
    memory: Memory,
    len: usize,
}

impl CpuBuffer {
    pub(super) fn new(what: &'static str, len: usize) -> Result<Self, KernelError> {
        let bytes = len.checked_mul(4).ok_or(KernelError::OutOfMemory { what, bytes: usize::MAX })?;
        Ok(Self { memory: Memory::new(what, bytes)?, len })
    }
}

impl std::ops::Deref for CpuBuffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: `len` initialised values (zeros at least); threads write only through `&mut self`.
        unsafe { std::slice::from_raw_parts(self.memory.pointer().cast(), self.len) }
    }
}

impl std::ops::DerefMut for CpuBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.memory.pointer().cast(), self.len) }
    }
}

/// A mutable slice of which several threads write disjoint parts.
#[derive(Clone, Copy)]
pub(super) struct Shared<T> {
    pointer: *mut T,
    len: usize,
}

// SAFETY: `part` asks its callers for disjoint parts.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(super) fn new(slice: &mut [T]) -> Self {
        Self { pointer: slice.as_mut_ptr(), len: slice.len() }
    }

    /// `len` elements from `start` on; an empty slice if there are not so many.
    ///
    /// # Safety
    /// The slice that this was made from is still borrowed, and nobody else uses these elements while the result lives.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn part<'a>(&self, start: usize, len: usize) -> &'a mut [T] {
        let inside = start.checked_add(len).is_some_and(|end| end <= self.len);
        debug_assert!(inside, "{len} elements from {start} on, of {}", self.len);
        if !inside {
            return &mut [];
        }
        // SAFETY: inside the slice; the caller answers for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(start), len) }
    }

    /// Where element `start` lies, for parts that are not consecutive.
    pub(super) fn at(&self, start: usize) -> *mut T {
        debug_assert!(start <= self.len);
        self.pointer.wrapping_add(start)
    }
}
