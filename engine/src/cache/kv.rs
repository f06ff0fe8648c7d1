//! The KV memory of all cache groups, as sequences see it: look up, admit, grow, register, release.

use quire_proto::block_hash::BlockHash;

use super::{BlockId, BlockName, BlockPool, EventLog, Footprint, GroupKind, PrefixIndex, SequenceKv, Tier, TierCounters};

/// Sizes and switches of a KV memory.
#[derive(Clone, Debug)]
pub struct KvConfig {
    /// Groups, tokens per block, rows of one sequence in one step.
    pub footprint: Footprint,
    /// Blocks of the pool that all groups share.
    pub blocks: usize,
    /// Without it nothing is ever found.
    pub caching: bool,
    /// Numbers the events.
    pub epoch: u64,
}

/// A block that was named in a step: what to withdraw if the step fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    pub group: u32,
    pub block: BlockId,
}

/// Pool, index and events.
pub struct KvCache {
    pub(super) footprint: Footprint,
    pub(super) pool: BlockPool,
    pub(super) index: PrefixIndex,
    pub(super) caching: bool,
    pub(super) events: EventLog,
    pub(super) tier: Option<Box<dyn Tier>>,
    pub(super) tier_counters: TierCounters,
    /// Blocks that are being fetched, with the names that they will have and their parents.
    pub(super) arriving: Vec<(BlockId, BlockName, BlockHash)>,
}

pub(super) fn name(group: usize, hash: BlockHash) -> BlockName {
    BlockName { hash, group: group as u32 }
}

impl KvCache {
    #[must_use]
    pub fn new(config: KvConfig) -> Self {
        Self {
            footprint: config.footprint,
            pool: BlockPool::new(config.blocks),
            index: PrefixIndex::new(config.blocks),
            caching: config.caching,
            events: EventLog::new(config.epoch),
            tier: None,
            tier_counters: TierCounters::default(),
            arriving: Vec::new(),
        }
    }

    #[must_use]
    pub fn block_size(&self) -> usize {
        self.footprint.block_size
    }

    /// What each group keeps.
    #[must_use]
    pub fn groups(&self) -> &[GroupKind] {
        &self.footprint.groups
    }

    /// How many blocks sequences take.
    #[must_use]
    pub fn footprint(&self) -> &Footprint {
        &self.footprint
    }

    /// Entries of a block table that holds `tokens`.
    #[must_use]
    pub fn blocks_for(&self, tokens: usize) -> usize {
        self.footprint.blocks_for(tokens)
    }

    #[must_use]
    pub fn total(&self) -> usize {
        self.pool.total()
    }

    #[must_use]
    pub fn free(&self) -> usize {
        self.pool.free()
    }

    #[must_use]
    pub fn used(&self) -> usize {
        self.pool.used()
    }

    /// The block pool (diagnosis, tests).
    #[must_use]
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The prefix index (diagnosis, tests).
    #[must_use]
    pub fn index(&self) -> &PrefixIndex {
        &self.index
    }

    /// Starts a sequence on `hit` cached blocks, as [`hit`](Self::hit) found them.
    pub fn admit(&mut self, kv: &mut SequenceKv, hashes: &[BlockHash], hit: usize) {
        debug_assert!(kv.blocks() == 0, "admitted twice");
        kv.prepare(self.groups().len());
        kv.registered = hit;
        for (group, table) in kv.tables.iter_mut().enumerate() {
            let dead = self.footprint.dead(group, hit * self.footprint.block_size);
            kv.dead[group] = dead;
            table.resize(dead, BlockId::DEAD);
            for block in hashes[dead..hit].iter().filter_map(|hash| self.index.get(&name(group, *hash))) {
                self.pool.touch(block);
                table.push(block);
            }
        }
    }

