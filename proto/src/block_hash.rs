//! The chained block hash: names a full KV block together with everything before it.
//!
//! Fixed, without seed, and language-neutral, so that a router in any language can compute where a prompt is cached,
//! and two workers (or two runs of one) agree. Equality of one hash means equality of the whole prefix, of the adapter
//! and of the tenant salt, up to a 128-bit collision.
//!
//! ```text
//! root   = SHA-256("quire.block.v1" ‖ len(adapter) ‖ adapter ‖ len(salt) ‖ salt)[0..16]
//! block  = SHA-256(parent ‖ id_0 ‖ … ‖ id_{B-1})[0..16]
//! ```
//!
//! Lengths and ids are 32-bit little-endian; `adapter` is the adapter's name in UTF-8 (empty for the base model).
//! Only full blocks have a hash. The salt comes from the server (derived from the API key), never from the client.

use std::fmt;

use sha2::{Digest, Sha256};

/// Domain separation, and the version of this definition.
const DOMAIN: &[u8] = b"quire.block.v1";

/// The name of a block: 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 16]);

impl BlockHash {
    /// The start of a chain: what the first block has as its parent.
    #[must_use]
    pub fn root(adapter: &str, salt: &[u8]) -> Self {
        let mut hasher = Sha256::new();
        hasher.update(DOMAIN);
        for part in [adapter.as_bytes(), salt] {
            hasher.update((part.len() as u32).to_le_bytes());
            hasher.update(part);
        }
        Self::truncate(hasher)
    }

    /// The block that follows `self` and holds `ids` (exactly one block of them).
    #[must_use]
    pub fn child(self, ids: &[u32]) -> Self {
        let mut hasher = Sha256::new();
        hasher.update(self.0);
        for id in ids {
            hasher.update(id.to_le_bytes());
        }
        Self::truncate(hasher)
    }

    /// Reads a hash from the wire; `None` unless it has 16 bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    fn truncate(hasher: Sha256) -> Self {
        let digest = hasher.finalize();
        let mut out = [0; 16];
        out.copy_from_slice(&digest[..16]);
        Self(out)
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Hashes of all full blocks of `ids`, in order.
#[must_use]
pub fn chain(root: BlockHash, ids: &[u32], block_size: usize) -> Vec<BlockHash> {
    let mut parent = root;
    ids.chunks_exact(block_size)
        .map(|block| {
            parent = parent.child(block);
            parent
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed with Python's hashlib and struct from the definition above, not with this code.
    const GOLDEN: &str = include_str!("../testdata/block_hash.txt");

    #[test]
    fn agrees_with_golden_vectors() {
        let mut seen = 0;
        for line in GOLDEN.lines().filter(|l| !l.starts_with('#') && !l.is_empty()) {
            let mut fields = line.split('|');
            let mut next = || fields.next().unwrap();
            let (adapter, salt, block, ids, want) = (next(), next(), next(), next(), next());
            let salt: Vec<u8> = (0..salt.len()).step_by(2).map(|i| u8::from_str_radix(&salt[i..i + 2], 16).unwrap()).collect();
            let ids: Vec<u32> = ids.split(' ').filter(|s| !s.is_empty()).map(|s| s.parse().unwrap()).collect();
            let root = BlockHash::root(adapter, &salt);
            let got: Vec<String> = std::iter::once(root).chain(chain(root, &ids, block.parse().unwrap())).map(|h| h.to_string()).collect();
            assert_eq!(got.join(" "), want, "line: {line}");
            seen += 1;
        }
        assert!(seen >= 6, "only {seen} vectors read");
    }

    #[test]
    fn adapter_and_salt_lengths_are_part_of_the_root() {
        assert_ne!(BlockHash::root("ab", b"c"), BlockHash::root("a", b"bc"));
        assert_ne!(BlockHash::root("", b"x"), BlockHash::root("x", b""));
    }

    #[test]
    fn a_partial_block_has_no_hash() {
        let root = BlockHash::root("", b"");
        assert_eq!(chain(root, &[1; 31], 16).len(), 1);
    }
}
