//! The KV memory of all cache groups, as sequences see it: look up, admit, grow, register, release.

use quire_proto::block_hash::BlockHash;

use super::{BlockId, BlockPool, EventLog, PrefixIndex};

/// What a group of layers keeps of the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupKind {
    /// Keys and values of every position. (Windows and states with checkpoints are to come; each says which prefix
    /// lengths it accepts in `Group::accepts`.)
    Paged,
}

/// Size of a cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    pub kind: GroupKind,
    pub blocks: usize,
}

struct Group {
    kind: GroupKind,
    pool: BlockPool,
    index: PrefixIndex,
}

impl Group {
    /// The longest prefix, in blocks and at most `blocks`, that this group can go on from.
    fn accepts(&self, hashes: &[BlockHash], blocks: usize) -> usize {
        match self.kind {
            GroupKind::Paged => hashes[..blocks].iter().take_while(|hash| self.index.get(hash).is_some()).count(),
        }
    }
}

/// A block that was named in a step: what to withdraw if the step fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    pub group: u32,
    pub block: BlockId,
}

/// What one sequence owns of the KV memory: a block table per cache group.
#[derive(Clone, Debug, Default)]
pub struct SequenceKv {
    tables: Vec<Vec<BlockId>>,
    /// Leading blocks that have been offered to the index.
    registered: usize,
}

impl SequenceKv {
    /// Block table of a group, in order of position.
    #[must_use]
    pub fn table(&self, group: usize) -> &[BlockId] {
        self.tables.get(group).map_or(&[], Vec::as_slice)
    }

    /// Blocks held per group.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.table(0).len()
    }
}

/// Pools, indices and events of all groups.
pub struct KvCache {
    groups: Vec<Group>,
    block_size: usize,
    caching: bool,
    events: EventLog,
}

impl KvCache {
    /// `epoch` numbers the events; without `caching` nothing is ever found.
    #[must_use]
    pub fn new(groups: &[GroupSpec], block_size: usize, caching: bool, epoch: u64) -> Self {
        let groups = groups
            .iter()
            .map(|spec| Group { kind: spec.kind, pool: BlockPool::new(spec.blocks), index: PrefixIndex::new(spec.blocks) })
            .collect();
        Self { groups, block_size, caching, events: EventLog::new(epoch) }
    }

    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks that hold `tokens`.
    #[must_use]
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Blocks of the smallest group: no sequence can hold more.
    #[must_use]
    pub fn total(&self) -> usize {
        self.groups.iter().map(|group| group.pool.total()).min().unwrap_or(0)
    }

    /// Blocks that every group has free.
    #[must_use]
    pub fn free(&self) -> usize {
        self.groups.iter().map(|group| group.pool.free()).min().unwrap_or(0)
    }

    /// Blocks in use in the fullest group.
    #[must_use]
    pub fn used(&self) -> usize {
        self.groups.iter().map(|group| group.pool.used()).max().unwrap_or(0)
    }

    /// Block pool of a group (diagnosis, tests).
    #[must_use]
    pub fn pool(&self, group: usize) -> Option<&BlockPool> {
        self.groups.get(group).map(|group| &group.pool)
    }

    /// Prefix index of a group (diagnosis, tests).
    #[must_use]
    pub fn index(&self, group: usize) -> Option<&PrefixIndex> {
        self.groups.get(group).map(|group| &group.index)
    }

    /// Blocks at the start of a sequence of `tokens` tokens that all groups have cached. Leaves at least one token to
    /// compute, since logits are needed. Changes nothing.
    #[must_use]
    pub fn hit(&self, hashes: &[BlockHash], tokens: usize) -> usize {
        if !self.caching {
            return 0;
        }
        let mut blocks = hashes.len().min(tokens.saturating_sub(1) / self.block_size);
        loop {
            let agreed = self.groups.iter().fold(blocks, |blocks, group| group.accepts(hashes, blocks));
            if agreed == blocks {
                return blocks;
            }
            blocks = agreed;
        }
    }

    /// Whether a sequence of `tokens` tokens, `hit` blocks of it cached, leaves `spare` blocks free in every group.
    /// Cached blocks that nobody uses count as free until they are hit, so they cost as well.
    #[must_use]
    pub fn fits(&self, hashes: &[BlockHash], hit: usize, tokens: usize, spare: usize) -> bool {
        let fresh = self.blocks_for(tokens).saturating_sub(hit);
        self.groups.iter().all(|group| {
            let revived =
                hashes[..hit].iter().filter_map(|hash| group.index.get(hash)).filter(|block| group.pool.refs(*block) == 0).count();
            fresh + revived + spare <= group.pool.free()
        })
    }

