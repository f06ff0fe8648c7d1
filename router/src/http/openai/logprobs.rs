//! Log-probabilities in the three shapes that clients know: chat, completions, and vLLM's `prompt_logprobs`.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::request::TokenLogprob;

/// JSON has no infinity; OpenAI writes this for "impossible".
const FLOOR: f32 = -9999.0;

/// `logprobs` of a chat choice.
#[derive(Clone, Debug, Serialize)]
pub struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<()>,
}

#[derive(Clone, Debug, Serialize)]
struct ChatToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<ChatTop>,
}

#[derive(Clone, Debug, Serialize)]
struct ChatTop {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// Tokens of a chat choice; `as_ids` names them `token_id:N`.
pub fn chat(tokens: &[TokenLogprob], as_ids: bool) -> ChatLogprobs {
    let name = |token: &TokenLogprob| if as_ids { id_name(token) } else { String::from_utf8_lossy(&token.bytes).into_owned() };
    let content = tokens
        .iter()
        .map(|token| ChatToken {
            token: name(token),
            logprob: value(token),
            bytes: token.bytes.clone(),
            top_logprobs: token.top.iter().map(|top| ChatTop { token: name(top), logprob: value(top), bytes: top.bytes.clone() }).collect(),
        })
        .collect();
    ChatLogprobs { content, refusal: None }
}

/// `logprobs` of a completions choice.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
}

/// Tokens of a completions choice. `offset` counts the characters before the next token, and goes on with it.
pub fn text(tokens: &[TokenLogprob], offset: &mut usize, as_ids: bool) -> TextLogprobs {
    let name = |token: &TokenLogprob| if as_ids { id_name(token) } else { text_name(&token.bytes) };
    let mut out = TextLogprobs::default();
    for token in tokens {
        out.text_offset.push(*offset);
        *offset += characters(&token.bytes);
        out.tokens.push(name(token));
        out.token_logprobs.push(token.logprob.map(|logprob| logprob.max(FLOOR)));
        // The likeliest, and the token itself if it isn't among them.
        out.top_logprobs.push(token.logprob.map(|_| {
            let mut entries: Map<String, Value> = token.top.iter().map(|top| (name(top), json!(value(top)))).collect();
            entries.entry(name(token)).or_insert_with(|| json!(value(token)));
            entries
        }));
    }
    out
}

/// vLLM's `prompt_logprobs`: one object a token, by token id; null for the first.
pub fn prompt(tokens: &[TokenLogprob]) -> Value {
    let entry = |token: &TokenLogprob, rank: Option<usize>| json!({"logprob": value(token), "rank": rank, "decoded_token": String::from_utf8_lossy(&token.bytes)});
    let object = |token: &TokenLogprob| {
        token.logprob.map_or(Value::Null, |_| {
            let mut entries = Map::new();
            for (index, top) in token.top.iter().enumerate() {
                entries.insert(top.id.to_string(), entry(top, Some(index + 1)));
            }
            // Its rank is not known unless it is among the likeliest.
            entries.entry(token.id.to_string()).or_insert_with(|| entry(token, None));
            Value::Object(entries)
        })
    };
    Value::Array(tokens.iter().map(object).collect())
}

fn value(token: &TokenLogprob) -> f32 {
    token.logprob.unwrap_or(FLOOR).max(FLOOR)
}

fn id_name(token: &TokenLogprob) -> String {
    format!("token_id:{}", token.id)
}

/// Parts of characters are spelled out, so that two of them don't share a name.
fn text_name(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |name, byte| format!("{name}\\x{byte:02x}")),
    }
}

/// Characters that begin within `bytes`.
pub fn characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| byte & 0xC0 != 0x80).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: u32, bytes: &[u8], logprob: Option<f32>, top: Vec<TokenLogprob>) -> TokenLogprob {
        TokenLogprob { id, bytes: bytes.to_vec(), logprob, top }
    }

    #[test]
    fn chat_entries_have_bytes_and_exactly_the_top() {
        let tokens = [token(1, "é".as_bytes(), Some(-0.5), vec![token(2, b"a", Some(-0.25), vec![])])];
        let json = serde_json::to_value(chat(&tokens, false)).unwrap();
        let expected = json!({"content": [{"token": "é", "logprob": -0.5, "bytes": [195, 169],
            "top_logprobs": [{"token": "a", "logprob": -0.25, "bytes": [97]}]}], "refusal": null});
        assert_eq!(json, expected);
        assert_eq!(serde_json::to_value(chat(&tokens, true)).unwrap()["content"][0]["token"], "token_id:1");
    }

    #[test]
    fn text_offsets_count_characters_over_split_tokens() {
        let tokens = [
            token(1, b"ab", None, vec![]),
            token(2, &[0xC3], Some(-1.0), vec![token(9, b"z", Some(-0.5), vec![])]),
            token(3, &[0xA9], Some(f32::NEG_INFINITY), vec![]),
            token(4, b"!", Some(-2.0), vec![]),
        ];
        let mut offset = 10;
        let json = serde_json::to_value(text(&tokens, &mut offset, false)).unwrap();
        assert_eq!(json["text_offset"], json!([10, 12, 13, 13]));
        assert_eq!(offset, 14);
        assert_eq!(json["tokens"], json!(["ab", "bytes:\\xc3", "bytes:\\xa9", "!"]));
        assert_eq!(json["token_logprobs"], json!([null, -1.0, -9999.0, -2.0]));
        assert_eq!(json["top_logprobs"][0], Value::Null);
        assert_eq!(json["top_logprobs"][1], json!({"z": -0.5, "bytes:\\xc3": -1.0}));
    }

    #[test]
    fn prompt_logprobs_go_by_id() {
        let tokens = [token(7, b"a", None, vec![]), token(8, b"b", Some(-3.0), vec![token(9, b"c", Some(-0.5), vec![])])];
        let json = prompt(&tokens);
        assert_eq!(json[0], Value::Null);
        assert_eq!(json[1]["9"], json!({"logprob": -0.5, "rank": 1, "decoded_token": "c"}));
        assert_eq!(json[1]["8"]["rank"], Value::Null);
    }
}
