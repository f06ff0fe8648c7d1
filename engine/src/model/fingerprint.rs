//! A hash of what decides the arithmetic: two workers with the same one compute the same model.
//!
//! ```text
//! SHA-256("quire.weights.v1" ‖ keys of the architecture, sorted: key, type, value
//!                            ‖ tensors, sorted by name: name, type, dimensions, digests of its 4 MiB pieces)
//! ```
//!
//! Every part is preceded by its length (u64, little-endian). Names, templates and the tokenizer are left out: they have
//! hashes of their own, or decide nothing. Pieces are hashed in parallel: a large file takes seconds, not minutes.

use std::fmt::Write;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::gguf::{Gguf, TensorInfo};

const DOMAIN: &[u8] = b"quire.weights.v1";
const PIECE: usize = 4 << 20;

/// Hex.
pub(super) fn weights_hash(gguf: &Gguf<'_>, architecture: &str) -> String {
    let mut tensors: Vec<&TensorInfo<'_>> = gguf.tensors().iter().collect();
    tensors.sort_unstable_by_key(|tensor| tensor.name);
    let pieces: Vec<&[u8]> = tensors.iter().flat_map(|tensor| tensor.data.chunks(PIECE)).collect();
    let digests: Vec<[u8; 32]> = pieces.par_iter().map(|piece| Sha256::digest(piece).into()).collect();

    let mut hasher = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hasher.update((bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    part(DOMAIN);
    let prefix = format!("{architecture}.");
    for (key, entry) in gguf.metadata.sorted() {
        if key.starts_with(&prefix) || key == "general.architecture" {
            part(key.as_bytes());
            part(format!("{:?} {:?}", entry.value_type, entry.element).as_bytes());
            part(entry.raw);
        }
    }
    let mut digests = digests.iter();
    for tensor in tensors {
        part(tensor.name.as_bytes());
        part(tensor.tensor_type.name.as_bytes());
        part(&tensor.dimensions.map(|size| (size as u64).to_le_bytes()).concat());
        for digest in digests.by_ref().take(tensor.data.len().div_ceil(PIECE)) {
            part(digest);
        }
    }
    hasher.finalize().iter().fold(String::with_capacity(64), |mut hex, byte| {
        // Writing to a string can't fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