    /// Starts a sequence on `hit` cached blocks, as [`hit`](Self::hit) found them.
    pub fn admit(&mut self, kv: &mut SequenceKv, hashes: &[BlockHash], hit: usize) {
        debug_assert!(kv.blocks() == 0, "admitted twice");
        kv.tables.resize_with(self.groups.len(), Vec::new);
        kv.registered = hit;
        for (group, table) in self.groups.iter_mut().zip(&mut kv.tables) {
            for block in hashes[..hit].iter().filter_map(|hash| group.index.get(hash)) {
                group.pool.touch(block);
                table.push(block);
            }
        }
    }

    /// Makes the sequence hold `tokens` tokens, evicting what is free. All or nothing: false leaves everything as it was.
    #[must_use]
    pub fn grow(&mut self, kv: &mut SequenceKv, tokens: usize) -> bool {
        let want = self.blocks_for(tokens);
        kv.tables.resize_with(self.groups.len(), Vec::new);
        let fits = self.groups.iter().zip(&kv.tables).all(|(group, table)| want.saturating_sub(table.len()) <= group.pool.free());
        if !fits {
            return false;
        }
        for (number, (group, table)) in self.groups.iter_mut().zip(&mut kv.tables).enumerate() {
            while table.len() < want {
                let Some(block) = group.pool.take() else { return false };
                if let Some(hash) = group.index.remove(block).filter(|_| number == 0) {
                    self.events.removed(hash);
                }
                table.push(block);
            }
        }
        true
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
        let full = (tokens / self.block_size).min(hashes.len()).min(kv.blocks());
        for i in kv.registered..full {
            let parent = if i == 0 { root } else { hashes[i - 1] };
            for (number, (group, table)) in self.groups.iter_mut().zip(&kv.tables).enumerate() {
                let block = table[i];
                if !group.index.insert(hashes[i], parent, block) {
                    continue;
                }
                group.pool.set_keep(block, true);
                registered.push(Registered { group: number as u32, block });
                if number == 0 {
                    self.events.stored(hashes[i], parent);
                }
            }
        }
        kv.registered = kv.registered.max(full);
    }

    /// Takes the name of a block away: its content is not what the hash says. Owners keep the block.
    pub fn withdraw(&mut self, registered: Registered) {
        let Some(group) = self.groups.get_mut(registered.group as usize) else { return };
        if let Some(hash) = group.index.remove(registered.block) {
            group.pool.set_keep(registered.block, false);
            if registered.group == 0 {
                self.events.removed(hash);
            }
        }
    }

    /// Takes the names of all blocks of a sequence away.
    pub fn withdraw_all(&mut self, kv: &SequenceKv) {
        for (group, table) in kv.tables.iter().enumerate() {
            for &block in table {
                self.withdraw(Registered { group: group as u32, block });
            }
        }
    }

    /// Forgets up to `count` cached blocks that nobody uses, the next to be evicted first; gives how many.
    pub fn evict(&mut self, count: usize) -> usize {
        let mut evicted = 0;
        for group in 0..self.groups.len() {
            let Group { pool, index, .. } = &self.groups[group];
            let named = pool.eviction_order().filter(|block| index.hash_of(*block).is_some());
            let blocks: Vec<BlockId> = named.take(count).collect();
            evicted = evicted.max(blocks.len());
            for block in blocks {
                self.withdraw(Registered { group: group as u32, block });
            }
        }
        evicted
    }

    /// Gives all blocks back, the tail first, so that shared beginnings are evicted last.
    pub fn release(&mut self, kv: &mut SequenceKv) {
        for (group, table) in self.groups.iter_mut().zip(&mut kv.tables) {
            while let Some(block) = table.pop() {
                group.pool.give(block);
            }
        }
        kv.registered = 0;
    }

    /// The log of changes to the index of group 0.
    pub fn events(&mut self) -> &mut EventLog {
        &mut self.events
    }

