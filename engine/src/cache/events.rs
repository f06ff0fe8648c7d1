//! What changed in the prefix index, numbered.

use quire_proto::block_hash::BlockHash;

use super::index::HashKeyed;

/// A block that became cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredHash {
    pub hash: BlockHash,
    pub parent: BlockHash,
}

/// Net changes between two numbers: no hash stands in both lists, parents stand before their children.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheChanges {
    pub epoch: u64,
    /// One more than that of the changes before.
    pub sequence: u64,
    pub stored: Vec<StoredHash>,
    pub removed: Vec<BlockHash>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Stored,
    Removed,
}

/// Collects changes between two flushes. While nobody listens it only counts that there were some.
#[derive(Default)]
pub struct EventLog {
    epoch: u64,
    sequence: u64,
    listening: bool,
    /// Against the state at the last flush.
    pending: HashKeyed<BlockHash, Change>,
    /// Order of `pending`; entries that were undone since are skipped.
    order: Vec<(BlockHash, BlockHash)>,
}

impl EventLog {
    /// `epoch` numbers this life of the index.
    #[must_use]
    pub fn new(epoch: u64) -> Self {
        Self { epoch, ..Self::default() }
    }

    /// The number of the last flushed changes, and the epoch: what a snapshot taken now carries.
    #[must_use]
    pub fn position(&self) -> (u64, u64) {
        (self.epoch, self.sequence)
    }

    /// Whether changes are collected. Switch on, flush first, then take the snapshot.
    pub fn listen(&mut self, on: bool) {
        self.listening = on;
        if !on {
            self.pending.clear();
            self.order.clear();
        }
    }

    pub(super) fn stored(&mut self, hash: BlockHash, parent: BlockHash) {
        if self.listening && self.pending.remove(&hash) != Some(Change::Removed) {
            self.pending.insert(hash, Change::Stored);
            self.order.push((hash, parent));
        }
    }

    pub(super) fn removed(&mut self, hash: BlockHash) {
        if self.listening && self.pending.remove(&hash) != Some(Change::Stored) {
            self.pending.insert(hash, Change::Removed);
            self.order.push((hash, hash));
        }
    }

    /// The changes since the last flush; `None` if there were none.
    pub fn flush(&mut self) -> Option<CacheChanges> {
        if self.pending.is_empty() {
            self.order.clear();
            return None;
        }
        self.sequence += 1;
        let mut changes = CacheChanges { epoch: self.epoch, sequence: self.sequence, ..CacheChanges::default() };
        // A hash that was undone and done again stands in the order twice; its last place counts.
        for (hash, parent) in self.order.drain(..).rev() {
            match self.pending.remove(&hash) {
                Some(Change::Stored) => changes.stored.push(StoredHash { hash, parent }),
                Some(Change::Removed) => changes.removed.push(hash),
                None => {}
            }
        }
        changes.stored.reverse();
        changes.removed.reverse();
        Some(changes)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn name(i: u8) -> BlockHash {
        BlockHash([i; 16])
    }

    proptest! {
        /// Whoever applies all changes has the index, whatever happened between two flushes.
        #[test]
        fn changes_replay_to_the_index(ops in prop::collection::vec((0u8..8, 0u8..4), 0..200)) {
            let mut log = EventLog::new(7);
            log.listen(true);
            let (mut index, mut replica) = (BTreeSet::new(), BTreeSet::new());
            let mut last = 0;
            for (i, op) in ops {
                if index.contains(&name(i)) {
                    index.remove(&name(i));
                    log.removed(name(i));
                } else {
                    index.insert(name(i));
                    log.stored(name(i), name(i.wrapping_sub(1)));
                }
                if op == 0 {
                    if let Some(changes) = log.flush() {
                        prop_assert_eq!((changes.epoch, changes.sequence), (7, last + 1));
                        last = changes.sequence;
                        for hash in &changes.removed {
                            prop_assert!(replica.remove(hash));
                        }
                        for stored in &changes.stored {
                            prop_assert!(replica.insert(stored.hash));
                        }
                    }
                    prop_assert_eq!(&replica, &index);
                }
            }
        }
    }

    #[test]
    fn nothing_is_kept_while_nobody_listens() {
        let mut log = EventLog::new(1);
        log.stored(name(1), name(0));
        assert_eq!(log.flush(), None);
        assert_eq!(log.position(), (1, 0));
    }
}