    /// Whether a sequence can begin as the first `tokens` tokens of another and compute the last of them again: the other one
    /// has them, and no window of it has moved past what that row sees.
    #[must_use]
    pub fn can_fork(&self, parent: &SequenceKv, tokens: usize) -> bool {
        let reaches = |group: usize| parent.dead(group) <= self.footprint.dead(group, tokens.saturating_sub(1));
        parent.blocks() * self.block_size() >= tokens && (0..self.groups().len()).all(reaches)
    }

    /// Starts a sequence on the beginning of another, see [`can_fork`](Self::can_fork): shares all blocks before the one that
    /// holds token `tokens` - 1, and takes a fresh one for that in each group. All or nothing: false leaves everything as it
    /// was.
    #[must_use]
    pub fn fork(&mut self, parent: &SequenceKv, kv: &mut SequenceKv, tokens: usize) -> bool {
        debug_assert!(kv.blocks() == 0, "forked twice");
        if self.free() < self.groups().len() || !self.can_fork(parent, tokens) {
            return false;
        }
        let start = tokens.saturating_sub(1);
        let shared = start / self.block_size();
        kv.prepare(self.groups().len());
        kv.registered = shared;
        for (group, table) in kv.tables.iter_mut().enumerate() {
            let dead = self.footprint.dead(group, start);
            kv.dead[group] = dead;
            table.resize(dead, BlockId::DEAD);
            let theirs = &parent.table(group)[dead..shared];
            theirs.iter().for_each(|block| self.pool.touch(*block));
            table.extend_from_slice(theirs);
        }
        self.grow(kv, start, tokens)
    }

    /// Makes the sequence hold `tokens` tokens, of which those from `start` on are computed next: blocks that no row from
    /// there on sees go back to the pool, with their names; what is missing is taken, evicting what is free. False: there
    /// is no room, and nothing was taken.
    ///
    /// The step before may still be reading the blocks that go back. That is safe as long as the device runs steps one
    /// after the other: who gets such a block writes to it in a later step.
    #[must_use]
    pub fn grow(&mut self, kv: &mut SequenceKv, start: usize, tokens: usize) -> bool {
        let want = self.blocks_for(tokens);
        kv.prepare(self.groups().len());
        self.retire(kv, start);
        let missing: usize = kv.tables.iter().map(|table| want.saturating_sub(table.len())).sum();
        if missing > self.free() {
            return false;
        }
        for table in &mut kv.tables {
            while table.len() < want {
                let Some(block) = self.take() else { return false };
                table.push(block);
            }
        }
        true
    }

    /// Gives back what no row from `start` on sees, oldest first.
    fn retire(&mut self, kv: &mut SequenceKv, start: usize) {
        for (group, (table, dead)) in kv.tables.iter_mut().zip(&mut kv.dead).enumerate() {
            let end = self.footprint.dead(group, start).min(table.len());
            for entry in table.get_mut(*dead..end).unwrap_or_default() {
                self.pool.give(std::mem::replace(entry, BlockId::DEAD));
            }
            *dead = end.max(*dead);
        }
    }

    /// The block to be evicted next; its name is forgotten.
    pub(super) fn take(&mut self) -> Option<BlockId> {
        let block = self.pool.take()?;
        if let Some(name) = self.index.name_of(block) {
            self.offer(&name, block);
            self.forget(block);
        }
        Some(block)
    }

    /// Takes a block's name away.
    pub(super) fn forget(&mut self, block: BlockId) {
        if let Some(name) = self.index.remove(block) {
            self.pool.set_keep(block, false);
            if name.group == 0 {
                self.events.removed(name.hash);
            }
        }
    }

