//! Blocks on their way to and from a lower tier.

use quire_proto::block_hash::BlockHash;

use super::{BlockId, BlockName, KvCache, Tier, TierCounters, kv::name};

impl KvCache {
    /// Puts a tier below this memory.
    pub fn set_tier(&mut self, tier: Box<dyn Tier>) {
        self.tier = Some(tier);
    }

    #[must_use]
    pub fn tier_counters(&self) -> TierCounters {
        self.tier_counters
    }

    /// A named block is about to be overwritten.
    pub(super) fn offer(&mut self, name: &BlockName, block: BlockId) {
        let Some(tier) = self.tier.as_deref_mut().filter(|tier| !tier.holds(name)) else { return };
        self.tier_counters.offered += 1;
        self.tier_counters.kept += u64::from(tier.evicted(name, block));
    }

    /// Starts to copy up to `most` cached blocks out, those that will be evicted next and that the tier does not hold; they
    /// go to `started`. Each stays findable; say [`stored`](Self::stored) when its copy has ended.
    pub fn write_back(&mut self, most: usize, started: &mut Vec<BlockId>) {
        let Some(tier) = self.tier.as_deref_mut() else { return };
        let from = started.len();
        for block in self.pool.eviction_order() {
            let Some(name) = self.index.name_of(block) else { continue };
            if started.len() - from == most {
                break;
            }
            if !tier.holds(&name) && tier.store(&name, block) {
                started.push(block);
            }
        }
        for block in &started[from..] {
            self.tier_counters.stores += u64::from(self.pool.start_out(*block));
        }
    }

    /// The copy of a block has ended, well or not: it is the next to be evicted.
    pub fn stored(&mut self, block: BlockId) {
        self.pool.end_move(block);
    }

    /// Starts to fetch what the first `blocks` blocks of a prefix lack, as far as the tier has it and there is room; the
    /// blocks go to `started`. Say [`fetched`](Self::fetched) when each has arrived; from then on it is found.
    pub fn fetch(&mut self, root: BlockHash, hashes: &[BlockHash], blocks: usize, started: &mut Vec<BlockId>) {
        if self.tier.is_none() || !self.caching {
            return;
        }
        let blocks = blocks.min(hashes.len());
        let mut present = Vec::new();
        let mut missing = Vec::new();
        for group in 0..self.groups().len() {
            let dead = self.footprint.dead(group, blocks * self.block_size());
            for (i, hash) in hashes[..blocks].iter().enumerate() {
                let name = name(group, *hash);
                match self.index.get(&name) {
                    Some(block) => present.push(block),
                    None if i >= dead => missing.push((i, name)),
                    None => {}
                }
            }
        }
        // What is there already must not make room for the rest, be it of use to a shorter hit only.
        present.iter().for_each(|block| self.pool.touch(*block));
        missing.sort_unstable_by_key(|(i, name)| (*i, name.group));
        for (i, name) in missing {
            let parent = if i == 0 { root } else { hashes[i - 1] };
            if self.arriving.iter().any(|(_, other, _)| *other == name) {
                continue;
            }
            let Some(block) = self.take() else { break };
            if !self.tier.as_deref_mut().is_some_and(|tier| tier.fetch(&name, block)) {
                self.pool.give(block);
                break;
            }
            self.pool.start_in(block);
            self.tier_counters.fetches += 1;
            self.arriving.push((block, name, parent));
            started.push(block);
        }
        present.iter().rev().for_each(|block| self.pool.give(*block));
    }

    /// A block has arrived, or not: then it is free again.
    pub fn fetched(&mut self, block: BlockId, arrived: bool) {
        let Some(place) = self.arriving.iter().position(|(other, ..)| *other == block) else { return };
        let (_, name, parent) = self.arriving.swap_remove(place);
        if arrived {
            // Somebody may have computed the same meanwhile.
            self.put(name, parent, block);
        } else {
            self.tier_counters.lost += 1;
        }
        self.pool.end_move(block);
    }
}
