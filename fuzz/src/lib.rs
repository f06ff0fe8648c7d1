//! A fuzzer that needs nothing but stable Rust: seeds, mutations that follow from a number, a clock.
//!
//! Owns the changing of bytes and the keeping of files that failed. Knows no format: targets are functions over bytes, in
//! `tests/`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Numbers that readers get wrong.
const NUMBERS: [u64; 16] = [
    0,
    1,
    2,
    7,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 40,
    u64::MAX / 2,
    u64::MAX / 8 + 1,
    u64::MAX,
];

/// Pieces of JSON that readers get wrong.
const WORDS: [&str; 20] = [
    "null",
    "true",
    "0",
    "-1",
    "1e400",
    "18446744073709551616",
    "1.5",
    "\"\"",
    "[]",
    "{}",
    "[[[[",
    "\"\\ud800\"",
    ",",
    ":",
    "}",
    "]",
    "\"",
    "\\u0000",
    "4294967296",
    "\"F8_E4M3\"",
];

/// A sequence of numbers that follows from its seed (xorshift).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// From 0 to `end` − 1; 0 if that is none.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end.max(1) as u64) as usize
    }
}

/// A seed with one to eight changes; `others` lend pieces. Never longer than twice the seed and a kilobyte.
#[must_use]
pub fn mutate(seed: &[u8], others: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..=random.below(8) {
        change(&mut bytes, others, random);
    }
    bytes.truncate(2 * seed.len() + 1024);
    bytes
}

fn change(bytes: &mut Vec<u8>, others: &[Vec<u8>], random: &mut Random) {
    // Headers are at the front: half of the changes are there.
    let reach = if random.below(2) == 0 { bytes.len().min(512) } else { bytes.len() };
    let at = random.below(reach);
    let length = (1 << random.below(7)).min(bytes.len() - at);
    match random.below(9) {
        0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
        1 if !bytes.is_empty() => bytes[at] = random.below(256) as u8,
        2 | 3 => {
            let width = [1, 2, 4, 8][random.below(4)];
            let number = NUMBERS[random.below(NUMBERS.len())].to_le_bytes();
            let end = bytes.len().min(at + width);
            bytes[at..end].copy_from_slice(&number[..end - at]);
        }
        4 => drop(bytes.drain(at..at + length)),
        5 => {
            let piece = bytes[at..at + length].to_vec();
            let to = random.below(bytes.len() + 1);
            bytes.splice(to..to, piece);
        }
        6 => {
            let word = WORDS[random.below(WORDS.len())].bytes();
            let end = if random.below(2) == 0 { at } else { token_end(bytes, at) };
            bytes.splice(at..end, word);
        }
        7 => {
            if let Some(other) = others.get(random.below(others.len())).filter(|other| !other.is_empty()) {
                let from = random.below(other.len());
                let piece = other[from..other.len().min(from + length)].to_vec();
                bytes.splice(at..at, piece);
            }
        }
        _ => bytes.truncate(random.below(bytes.len() + 1)),
    }
}

/// The end of the number or word at `at`.
fn token_end(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    at + rest.iter().position(|byte| !byte.is_ascii_alphanumeric() && !b"-._".contains(byte)).unwrap_or(rest.len())
}

/// All files of a folder, in the order of their names.
///
/// # Errors
/// What the system says.
pub fn corpus(folder: &Path) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<_>>()?;
    paths.sort();
    paths.retain(|path| path.is_file());
    paths.into_iter().map(|path| fs::read(&path).map(|bytes| (path, bytes))).collect()
}
