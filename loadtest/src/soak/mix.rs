//! What a soak asks: every kind of request that a server meets, the wrong ones included. Pure: request `i` of a seed is always the same.

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// A kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Whole,
    Stream,
    Choices,
    Logprobs,
    /// The client leaves after a few events.
    Leave,
    /// The client leaves at once, or a few milliseconds later.
    Hurry,
    Deadline,
    /// Refused with a 4xx.
    Wrong,
}

/// In parts of a hundred.
const MIX: [(Kind, u32); 8] = [
    (Kind::Whole, 30),
    (Kind::Stream, 26),
    (Kind::Choices, 8),
    (Kind::Logprobs, 6),
    (Kind::Leave, 11),
    (Kind::Hurry, 5),
    (Kind::Deadline, 6),
    (Kind::Wrong, 8),
];

/// Beginnings that requests share, so that the prefix cache has work.
const PREFIXES: usize = 12;
const PREFIX_WORDS: usize = 24;
const WORDS: [&str; 32] = [
    "once", "upon", "a", "time", "there", "was", "little", "girl", "named", "Lily", "she", "loved", "to", "play", "with", "her", "red",
    "ball", "in", "the", "park", "one", "day", "big", "dog", "came", "and", "said", "hello", "they", "were", "happy",
];

/// One request, and what the client does with it.
#[derive(Debug)]
pub struct Ask {
    pub kind: Kind,
    pub body: Bytes,
    /// Milliseconds for the server, as a header.
    pub deadline_ms: Option<u32>,
    /// Leave after so many events of the stream.
    pub leave_after: Option<u32>,
    /// Leave after so many milliseconds, whatever has come.
    pub hurry_ms: Option<u32>,
}

/// Request `index` of the mix.
#[must_use]
pub fn ask(model: &str, seed: u64, index: usize) -> Ask {
    let mut rng = StdRng::seed_from_u64(seed ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let kind = kind(rng.random_range(0..100));
    let mut body = Map::new();
    body.insert("model".into(), model.into());
    body.insert("prompt".into(), prompt(&mut rng).into());
    body.insert("max_tokens".into(), rng.random_range(1..=12).into());
    // Drawn and greedy; some draws are fixed, so that answers repeat.
    body.insert("temperature".into(), json!(if rng.random_bool(0.5) { 0.0 } else { 1.0 }));
    body.insert("seed".into(), rng.random_range(0..1_000).into());
    let mut ask = Ask { kind, body: Bytes::new(), deadline_ms: None, leave_after: None, hurry_ms: None };
    match kind {
        Kind::Whole => {}
        Kind::Stream => stream(&mut body, false),
        Kind::Choices => {
            body.insert("n".into(), rng.random_range(2..=4).into());
            if rng.random_bool(0.5) {
                stream(&mut body, false);
            }
        }
        Kind::Logprobs => {
            body.insert("logprobs".into(), rng.random_range(0..=3).into());
            body.insert("echo".into(), rng.random_bool(0.5).into());
        }
        Kind::Leave => {
            stream(&mut body, true);
            ask.leave_after = Some(rng.random_range(1..=4));
        }
        Kind::Hurry => {
            stream(&mut body, rng.random_bool(0.5));
            ask.hurry_ms = Some(rng.random_range(0..=8));
        }
        Kind::Deadline => {
            body.insert("max_tokens".into(), 48.into());
            ask.deadline_ms = Some(rng.random_range(1..=30));
        }
        Kind::Wrong => {
            ask.body = wrong(&mut rng, body);
            return ask;
        }
    }
    ask.body = Bytes::from(Value::Object(body).to_string());
    ask
}

fn kind(mut drawn: u32) -> Kind {
    for (kind, parts) in MIX {
        if drawn < parts {
            return kind;
        }
        drawn -= parts;
    }
    Kind::Whole
}

fn stream(body: &mut Map<String, Value>, long: bool) {
    body.insert("stream".into(), true.into());
    if long {
        body.insert("max_tokens".into(), 64.into());
        body.insert("ignore_eos".into(), true.into());
    }
}

fn prompt(rng: &mut StdRng) -> String {
    let words = |rng: &mut StdRng, count: usize| (0..count).map(|_| WORDS[rng.random_range(0..WORDS.len())]).collect::<Vec<_>>().join(" ");
    let tail = rng.random_range(1..=8);
    let tail = words(rng, tail);
    if rng.random_bool(0.4) {
        return tail;
    }
    let number = rng.random_range(0..PREFIXES);
    // Its own generator: the same words every time.
    format!("{} {tail}", words(&mut StdRng::seed_from_u64(number as u64), PREFIX_WORDS))
}

/// A body that must be refused.
fn wrong(rng: &mut StdRng, mut body: Map<String, Value>) -> Bytes {
    match rng.random_range(0..7) {
        0 => return Bytes::from_static(b"{\"prompt\": \"unfinished"),
        1 => body.insert("model".into(), "no-such-model".into()),
        2 => body.insert("temperature".into(), json!(9.5)),
        3 => body.insert("prompt".into(), json!([4_000_000_000_u32])),
        4 => body.insert("prompt".into(), "a ".repeat(50_000).into()),
        5 => body.insert("n".into(), json!(-1)),
        _ => body.insert("prompt".into(), Value::Null),
    };
    Bytes::from(Value::Object(body).to_string())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_request_is_a_function_of_seed_and_index_and_all_kinds_come() {
        assert_eq!(MIX.iter().map(|(_, parts)| parts).sum::<u32>(), 100);
        let mut seen: BTreeMap<Kind, usize> = BTreeMap::new();
        for index in 0..2_000 {
            let (one, two) = (ask("m", 7, index), ask("m", 7, index));
            assert_eq!(one.body, two.body);
            *seen.entry(one.kind).or_default() += 1;
        }
        assert_eq!(seen.len(), MIX.len());
        for (kind, parts) in MIX {
            let expected = parts as usize * 20;
            assert!(seen[&kind].abs_diff(expected) < expected / 2, "{kind:?}: {} of {expected}", seen[&kind]);
        }
        assert_ne!(ask("m", 7, 1).body, ask("m", 8, 1).body);
    }
}
