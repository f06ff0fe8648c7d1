//! A flat array of blocks whose free ones form an intrusive list, in the order of eviction.
//!
//! States of a block, and what leads from one to another:
//!
//! ```text
//!            take                                  set_keep(true): it was named
//!   Free ───────────► Used ◄──────────────────┐
//!    ▲                │  ▲                    │
//!    │ give (unnamed) │  │ touch              │ touch (a hit)
//!    ├────────────────┘  │                    │
//!    │                   │  give (named)      │
//!    │                   └──────────────► Cached ──► take: evicted, Used by the new owner
//!    │                                      │ ▲
//!    │                            start_out │ │ end_move
//!    │                                      ▼ │
//!    │  start_in                          Leaving      being copied to a lower tier; may be touched, read and given
//!    └────────────► Arriving ───────────────────────► end_move: Cached if it was named meanwhile, else Free
//! ```
//!
//! A transfer owns its block as a sequence would: it is one of the references, and the block is not on the free list. So
//! free + used = total whatever is on its way.

const NIL: u32 = u32::MAX;

/// Index of a KV block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// Stands in block tables for a block that left the window.
    pub const DEAD: Self = Self(u32::MAX);
}

/// Where a block stands; see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Nobody wants its content.
    Free,
    /// Nobody uses it, but its content can be found.
    Cached,
    /// Sequences own it.
    Used,
    /// Its content is being copied to a lower tier; it can be found and shared all the same.
    Leaving,
    /// Its content is being copied here from a lower tier; it can't be read yet.
    Arriving,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transfer {
    None,
    Out,
    In,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    /// Sequences that use the block, and a transfer; 0: it is on the free list.
    refs: u32,
    /// Somebody may want its content again: it goes to the back of the free list.
    keep: bool,
    transfer: Transfer,
    prev: u32,
    next: u32,
}

const UNUSED: Block = Block { refs: 0, keep: false, transfer: Transfer::None, prev: NIL, next: NIL };

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
        let mut pool = Self { blocks: vec![UNUSED; blocks], head: NIL, tail: NIL, free: 0 };
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

    /// Where a block stands.
    #[must_use]
    pub fn state(&self, block: BlockId) -> BlockState {
        match self.blocks[block.0 as usize] {
            Block { transfer: Transfer::In, .. } => BlockState::Arriving,
            Block { transfer: Transfer::Out, .. } => BlockState::Leaving,
            Block { refs: 0, keep: false, .. } => BlockState::Free,
            Block { refs: 0, keep: true, .. } => BlockState::Cached,
            _ => BlockState::Used,
        }
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
        let back = self.blocks[block.0 as usize].keep;
        self.give_to(block, back);
    }

    fn give_to(&mut self, block: BlockId, back: bool) {
        let entry = &mut self.blocks[block.0 as usize];
        if entry.refs == 0 {
            debug_assert!(false, "block {} given twice", block.0);
            return;
        }
        entry.refs -= 1;
        if entry.refs == 0 {
            self.link(block.0, back);
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

    /// Cached → Leaving: a transfer to a lower tier owns the block. False, and no change, in any other state.
    pub fn start_out(&mut self, block: BlockId) -> bool {
        if self.state(block) != BlockState::Cached {
            return false;
        }
        self.touch(block);
        self.blocks[block.0 as usize].transfer = Transfer::Out;
        true
    }

    /// Used by one → Arriving: the owner is a transfer from a lower tier from now on. False, and no change, in any other state.
    pub fn start_in(&mut self, block: BlockId) -> bool {
        if self.state(block) != BlockState::Used || self.refs(block) != 1 {
            return false;
        }
        self.blocks[block.0 as usize].transfer = Transfer::In;
        true
    }

    /// A transfer has ended and gives the block back. What was copied out is the next to be evicted, since that costs
    /// nothing now. False, and no change, if there is no transfer.
    pub fn end_move(&mut self, block: BlockId) -> bool {
        match std::mem::replace(&mut self.blocks[block.0 as usize].transfer, Transfer::None) {
            Transfer::None => return false,
            Transfer::Out => self.give_to(block, false),
            Transfer::In => self.give(block),
        }
        true
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
        transfer: Vec<Option<bool>>,
        free: VecDeque<u32>,
    }

    impl Naive {
        fn put(&mut self, id: u32) {
            if self.keep[id as usize] { self.free.push_back(id) } else { self.free.push_front(id) }
        }
    }

    proptest! {
        #[test]
        fn walks_like_the_naive_pool(size in 1usize..12, ops in prop::collection::vec((0u8..7, 0u32..12), 0..300)) {
            let mut pool = BlockPool::new(size);
            let mut naive = Naive { refs: vec![0; size], keep: vec![false; size], transfer: vec![None; size], free: (0..size as u32).collect() };
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
                    // A transfer's reference is not a sequence's to give.
                    2 if naive.refs[i] > u32::from(naive.transfer[i].is_some()) => {
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
                    4 => {
                        let good = naive.refs[i] == 0 && naive.keep[i];
                        if good {
                            naive.free.retain(|other| *other != id);
                            (naive.refs[i], naive.transfer[i]) = (1, Some(true));
                        }
                        prop_assert_eq!(pool.start_out(BlockId(id)), good);
                    }
                    5 => {
                        let good = naive.refs[i] == 1 && naive.transfer[i].is_none();
                        if good {
                            naive.transfer[i] = Some(false);
                        }
                        prop_assert_eq!(pool.start_in(BlockId(id)), good);
                    }
                    6 => {
                        let ended = naive.transfer[i].take();
                        if let Some(out) = ended {
                            naive.refs[i] -= 1;
                            if naive.refs[i] == 0 && out {
                                naive.free.push_front(id);
                            } else if naive.refs[i] == 0 {
                                naive.put(id);
                            }
                        }
                        prop_assert_eq!(pool.end_move(BlockId(id)), ended.is_some());
                    }
                    _ => {}
                }
                let order: Vec<u32> = pool.eviction_order().map(|block| block.0).collect();
                prop_assert_eq!(&order, &naive.free.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(pool.free(), order.len());
                prop_assert_eq!(pool.used() + pool.free(), pool.total());
                for i in 0..size {
                    prop_assert_eq!(pool.refs(BlockId(i as u32)), naive.refs[i]);
                    let want = match (naive.transfer[i], naive.refs[i], naive.keep[i]) {
                        (Some(true), ..) => BlockState::Leaving,
                        (Some(false), ..) => BlockState::Arriving,
                        (None, 0, false) => BlockState::Free,
                        (None, 0, true) => BlockState::Cached,
                        _ => BlockState::Used,
                    };
                    prop_assert_eq!(pool.state(BlockId(i as u32)), want);
                }
            }
        }
    }
}
