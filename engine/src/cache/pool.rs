//! A flat array of blocks whose free ones form an intrusive list, in the order of eviction.

const NIL: u32 = u32::MAX;

/// Index of a KV block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

#[derive(Clone, Copy, Debug)]
struct Block {
    /// Sequences that use the block; 0: it is on the free list.
    refs: u32,
    /// Somebody may want its content again: it goes to the back of the free list.
    keep: bool,
    prev: u32,
    next: u32,
}

/// Hands out blocks. The front of the free list is taken next, so the list is the eviction order: worthless blocks are
/// put at the front, those worth keeping at the back. Take, give and removal from the middle are O(1) and allocate nothing.
#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    head: u32,
    tail: u32,
    free: usize,
}

impl BlockPool {
    /// `blocks` free blocks, in order of their ids.
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        let mut pool = Self { blocks: vec![Block { refs: 0, keep: false, prev: NIL, next: NIL }; blocks], head: NIL, tail: NIL, free: 0 };
        for id in 0..blocks as u32 {
            pool.link(id, true);
        }
        pool
    }

    #[must_use]
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    #[must_use]
    pub fn free(&self) -> usize {
        self.free
    }

    #[must_use]
    pub fn used(&self) -> usize {
        self.total() - self.free
    }

    /// Owners of a block.
    #[must_use]
    pub fn refs(&self, block: BlockId) -> u32 {
        self.blocks[block.0 as usize].refs
    }

    /// The block to be evicted next, now owned once and not kept; `None` if all are used.
    pub fn take(&mut self) -> Option<BlockId> {
        if self.head == NIL {
            return None;
        }
        let id = self.head;
        self.unlink(id);
        let block = &mut self.blocks[id as usize];
        block.refs = 1;
        block.keep = false;
        Some(BlockId(id))
    }

    /// One more owner; a free block leaves the free list, with its content.
    pub fn touch(&mut self, block: BlockId) {
        if self.blocks[block.0 as usize].refs == 0 {
            self.unlink(block.0);
        }
        self.blocks[block.0 as usize].refs += 1;
    }

    /// One owner less; without owners the block is free. Giving a free block does nothing.
    pub fn give(&mut self, block: BlockId) {
        let entry = &mut self.blocks[block.0 as usize];
        if entry.refs == 0 {
            debug_assert!(false, "block {} given twice", block.0);
            return;
        }
        entry.refs -= 1;
        if entry.refs == 0 {
            let keep = entry.keep;
            self.link(block.0, keep);
        }
    }

    /// Whether the content of a block is worth keeping. A free block moves to the end of the list where it belongs.
    pub fn set_keep(&mut self, block: BlockId, keep: bool) {
        let entry = &mut self.blocks[block.0 as usize];
        if entry.keep == keep {
            return;
        }
        entry.keep = keep;
        if entry.refs == 0 {
            self.unlink(block.0);
            self.link(block.0, keep);
        }
    }

    /// Free blocks, the one to be evicted next first.
    pub fn eviction_order(&self) -> impl Iterator<Item = BlockId> + '_ {
        let mut next = self.head;
        std::iter::from_fn(move || {
            let id = next;
            next = self.blocks.get(id as usize)?.next;
            Some(BlockId(id))
        })
    }

    fn link(&mut self, id: u32, back: bool) {
        let (prev, next) = if back { (self.tail, NIL) } else { (NIL, self.head) };
        let block = &mut self.blocks[id as usize];
        block.prev = prev;
        block.next = next;
        match self.blocks.get_mut(prev as usize) {
            Some(before) => before.next = id,
            None => self.head = id,
        }
        match self.blocks.get_mut(next as usize) {
            Some(after) => after.prev = id,
            None => self.tail = id,
        }
        self.free += 1;
    }

    fn unlink(&mut self, id: u32) {
        let Block { prev, next, .. } = self.blocks[id as usize];
        match self.blocks.get_mut(prev as usize) {
            Some(before) => before.next = next,
            None => self.head = next,
        }
        match self.blocks.get_mut(next as usize) {
            Some(after) => after.prev = prev,
            None => self.tail = prev,
        }
        self.free -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// The same, with a deque and linear searches.
    struct Naive {
        refs: Vec<u32>,
        keep: Vec<bool>,
        free: VecDeque<u32>,
    }

    impl Naive {
        fn put(&mut self, id: u32) {
            if self.keep[id as usize] { self.free.push_back(id) } else { self.free.push_front(id) }
        }
    }

    proptest! {
        #[test]
        fn walks_like_the_naive_pool(size in 1usize..12, ops in prop::collection::vec((0u8..4, 0u32..12), 0..300)) {
            let mut pool = BlockPool::new(size);
            let mut naive = Naive { refs: vec![0; size], keep: vec![false; size], free: (0..size as u32).collect() };
            for (op, pick) in ops {
                let id = pick % size as u32;
                let i = id as usize;
                match op {
                    0 => {
                        let want = naive.free.pop_front();
                        if let Some(id) = want {
                            naive.refs[id as usize] = 1;
                            naive.keep[id as usize] = false;
                        }
                        prop_assert_eq!(pool.take(), want.map(BlockId));
                    }
                    1 => {
                        if naive.refs[i] == 0 {
                            naive.free.retain(|other| *other != id);
                        }
                        naive.refs[i] += 1;
                        pool.touch(BlockId(id));
                    }
                    2 if naive.refs[i] > 0 => {
                        naive.refs[i] -= 1;
                        if naive.refs[i] == 0 {
                            naive.put(id);
                        }
                        pool.give(BlockId(id));
                    }
                    3 => {
                        let keep = pick % 2 == 0;
                        if naive.keep[i] != keep {
                            naive.keep[i] = keep;
                            if naive.refs[i] == 0 {
                                naive.free.retain(|other| *other != id);
                                naive.put(id);
                            }
                        }
                        pool.set_keep(BlockId(id), keep);
                    }
                    _ => {}
                }
                let order: Vec<u32> = pool.eviction_order().map(|block| block.0).collect();
                prop_assert_eq!(&order, &naive.free.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(pool.free(), order.len());
                prop_assert_eq!(pool.used() + pool.free(), pool.total());
                prop_assert!((0..size as u32).all(|id| pool.refs(BlockId(id)) == naive.refs[id as usize]));
            }
        }
    }
}