    /// Names the sequence's blocks that `tokens` tokens fill and that have not been offered yet. `hashes[i]` names block
    /// i, `root` is the parent of the first. What was new goes to `registered`.
    pub fn register(
        &mut self,
        kv: &mut SequenceKv,
        root: BlockHash,
        hashes: &[BlockHash],
        tokens: usize,
        registered: &mut Vec<Registered>,
    ) {
        if !self.caching {
            return;
        }
        let full = (tokens / self.block_size()).min(hashes.len()).min(kv.blocks());
        for i in kv.registered..full {
            let parent = if i == 0 { root } else { hashes[i - 1] };
            for (group, table) in kv.tables.iter().enumerate() {
                let block = table[i];
                if block != BlockId::DEAD && self.put(name(group, hashes[i]), parent, block) {
                    registered.push(Registered { group: group as u32, block });
                }
            }
        }
        kv.registered = kv.registered.max(full);
    }

    /// Names a block, unless another that somebody uses has the name. One that nobody uses loses it: what was computed last
    /// is evicted last.
    pub(super) fn put(&mut self, name: BlockName, parent: BlockHash, block: BlockId) -> bool {
        let before = self.index.get(&name);
        if let Some(old) = before.filter(|old| *old != block && self.pool.refs(*old) == 0) {
            self.index.remove(old);
            self.pool.set_keep(old, false);
        }
        if !self.index.insert(name, parent, block) {
            return false;
        }
        self.pool.set_keep(block, true);
        if name.group == 0 && before.is_none() {
            self.events.stored(name.hash, parent);
        }
        true
    }

    /// Takes the name of a block away: its content is not what the hash says. Owners keep the block.
    pub fn withdraw(&mut self, registered: Registered) {
        self.forget(registered.block);
    }

    /// Takes the names of all blocks of a sequence away, those that it gave back included: `hashes` names them.
    pub fn withdraw_all(&mut self, kv: &SequenceKv, hashes: &[BlockHash]) {
        for (group, table) in kv.tables.iter().enumerate() {
            let dead = kv.dead[group].min(hashes.len());
            for hash in &hashes[..dead] {
                if let Some(block) = self.index.get(&name(group, *hash)) {
                    self.forget(block);
                }
            }
            table.iter().filter(|block| **block != BlockId::DEAD).for_each(|block| self.forget(*block));
        }
    }

    /// Forgets up to `count` cached blocks that nobody uses, the next to be evicted first; gives how many.
    pub fn evict(&mut self, count: usize) -> usize {
        let named = self.pool.eviction_order().filter(|block| self.index.name_of(*block).is_some());
        let blocks: Vec<BlockId> = named.take(count).collect();
        blocks.iter().for_each(|block| self.forget(*block));
        blocks.len()
    }

    /// Gives all blocks back, the tail first, so that shared beginnings are evicted last.
    pub fn release(&mut self, kv: &mut SequenceKv) {
        for _ in 0..kv.blocks() {
            for block in kv.tables.iter_mut().filter_map(Vec::pop).filter(|block| *block != BlockId::DEAD) {
                self.pool.give(block);
            }
        }
        kv.dead.fill(0);
        kv.registered = 0;
    }

    /// The log of changes to the index of group 0, which keeps everything if any group does.
    pub fn events(&mut self) -> &mut EventLog {
        &mut self.events
    }

    /// Everything that the index holds of group 0, parents before their children where both are there.
    #[must_use]
    pub fn snapshot(&self) -> Vec<(BlockHash, BlockHash)> {
        let mut by_parent: std::collections::BTreeMap<BlockHash, Vec<BlockHash>> = std::collections::BTreeMap::new();
        for (hash, parent) in self.index.entries(0) {
            by_parent.entry(parent).or_default().push(hash);
        }
        // Chains whose start is gone begin at the first block that is left.
        let mut ready: Vec<_> = by_parent.keys().filter(|parent| self.index.get(&name(0, **parent)).is_none()).copied().collect();
        let mut out = Vec::with_capacity(self.index.len());
        while let Some(parent) = ready.pop() {
            for &hash in by_parent.get(&parent).map_or(&[][..], Vec::as_slice) {
                out.push((hash, parent));
                ready.push(hash);
            }
        }
        out
    }
}

#[cfg(test)]
#[path = "kv_tests.rs"]
mod tests;
