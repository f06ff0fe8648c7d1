//! What each token is as bytes, and how a tokenizer's decoder joins them. Built once from `tokenizer.json`.
//!
//! Byte-level and sentencepiece-like decoders (all that generating models use) are reduced to a table of bytes, so that
//! decoding a token costs a look-up. Anything else is decoded by the tokenizer itself, over a window.

use serde_json::Value;
use tokenizers::Tokenizer;

/// How the text of a sequence follows from its tokens' bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joining {
    /// Bytes one after another; of the whole text, this many leading spaces are dropped.
    Bytes { strip: usize },
    /// As `Bytes`, and the first token loses all its spaces.
    BytesFirstTokenBare,
    /// Only the tokenizer's decoder knows.
    Window,
}

/// Control tokens that stay in the text that a model writes.
const FRAMING: [&str; 3] = ["<|start|>", "<|channel|>", "<|message|>"];

/// Bytes of every token.
pub(super) struct Vocabulary {
    bytes: Vec<u8>,
    /// Where token `i` ends in `bytes`; it starts where `i - 1` ends.
    ends: Vec<u32>,
    special: Vec<bool>,
    pub joining: Joining,
    /// Bytes of the longest token.
    pub longest: usize,
}

/// A step of a decoder, as far as a table can express it.
enum Step {
    ByteLevel,
    Replace(String, String),
    ByteFallback,
    Fuse,
    Strip(usize),
    Metaspace { replacement: String, strips: bool },
    Other,
}

impl Vocabulary {
    pub fn new(tokenizer: &Tokenizer) -> Self {
        let decoder = tokenizer.get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok()).unwrap_or(Value::Null);
        let mut steps = Vec::new();
        flatten(&decoder, &mut steps);
        let joining = joining(&steps);
        let added = tokenizer.get_added_vocabulary();
        let size = tokenizer.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        // They frame the messages of gpt-oss: control, and yet what a reader must see to tell thoughts from an answer.
        let framed = FRAMING.iter().all(|text| tokenizer.token_to_id(text).is_some());
        let mut table = Self { bytes: Vec::new(), ends: Vec::with_capacity(size), special: Vec::with_capacity(size), joining, longest: 1 };
        for id in 0..size as u32 {
            // Added tokens may be kept in another form for decoding.
            let token = added.simple_id_to_token(id).or_else(|| tokenizer.id_to_token(id)).unwrap_or_default();
            let start = table.bytes.len();
            match joining {
                Joining::Window => table.bytes.extend_from_slice(token.as_bytes()),
                _ => append(&steps, &token, &mut table.bytes),
            }
            table.longest = table.longest.max(table.bytes.len() - start);
            table.ends.push(table.bytes.len() as u32);
            table.special.push(added.is_special_token(&token) && !(framed && FRAMING.contains(&token.as_str())));
        }
        table
    }

    /// Bytes of a token; none for an id that the tokenizer doesn't know.
    pub fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// One more than the largest id.
    pub fn len(&self) -> usize {
        self.ends.len()
    }
}

fn flatten(decoder: &Value, steps: &mut Vec<Step>) {
    let text = |key: &str| decoder.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let number = |key: &str| decoder.get(key).and_then(Value::as_u64).unwrap_or(0) as usize;
    match decoder.get("type").and_then(Value::as_str) {
        Some("Sequence") => decoder.get("decoders").and_then(Value::as_array).into_iter().flatten().for_each(|d| flatten(d, steps)),
        Some("ByteLevel") => steps.push(Step::ByteLevel),
        Some("ByteFallback") => steps.push(Step::ByteFallback),
        Some("Fuse") => steps.push(Step::Fuse),
        Some("Strip") if text("content") == " " && number("stop") == 0 => steps.push(Step::Strip(number("start"))),
        Some("Replace") => steps.push(match decoder.pointer("/pattern/String").and_then(Value::as_str) {
            Some(pattern) => Step::Replace(pattern.to_owned(), text("content")),
            None => Step::Other,
        }),
        Some("Metaspace") => steps.push(Step::Metaspace {
            replacement: text("replacement"),
            strips: text("prepend_scheme") != "never" && decoder.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(true),
        }),
        _ => steps.push(Step::Other),
    }
}

/// Whether a table can express the steps, and how.
fn joining(steps: &[Step]) -> Joining {
    let (mut fused, mut strip, mut bare) = (false, 0, false);
    for (at, step) in steps.iter().enumerate() {
        match step {
            // Joins everything into one string: what follows would see the whole text.
            Step::ByteLevel if steps[at + 1..].iter().all(|s| matches!(s, Step::Fuse)) => fused = true,
            Step::Fuse => fused = true,
            Step::Strip(n) if fused => strip += n,
            Step::Metaspace { strips, .. } if !fused => bare |= strips,
            Step::Replace(..) | Step::ByteFallback if !fused => {}
            _ => return Joining::Window,
        }
    }
    match (steps.is_empty(), bare) {
        (true, _) => Joining::Window,
        (_, true) if strip == 0 => Joining::BytesFirstTokenBare,
        (_, true) => Joining::Window,
        _ => Joining::Bytes { strip },
    }
}

fn append(steps: &[Step], token: &str, out: &mut Vec<u8>) {
    let mut text = token.to_owned();
    for step in steps {
        match step {
            Step::ByteLevel => {
                let start = out.len();
                for character in text.chars() {
                    match byte_of(character) {
                        Some(byte) => out.push(byte),
                        None => {
                            out.truncate(start);
                            out.extend_from_slice(text.as_bytes());
                            return;
                        }
                    }
                }
                return;
            }
            Step::Replace(from, to) => text = text.replace(from.as_str(), to),
            Step::Metaspace { replacement, .. } => text = text.replace(replacement.as_str(), " "),
            Step::ByteFallback => {
                let byte = text.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).filter(|t| t.len() == 2);
                if let Some(byte) = byte.and_then(|byte| u8::from_str_radix(byte, 16).ok()) {
                    out.push(byte);
                    return;
                }
            }
            Step::Fuse | Step::Strip(_) | Step::Other => {}
        }
    }
    out.extend_from_slice(text.as_bytes());
}

/// The byte that a character stands for in byte-level vocabularies (GPT-2's table): printable Latin-1 stands for itself,
/// the other 68 bytes are U+0100 upwards in order.
fn byte_of(character: char) -> Option<u8> {
    let code = character as u32;
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_table_is_a_bijection() {
        let mut seen = [false; 256];
        for code in 0..0x400 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of) {
                assert!(!seen[byte as usize], "{byte:#x} twice");
                seen[byte as usize] = true;
            }
        }
        assert!(seen.iter().all(|&s| s));
        assert_eq!((byte_of('Ġ'), byte_of('Ċ'), byte_of('ł'), byte_of('Ń')), (Some(b' '), Some(b'\n'), Some(0xa0), Some(0xad)));
    }
}