    /// Everything that the index of group 0 holds, parents before their children where both are there.
    #[must_use]
    pub fn snapshot(&self) -> Vec<(BlockHash, BlockHash)> {
        let Some(group) = self.groups.first() else { return Vec::new() };
        let mut by_parent: std::collections::BTreeMap<BlockHash, Vec<BlockHash>> = std::collections::BTreeMap::new();
        for (hash, parent) in group.index.entries() {
            by_parent.entry(parent).or_default().push(hash);
        }
        // Chains whose start is gone begin at the first block that is left.
        let mut ready: Vec<_> = by_parent.keys().filter(|parent| group.index.get(parent).is_none()).copied().collect();
        let mut out = Vec::with_capacity(group.index.len());
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
mod tests {
    use quire_proto::block_hash::chain;

    use super::*;

    const B: usize = 4;

    fn cache(blocks: usize) -> KvCache {
        let mut cache = KvCache::new(&[GroupSpec { kind: GroupKind::Paged, blocks }], B, true, 1);
        cache.events().listen(true);
        cache
    }

    fn root() -> BlockHash {
        BlockHash::root("", b"")
    }

    fn run(cache: &mut KvCache, ids: &[u32]) -> (SequenceKv, usize) {
        let hashes = chain(root(), ids, B);
        let hit = cache.hit(&hashes, ids.len());
        let mut kv = SequenceKv::default();
        assert!(cache.fits(&hashes, hit, ids.len(), 0));
        cache.admit(&mut kv, &hashes, hit);
        assert!(cache.grow(&mut kv, ids.len()));
        cache.register(&mut kv, root(), &hashes, ids.len(), &mut Vec::new());
        (kv, hit)
    }

    #[test]
    fn a_hit_leaves_a_token_and_follows_the_chain() {
        let mut cache = cache(32);
        let ids: Vec<u32> = (0..14).collect();
        let (mut kv, hit) = run(&mut cache, &ids);
        assert_eq!(hit, 0);
        cache.release(&mut kv);
        assert_eq!(cache.used(), 0);
        // 14 tokens: three full blocks; 12 tokens: the last of three must be computed again.
        for (length, want) in [(14, 3), (13, 3), (12, 2), (4, 0), (5, 1)] {
            assert_eq!(cache.hit(&chain(root(), &ids[..length], B), length), want, "{length} tokens");
        }
        let mut other = ids.clone();
        other[9] = 99;
        assert_eq!(cache.hit(&chain(root(), &other, B), 14), 2);
        other[0] = 99;
        assert_eq!(cache.hit(&chain(root(), &other, B), 14), 0);
        assert_eq!(cache.hit(&chain(BlockHash::root("", b"salt"), &ids, B), 14), 0);
        assert_eq!(cache.hit(&chain(BlockHash::root("adapter", b""), &ids, B), 14), 0);
    }

    #[test]
    fn the_tail_is_evicted_first_and_worthless_blocks_before_all() {
        let mut cache = cache(10);
        let ids: Vec<u32> = (0..22).collect();
        let (mut kv, _) = run(&mut cache, &ids);
        let table = kv.table(0).to_vec();
        cache.release(&mut kv);
        let order: Vec<BlockId> = cache.groups[0].pool.eviction_order().collect();
        assert_eq!(order[0], table[5], "the partial block");
        assert_eq!(&order[5..], &[table[4], table[3], table[2], table[1], table[0]], "then, after the unused ones, tail to head");
    }

    #[test]
    fn a_hit_revives_free_blocks_and_a_failed_grow_changes_nothing() {
        let mut cache = cache(6);
        let ids: Vec<u32> = (0..13).collect();
        let (mut first, _) = run(&mut cache, &ids);
        cache.release(&mut first);
        let hashes = chain(root(), &ids, B);
        assert!(!cache.fits(&hashes, 3, 25, 0), "three revived and four fresh blocks do not fit into six");
        assert!(cache.fits(&hashes, 3, 24, 0));
        let (mut second, hit) = run(&mut cache, &ids);
        assert_eq!((hit, cache.used()), (3, 4));
        let before = second.table(0).to_vec();
        assert!(!cache.grow(&mut second, 25));
        assert_eq!(second.table(0), before);
        assert_eq!(cache.used(), 4);
        cache.release(&mut second);
        assert_eq!(cache.used(), 0);
    }

    #[test]
    fn events_name_parents_and_follow_eviction() {
        let mut cache = cache(4);
        let ids: Vec<u32> = (0..9).collect();
        let hashes = chain(root(), &ids, B);
        let (mut kv, _) = run(&mut cache, &ids);
        let changes = cache.events().flush().unwrap();
        let stored: Vec<_> = changes.stored.iter().map(|s| (s.hash, s.parent)).collect();
        assert_eq!(stored, [(hashes[0], root()), (hashes[1], hashes[0])]);
        assert_eq!(cache.snapshot(), stored);
        cache.release(&mut kv);
        let mut other = SequenceKv::default();
        assert!(cache.grow(&mut other, 3 * B));
        assert_eq!(cache.events().flush().unwrap().removed, [hashes[1]], "the tail goes first");
        assert_eq!(cache.snapshot(), [(hashes[0], root())]);
    }

    #[test]
    fn withdrawn_blocks_are_not_found_again() {
        let mut cache = cache(8);
        let ids: Vec<u32> = (0..9).collect();
        let (mut kv, _) = run(&mut cache, &ids);
        cache.withdraw_all(&kv);
        assert_eq!(cache.hit(&chain(root(), &ids, B), 9), 0);
        cache.release(&mut kv);
        assert_eq!(cache.free(), 8);
        assert_eq!(cache.events().flush(), None, "stored and removed between two flushes: nothing happened");
    }
}
