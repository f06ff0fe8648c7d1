//! SentencePiece's compiled normalisation rules (`precompiled_charsmap`): a double array over bytes whose leaves point to
//! replacement texts.
//!
//! The library that applies them trusts its input: a table that leads outside itself would end a request in a panic. So
//! every place that can be reached is checked here, once, when a model is loaded.

use serde_json::{Value, json};

/// Largest table that is read: four times the largest known.
const LARGEST: usize = 4 << 20;

/// The normaliser as `tokenizer.json` has it.
pub(super) fn as_json(charsmap: &[u8]) -> serde_json::Result<Value> {
    Ok(json!({"type": "Precompiled", "precompiled_charsmap": base64(charsmap)}))
}

/// Checks a table: the length of the double array in bytes (u32), its units (u32 each), the texts, each ended by a zero.
///
/// # Errors
/// What is wrong with it.
pub(super) fn check(charsmap: &[u8]) -> Result<(), String> {
    if charsmap.len() > LARGEST {
        return Err(format!("has {} bytes; at most {LARGEST} are read", charsmap.len()));
    }
    let word = |at: usize| charsmap.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes);
    let length = word(0).ok_or("is cut short")? as usize;
    if !length.is_multiple_of(4) || length == 0 || charsmap.len() < 4 + length {
        return Err(format!("says that its table has {length} bytes"));
    }
    let texts = std::str::from_utf8(&charsmap[4 + length..]).map_err(|_| "has replacements that are not UTF-8")?;
    let units: Vec<u32> = (0..length / 4).filter_map(|index| word(4 + index * 4)).collect();
    let outside = || "leads outside its table".to_owned();
    // A unit: label in the low byte, bit 8: a leaf hangs on it, bits 10 up: how far the children are, times 256 with bit 9.
    let offset = |unit: u32| ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize;
    let root = offset(*units.first().ok_or_else(outside)?);
    let mut seen = vec![false; units.len()];
    let mut open = vec![root];
    while let Some(base) = open.pop() {
        if (base | 0xff) >= units.len() {
            return Err(outside());
        }
        if std::mem::replace(&mut seen[base], true) {
            continue;
        }
        for label in 1..=0xff_usize {
            let at = base ^ label;
            let unit = units[at];
            if unit & (1 << 31 | 0xff) != label as u32 {
                continue;
            }
            let next = at ^ offset(unit);
            if unit & (1 << 8) != 0 {
                let text = (units.get(next).ok_or_else(outside)? & !(1 << 31)) as usize;
                if !texts.is_char_boundary(text) {
                    return Err("has a leaf that points outside its replacements".to_owned());
                }
            }
            open.push(next);
        }
    }
    Ok(())
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().chain([&0; 3]).take(3).fold(0_u32, |word, byte| word << 8 | u32::from(*byte));
        for place in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * place)) as usize & 63];
            out.push(if place <= chunk.len() { digit as char } else { '=' });
        }
    }
    out
}

/// The bytes of base 64 text.
pub(super) fn from_base64(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let text = text.trim_end_matches('=').as_bytes();
    let mut out = Vec::with_capacity(text.len() * 3 / 4);
    for chunk in text.chunks(4) {
        let mut word = 0_u32;
        for &byte in chunk {
            word = word << 6 | u32::from(digit(byte)?);
        }
        word <<= 6 * (4 - chunk.len());
        let bytes = word.to_be_bytes();
        out.extend_from_slice(bytes.get(1..chunk.len())?);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of one rule: byte `a` becomes `texts`.
    fn table(leaf_value: u32, texts: &[u8]) -> Vec<u8> {
        let mut units = vec![0_u32; 512];
        units[0] = 256 << 10;
        let at = 256 ^ b'a' as usize;
        // Its children begin at 256 too, so that the leaf is unit 256.
        units[at] = u32::from(b'a') | 1 << 8 | ((at as u32 ^ 256) << 10);
        units[256] = leaf_value | 1 << 31;
        let mut bytes = (units.len() as u32 * 4).to_le_bytes().to_vec();
        units.iter().for_each(|unit| bytes.extend(unit.to_le_bytes()));
        bytes.extend(texts);
        bytes
    }

    #[test]
    fn sound_tables_pass_and_do_what_they_say() {
        let sound = table(0, "é\0".as_bytes());
        check(&sound).unwrap();
        let normalizer: tokenizers::NormalizerWrapper = serde_json::from_value(as_json(&sound).unwrap()).unwrap();
        let mut text = tokenizers::NormalizedString::from("bad");
        tokenizers::Normalizer::normalize(&normalizer, &mut text).unwrap();
        assert_eq!(text.get(), "béd");
        assert_eq!(from_base64(&base64(&sound)).unwrap(), sound);
    }

    #[test]
    fn tables_that_lead_outside_are_refused() {
        for (bytes, why) in [
            (vec![1, 2], "cut short"),
            (vec![8, 0, 0, 0, 1], "says that"),
            (table(900, b"x\0"), "outside its replacements"),
            (table(1, "é\0".as_bytes()), "outside its replacements"),
            (table(0, &[0xff]), "not UTF-8"),
        ] {
            assert!(check(&bytes).unwrap_err().contains(why), "{why}");
        }
        let mut far = table(0, b"x\0");
        far[4..8].copy_from_slice(&((1_u32 << 20) << 10 | 1 << 9).to_le_bytes());
        assert!(check(&far).unwrap_err().contains("outside its table"));
    }

    #[test]
    fn base_64_is_undone() {
        for length in 0..20 {
            let bytes: Vec<u8> = (0..length).map(|i| (i * 37 + 200) as u8).collect();
            assert_eq!(from_base64(&base64(&bytes)).unwrap(), bytes);
        }
        assert_eq!(base64(b"ab"), "YWI=");
        assert_eq!(from_base64("a?"), None);
    }
}
