//! A hash of what decides the arithmetic: two workers with the same one compute the same model.
//!
//! ```text
//! SHA-256("quire.weights.v2" ‖ settings: name, value (of GGUF the architecture's keys, sorted; else config.json)
//!                            ‖ tensors, sorted by name: name, type, shape, digests of its 4 MiB pieces)
//! ```
//!
//! Every part is preceded by its length (u64, little-endian). Names, templates and the tokenizer are left out: they have
//! hashes of their own, or decide nothing. Pieces are hashed in parallel: a large file takes seconds, not minutes.

use std::fmt::Write;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::checkpoint::Tensors;

const DOMAIN: &[u8] = b"quire.weights.v2";
const PIECE: usize = 4 << 20;

/// Hex. `settings` are what decides the arithmetic beside the tensors, in a fixed order.
pub(super) fn weights_hash(settings: &[(String, Vec<u8>)], tensors: &Tensors<'_>) -> String {
    let pieces: Vec<&[u8]> = tensors.stored().flat_map(|(_, data)| data.chunks(PIECE)).collect();
    let digests: Vec<[u8; 32]> = pieces.par_iter().map(|piece| Sha256::digest(piece).into()).collect();

    let mut hasher = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hasher.update((bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    part(DOMAIN);
    for (name, value) in settings {
        part(name.as_bytes());
        part(value);
    }
    let mut digests = digests.iter();
    for (facts, data) in tensors.stored() {
        part(facts.name.as_bytes());
        part(facts.type_name.as_bytes());
        part(&facts.shape.iter().flat_map(|size| (*size as u64).to_le_bytes()).collect::<Vec<_>>());
        for digest in digests.by_ref().take(data.len().div_ceil(PIECE)) {
            part(digest);
        }
    }
    hasher.finalize().iter().fold(String::with_capacity(64), |mut hex, byte| {
        // Writing to a string can't fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
