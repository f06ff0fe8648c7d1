//! What is found, and what a sequence is going to take.

use quire_proto::block_hash::BlockHash;

use super::{KvCache, SequenceKv, kv::name};

impl KvCache {
    /// Blocks at the start of a sequence of `tokens` tokens from which all groups can go on. Leaves at least one token to
    /// compute, since logits are needed. Changes nothing.
    #[must_use]
    pub fn hit(&self, hashes: &[BlockHash], tokens: usize) -> usize {
        if !self.caching {
            return 0;
        }
        self.agreed(hashes, self.longest_hit(hashes, tokens), |group, hash| self.index.get(&name(group, *hash)).is_some())
    }

    /// Blocks beyond `hit` from which the sequence could go on if the lower tier's were fetched.
    #[must_use]
    pub fn hit_below(&self, hashes: &[BlockHash], hit: usize, tokens: usize) -> usize {
        let Some(tier) = self.tier.as_deref().filter(|_| self.caching) else { return 0 };
        let reach = self.agreed(hashes, self.longest_hit(hashes, tokens), |group, hash| {
            let name = name(group, *hash);
            self.index.get(&name).is_some() || tier.holds(&name)
        });
        reach.saturating_sub(hit)
    }

    fn longest_hit(&self, hashes: &[BlockHash], tokens: usize) -> usize {
        hashes.len().min(tokens.saturating_sub(1) / self.block_size())
    }

    /// The longest prefix, at most `blocks`, that every group accepts: a full group if it has all of it, any other if it has
    /// what the row after the prefix sees.
    fn agreed(&self, hashes: &[BlockHash], mut blocks: usize, has: impl Fn(usize, &BlockHash) -> bool) -> usize {
        let kinds = self.groups();
        let full = |group: &usize| kinds[*group].reach().is_none();
        // What a full group accepts, it accepts at any shorter length.
        for group in (0..kinds.len()).filter(full) {
            blocks = hashes[..blocks].iter().take_while(|hash| has(group, hash)).count();
        }
        loop {
            let before = blocks;
            for group in (0..kinds.len()).filter(|group| !full(group)) {
                let mut i = blocks;
                while i > self.footprint.dead(group, blocks * self.block_size()) {
                    i -= 1;
                    if !has(group, &hashes[i]) {
                        blocks = i;
                    }
                }
            }
            if blocks == before {
                return blocks;
            }
        }
    }

    /// Whether a sequence of `tokens` tokens, `hit` blocks of it cached, leaves `spare` blocks free at its largest. Cached
    /// blocks that nobody uses count as free until they are hit, so they cost as well; those that others use cost nothing.
    #[must_use]
    pub fn fits(&self, hashes: &[BlockHash], hit: usize, tokens: usize, spare: usize) -> bool {
        let all = self.blocks_for(tokens);
        let cost = |group: usize| {
            let dead = self.footprint.dead(group, hit * self.block_size());
            let shared = hashes[dead..hit]
                .iter()
                .filter_map(|hash| self.index.get(&name(group, *hash)))
                .filter(|block| self.pool.refs(*block) > 0)
                .count();
            // What is shared may leave the window, so it never lowers what a window needs at its largest.
            self.footprint.group_peak(group, tokens, self.footprint.step_rows).min(all - dead.min(all) - shared)
        };
        (0..self.groups().len()).map(cost).sum::<usize>() + spare <= self.free()
    }

    /// Blocks that a running sequence still takes until it holds `tokens` tokens, if nobody shares more of its blocks
    /// meanwhile: those that others own too don't come back when they leave its window.
    #[must_use]
    pub fn still_to_take(&self, kv: &SequenceKv, tokens: usize) -> usize {
        let ahead = self.blocks_for(tokens).saturating_sub(kv.blocks());
        if ahead == 0 {
            return 0;
        }
        let group = |group: usize| {
            if self.groups()[group].reach().is_none() {
                return ahead;
            }
            let live = &kv.table(group)[kv.dead(group)..];
            let own = live.iter().filter(|block| self.pool.refs(**block) == 1).count();
            self.footprint.group_peak(group, tokens, self.footprint.step_rows).saturating_sub(own).min(ahead)
        };
        (0..self.groups().len()).map(group).sum()
    }

    /// Blocks that a sequence, `shared` blocks of which belong to others too, is going to hold: full groups at `tokens`
    /// tokens (they grow from there), others at their largest until `later` tokens, a row a step.
    #[must_use]
    pub fn demand(&self, shared: usize, tokens: usize, later: usize) -> usize {
        let group = |group: usize| match self.groups()[group].reach() {
            None => self.blocks_for(tokens).saturating_sub(shared),
            Some(_) => self.footprint.group_peak(group, later, 1).min(self.blocks_for(later).saturating_sub(shared)),
        };
        (0..self.groups().len()).map(group).sum()
    }
}
