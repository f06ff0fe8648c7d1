//! What a reader of cache events knows: the prefix index of a worker, rebuilt from its batches.

use std::collections::BTreeMap;

use quire_proto::worker::v1::CacheEventBatch;

#[derive(Debug, PartialEq, Eq)]
pub enum OutOfStep {
    /// A number is missing.
    Gap { after: u64, got: u64 },
    /// Another life of the worker.
    Epoch,
    /// Changes before any snapshot, or in the middle of one.
    NoSnapshot,
}

#[derive(Debug, Default)]
pub struct Replica {
    /// Epoch and number of the last batch, once a whole snapshot was read.
    position: Option<(u64, u64)>,
    /// Hash → parent.
    pub blocks: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Snapshots read.
    pub snapshots: usize,
    reading: bool,
}

impl Replica {
    /// After an error nothing is known: ask again.
    pub fn apply(&mut self, batch: CacheEventBatch) -> Result<(), OutOfStep> {
        if batch.snapshot {
            if !self.reading {
                self.blocks.clear();
                self.snapshots += 1;
            }
            self.reading = batch.more;
            self.position = (!batch.more).then_some((batch.epoch, batch.sequence));
        } else {
            let Some((epoch, after)) = self.position else { return Err(OutOfStep::NoSnapshot) };
            let problem = match () {
                () if epoch != batch.epoch => Some(OutOfStep::Epoch),
                () if batch.sequence != after + 1 => Some(OutOfStep::Gap { after, got: batch.sequence }),
                () => None,
            };
            if let Some(problem) = problem {
                *self = Self::default();
                return Err(problem);
            }
            self.position = Some((epoch, batch.sequence));
        }
        for hash in &batch.removed {
            assert!(self.blocks.remove(hash).is_some(), "removed what was not stored");
        }
        for block in batch.stored {
            assert!(self.blocks.insert(block.hash, block.parent).is_none(), "stored twice");
        }
        Ok(())
    }

    pub fn sequence(&self) -> Option<u64> {
        self.position.map(|(_, sequence)| sequence)
    }
}
