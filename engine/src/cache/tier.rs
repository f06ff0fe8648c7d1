//! The seam for memory below the device's: host memory, disk.

use super::{BlockId, BlockName};

/// A slower, larger memory for blocks that are no longer on the device. It knows names and copies contents; which block
/// is in which state is the pool's business.
///
/// A copy that a call here starts must be ordered between the steps around it: it reads what earlier steps wrote, and is
/// done with the block before a later step writes to it. [`store`](Self::store) and [`fetch`](Self::fetch) may take longer
/// than a call; whoever drives the tier says when each has ended ([`stored`](super::KvCache::stored),
/// [`fetched`](super::KvCache::fetched)).
pub trait Tier: Send {
    /// Whether a name could be fetched now.
    fn holds(&self, name: &BlockName) -> bool;
    /// The block is about to be overwritten: the last chance to keep its content, without delay. True: it is kept.
    fn evicted(&mut self, name: &BlockName, block: BlockId) -> bool;
    /// Starts to copy a block out. False: not wanted.
    fn store(&mut self, name: &BlockName, block: BlockId) -> bool;
    /// Starts to copy a name's content into a block. False: it is not there any more.
    fn fetch(&mut self, name: &BlockName, block: BlockId) -> bool;
}

/// Sums since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounters {
    /// Blocks that were evicted from the device although the tier did not have them yet,
    pub offered: u64,
    /// and of these, those that it kept.
    pub kept: u64,
    /// Blocks whose copy out of, or into, the device began.
    pub stores: u64,
    pub fetches: u64,
    /// Fetches that failed.
    pub lost: u64,
}
