//! Which block holds what: the pool of KV blocks, the prefix index, and the events that tell others of it.
//!
//! Owns block ids, reference counts and hashes. Pure: integers and hashes, no clock, channel or tensor; it never touches
//! the memory that a block id names.

mod events;
mod index;
mod kv;
mod pool;

pub use events::{CacheChanges, EventLog, StoredHash};
pub use index::PrefixIndex;
pub use kv::{GroupKind, GroupSpec, KvCache, Registered, SequenceKv};
pub use pool::{BlockId, BlockPool};
