//! Block hash → block.

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

    fn write_usize(&mut self, _: usize) {
        // The length prefix of the array: constant.
    }
}

/// A map keyed by block hashes.
pub(super) type HashKeyed<V> = HashMap<BlockHash, V, BuildHasherDefault<TakeHash>>;

/// Which block holds the prefix that a hash names. One block a hash: who computes the same prefix again keeps an
/// unregistered copy, so block tables only ever grow at their end.
#[derive(Clone, Debug, Default)]
pub struct PrefixIndex {
    by_hash: HashKeyed<BlockId>,
    /// Per block: its hash and its parent's.
    by_block: Vec<Option<(BlockHash, BlockHash)>>,
}

impl PrefixIndex {
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        Self { by_hash: HashKeyed::with_capacity_and_hasher(blocks, BuildHasherDefault::default()), by_block: vec![None; blocks] }
    }

    #[must_use]
    pub fn get(&self, hash: &BlockHash) -> Option<BlockId> {
        self.by_hash.get(hash).copied()
    }

    #[must_use]
    pub fn hash_of(&self, block: BlockId) -> Option<BlockHash> {
        self.by_block[block.0 as usize].map(|(hash, _)| hash)
    }

    /// Number of hashes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_hash.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_hash.is_empty()
    }

    /// Names `block`. False, and no change, if another block has the hash or the block has one.
    pub fn insert(&mut self, hash: BlockHash, parent: BlockHash, block: BlockId) -> bool {
        let entry = &mut self.by_block[block.0 as usize];
        if entry.is_some() || self.by_hash.contains_key(&hash) {
            return false;
        }
        *entry = Some((hash, parent));
        self.by_hash.insert(hash, block);
        true
    }

    /// Takes the name of a block away; returns it.
    pub fn remove(&mut self, block: BlockId) -> Option<BlockHash> {
        let (hash, _) = self.by_block[block.0 as usize].take()?;
        self.by_hash.remove(&hash);
        Some(hash)
    }

    /// (hash, parent) of everything that is cached, in no order.
    pub fn entries(&self) -> impl Iterator<Item = (BlockHash, BlockHash)> + '_ {
        self.by_block.iter().flatten().copied()
    }
}
