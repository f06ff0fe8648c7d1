//! Block name → block.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use quire_proto::block_hash::BlockHash;

use super::BlockId;

/// A block hash is a SHA-256 already; hashing it again would be waste.
#[derive(Clone, Copy, Default)]
pub struct TakeHash(u64);

impl Hasher for TakeHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 = self.0.rotate_left(32) ^ u64::from_le_bytes(word);
        }
    }

    fn write_u32(&mut self, group: u32) {
        // Spread over the high bits too: the map takes its tag from there.
        self.0 ^= u64::from(group).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_usize(&mut self, _: usize) {
        // The length prefix of the array: constant.
    }
}

/// A map keyed by block hashes.
pub(super) type HashKeyed<K, V> = HashMap<K, V, BuildHasherDefault<TakeHash>>;

/// What a block holds: keys and values of a group's layers for the last tokens of the prefix that the hash names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockName {
    pub hash: BlockHash,
    pub group: u32,
}

/// Which block has which name. One block a name: who computes the same prefix again keeps an unnamed copy, so block tables
/// only ever grow at their end.
#[derive(Clone, Debug, Default)]
pub struct PrefixIndex {
    by_name: HashKeyed<BlockName, BlockId>,
    /// Per block: its name and its parent's hash.
    by_block: Vec<Option<(BlockName, BlockHash)>>,
}

impl PrefixIndex {
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        Self { by_name: HashKeyed::with_capacity_and_hasher(blocks, BuildHasherDefault::default()), by_block: vec![None; blocks] }
    }

    #[must_use]
    pub fn get(&self, name: &BlockName) -> Option<BlockId> {
        self.by_name.get(name).copied()
    }

    #[must_use]
    pub fn name_of(&self, block: BlockId) -> Option<BlockName> {
        self.by_block[block.0 as usize].map(|(name, _)| name)
    }

    /// Number of names.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Names `block`. False, and no change, if another block has the name or the block has one.
    pub fn insert(&mut self, name: BlockName, parent: BlockHash, block: BlockId) -> bool {
        let entry = &mut self.by_block[block.0 as usize];
        if entry.is_some() || self.by_name.contains_key(&name) {
            return false;
        }
        *entry = Some((name, parent));
        self.by_name.insert(name, block);
        true
    }

    /// Takes the name of a block away; returns it.
    pub fn remove(&mut self, block: BlockId) -> Option<BlockName> {
        let (name, _) = self.by_block[block.0 as usize].take()?;
        self.by_name.remove(&name);
        Some(name)
    }

    /// (hash, parent) of everything that a group has cached, in no order.
    pub fn entries(&self, group: u32) -> impl Iterator<Item = (BlockHash, BlockHash)> + '_ {
        self.by_block.iter().flatten().filter(move |(name, _)| name.group == group).map(|(name, parent)| (name.hash, *parent))
    }
}
