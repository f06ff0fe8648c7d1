//! Memory for packed weights: zeroed, aligned to cache lines, on huge pages where the system has them.
//!
//! Weights are read from end to end at every step, and a hardware prefetcher stops at each page's end, so matrices of
//! all layers share large chunks that the system can back with huge pages; one small matrix alone could not.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::KernelError;

/// What chunks are rounded up to, and where they start.
const HUGE_PAGE: usize = 2 << 20;
const CHUNK: usize = 32 << 20;
const LINE: usize = 64;

/// A piece of a chunk that nobody else has. The chunk is freed with its last piece.
pub(super) struct Memory {
    start: *mut u8,
    len: usize,
    _chunk: Arc<Chunk>,
}

// SAFETY: a piece is a plain array of bytes that this value alone owns.
unsafe impl Send for Memory {}
// SAFETY: as above; shared borrows only read.
unsafe impl Sync for Memory {}

impl Memory {
    /// `len` zeros.
    pub(super) fn new(len: usize) -> Result<Self, KernelError> {
        static CURRENT: Mutex<Option<(std::sync::Weak<Chunk>, usize)>> = Mutex::new(None);
        let padded = len.max(1).checked_next_multiple_of(LINE).ok_or(KernelError::OutOfMemory { what: "weights", bytes: len })?;
        let mut current = CURRENT.lock();
        if let Some((chunk, used)) = current.as_mut()
            && let Some(chunk) = chunk.upgrade()
            && padded <= chunk.len - *used
        {
            // SAFETY: `used + padded` is within the chunk.
            let start = unsafe { chunk.start.add(*used) };
            *used += padded;
            return Ok(Self { start, len, _chunk: chunk });
        }
        let chunk = Arc::new(Chunk::new(padded.max(CHUNK))?);
        *current = Some((Arc::downgrade(&chunk), padded));
        Ok(Self { start: chunk.start, len, _chunk: chunk })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: this value owns `len` initialised bytes there.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and it is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// Zeroed memory from the system.
struct Chunk {
    start: *mut u8,
    len: usize,
    #[cfg(unix)]
    mapping: (*mut libc::c_void, usize),
    #[cfg(not(unix))]
    layout: std::alloc::Layout,
}

// SAFETY: a chunk only frees itself; its bytes belong to the pieces.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    #[cfg(unix)]
    fn new(len: usize) -> Result<Self, KernelError> {
        let out_of_memory = KernelError::OutOfMemory { what: "weights", bytes: len };
        let Some(mapped) = len.checked_next_multiple_of(HUGE_PAGE).and_then(|len| len.checked_add(HUGE_PAGE)) else {
            return Err(out_of_memory);
        };
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new anonymous mapping touches nothing that exists.
        let mapping = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if mapping == libc::MAP_FAILED {
            return Err(out_of_memory);
        }
        let start = mapping.cast::<u8>().map_addr(|address| address.next_multiple_of(HUGE_PAGE));
        #[cfg(target_os = "linux")]
        // SAFETY: the range lies within the mapping. A refusal only means small pages.
        unsafe {
            libc::madvise(start.cast(), len.next_multiple_of(HUGE_PAGE), libc::MADV_HUGEPAGE)
        };
        Ok(Self { start, len, mapping: (mapping, mapped) })
    }

    #[cfg(not(unix))]
    fn new(len: usize) -> Result<Self, KernelError> {
        let out_of_memory = || KernelError::OutOfMemory { what: "weights", bytes: len };
        let layout = std::alloc::Layout::from_size_align(len, LINE).map_err(|_| out_of_memory())?;
        // SAFETY: `len` is not zero.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        if start.is_null() { Err(out_of_memory()) } else { Ok(Self { start, len, layout }) }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        #[cfg(unix)]
        // SAFETY: the mapping is this chunk's own, and no piece is left.
        unsafe {
            libc::munmap(self.mapping.0, self.mapping.1)
        };
        #[cfg(not(unix))]
        // SAFETY: as above.
        unsafe {
            std::alloc::dealloc(self.start, self.layout)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_zero_aligned_and_apart() {
        let mut pieces: Vec<Memory> = [1, 63, 64, 65, 1000, CHUNK + 1, 7].map(|len| Memory::new(len).unwrap()).into();
        for (i, piece) in pieces.iter_mut().enumerate() {
            assert!(piece.bytes().iter().all(|&byte| byte == 0));
            assert_eq!(piece.bytes().as_ptr().addr() % LINE, 0);
            piece.bytes_mut().fill(i as u8 + 1);
        }
        for (i, piece) in pieces.iter().enumerate() {
            assert!(piece.bytes().iter().all(|&byte| byte == i as u8 + 1));
        }
        assert!(Memory::new(usize::MAX - 70).is_err());
    }
}
