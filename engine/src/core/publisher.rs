//! Tells subscribers what is cached: a snapshot, then numbered changes.
//!
//! Nobody is waited for and nothing is kept for long: each subscriber has a channel of bounded length, and who does not
//! read it loses it, which tells it to start again from a snapshot.

use quire_proto::{
    block_hash::BlockHash,
    worker::v1::{CacheEventBatch, StoredBlock},
};
use tokio::sync::mpsc;

use crate::cache::{CacheChanges, KvCache};

/// Batches that may wait for one subscriber, beside its snapshot.
const BATCHES: usize = 256;
/// Blocks of one part of a snapshot: about 300 KB on the wire, well below what a gRPC client takes as one message.
const SNAPSHOT_PART: usize = 8192;

/// Length of a subscriber's channel for a memory of so many blocks.
pub(crate) fn channel_len(blocks: usize) -> usize {
    BATCHES + blocks / SNAPSHOT_PART + 1
}

#[derive(Default)]
pub(crate) struct Publisher {
    subscribers: Vec<mpsc::Sender<CacheEventBatch>>,
}

impl Publisher {
    /// Sends a snapshot, and what changes from then on.
    pub fn subscribe(&mut self, cache: &mut KvCache, sender: mpsc::Sender<CacheEventBatch>) {
        // What is pending belongs to those who listen already, and its number to the snapshot.
        self.publish(cache);
        cache.events().listen(true);
        // Those who left while nothing changed.
        self.subscribers.retain(|subscriber| !subscriber.is_closed());
        let (epoch, sequence) = cache.events().position();
        let blocks = cache.snapshot();
        let parts = blocks.len().div_ceil(SNAPSHOT_PART).max(1);
        let sent = (0..parts).all(|part| {
            let part_of = blocks.chunks(SNAPSHOT_PART).nth(part).unwrap_or_default();
            let stored = part_of.iter().map(|(hash, parent)| stored_block(*hash, *parent)).collect();
            let more = part + 1 < parts;
            sender.try_send(CacheEventBatch { epoch, sequence, snapshot: true, stored, removed: Vec::new(), more }).is_ok()
        });
        if sent {
            self.subscribers.push(sender);
        }
    }

    /// Sends what has changed since the last time.
    pub fn publish(&mut self, cache: &mut KvCache) {
        if self.subscribers.is_empty() {
            return;
        }
        if let Some(changes) = cache.events().flush() {
            let batch = wire(&changes);
            self.subscribers.retain(|subscriber| subscriber.try_send(batch.clone()).is_ok());
        }
        if self.subscribers.is_empty() {
            cache.events().listen(false);
        }
    }
}

fn wire(changes: &CacheChanges) -> CacheEventBatch {
    CacheEventBatch {
        epoch: changes.epoch,
        sequence: changes.sequence,
        snapshot: false,
        stored: changes.stored.iter().map(|block| stored_block(block.hash, block.parent)).collect(),
        removed: changes.removed.iter().map(|hash| hash.0.to_vec()).collect(),
        more: false,
    }
}

fn stored_block(hash: BlockHash, parent: BlockHash) -> StoredBlock {
    StoredBlock { hash: hash.0.to_vec(), parent: parent.0.to_vec() }
}

#[cfg(test)]
mod tests {
    use quire_proto::block_hash::chain;

    use super::*;
    use crate::cache::{Footprint, GroupKind, KvConfig, SequenceKv};

    fn cache(blocks: usize) -> KvCache {
        let footprint = Footprint { groups: vec![GroupKind::Full], block_size: 1, step_rows: 64 };
        KvCache::new(KvConfig { footprint, blocks, caching: true, epoch: 5 })
    }

    fn fill(cache: &mut KvCache, tokens: usize) {
        let root = BlockHash::root("", b"");
        let hashes = chain(root, &(0..tokens as u32).collect::<Vec<_>>(), 1);
        let mut kv = SequenceKv::default();
        assert!(cache.grow(&mut kv, 0, tokens));
        cache.register(&mut kv, root, &hashes, tokens, &mut Vec::new());
        cache.release(&mut kv);
    }

    #[test]
    fn a_large_snapshot_comes_in_parts() {
        let blocks = 2 * SNAPSHOT_PART + 100;
        let (mut cache, mut publisher) = (cache(blocks), Publisher::default());
        fill(&mut cache, blocks);
        let (sender, mut receiver) = mpsc::channel(channel_len(blocks));
        publisher.subscribe(&mut cache, sender);
        let parts: Vec<_> = std::iter::from_fn(|| receiver.try_recv().ok()).collect();
        assert_eq!(parts.iter().map(|part| (part.snapshot, part.more)).collect::<Vec<_>>(), [(true, true), (true, true), (true, false)]);
        assert!(parts.iter().all(|part| (part.epoch, part.sequence) == (5, 0)));
        let parents = parts.iter().flat_map(|part| &part.stored);
        assert!(parents.clone().zip(parents.clone().skip(1)).all(|(a, b)| a.hash == b.parent), "not in order");
        assert_eq!(parents.count(), blocks);
        // An empty one is said, too.
        let (sender, mut receiver) = mpsc::channel(4);
        cache.evict(blocks);
        publisher.subscribe(&mut cache, sender);
        let batch = receiver.try_recv().unwrap();
        assert_eq!((batch.snapshot, batch.more, batch.sequence, batch.stored.len()), (true, false, 1, 0));
    }

    #[test]
    fn those_who_left_are_forgotten_even_if_nothing_changes() {
        let (mut cache, mut publisher) = (cache(8), Publisher::default());
        for _ in 0..100 {
            let (sender, receiver) = mpsc::channel(4);
            publisher.subscribe(&mut cache, sender);
            drop(receiver);
            assert!(publisher.subscribers.len() <= 2);
        }
    }
}
