//! Which block holds what: the pool of KV blocks, the prefix index, and the events that tell others of it.
//!
//! Owns block ids, reference counts and hashes. Pure: integers and hashes, no clock, channel or tensor; it never touches
//! the memory that a block id names.
//!
//! Layers that keep the same part of the past form groups ([`CacheLayout`]), and a sequence has a block table for each; all
//! groups take their blocks from one pool, which has one eviction order.

mod demand;
mod events;
mod group;
mod index;
mod kv;
mod layout;
mod pool;
mod sequence;
mod tier;
mod transfer;

pub use events::{CacheChanges, EventLog, StoredHash};
pub use group::{Footprint, GroupKind};
pub use index::{BlockName, PrefixIndex};
pub use kv::{KvCache, KvConfig, Registered};
pub use layout::{CacheLayout, LayerCache, Place};
pub use pool::{BlockId, BlockPool, BlockState};
pub use sequence::SequenceKv;
pub use tier::{Tier, TierCounters};
