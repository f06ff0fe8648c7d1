//! Which text of a rendered prompt came from a client and could be taken for control.
//!
//! Wrapping each content in brackets would change what templates see (`content.strip()`, `startswith`), so only what could
//! be taken for control is touched: within every string that a client sent, one private character goes in after the first
//! character of each special token's text, and after an unfinished one at the string's end. After rendering the private
//! characters are removed and their places kept: a special token may not span one of them.

use serde_json::Value as Json;

use super::specials::SpecialTexts;
use crate::error::ApiError;

/// What an assistant thinks stands between these, which are no control: templates look for them themselves.
const THOUGHTS: [&str; 2] = ["<think>", "</think>"];

/// The texts that must not pass for control within what a client sent.
#[derive(Clone, Debug, Default)]
pub struct Guarded {
    all: SpecialTexts,
    /// Within what an assistant said.
    said: SpecialTexts,
}

impl Guarded {
    #[must_use]
    pub fn new(texts: &[String]) -> Self {
        let texts = || texts.iter().map(String::as_str);
        Self { all: SpecialTexts::new(texts()), said: SpecialTexts::new(texts().filter(|text| !THOUGHTS.contains(text))) }
    }

    /// Where marks go in one string.
    fn places<'t>(&'t self, text: &'t str, assistant: bool) -> impl Iterator<Item = usize> + 't {
        let set = if assistant { &self.said } else { &self.all };
        text.char_indices().filter(|(at, _)| set.begins(&text.as_bytes()[*at..])).map(|(at, first)| at + first.len_utf8())
    }
}

/// Puts marks into what came from a client, and finds them again.
pub(super) struct Marker<'a> {
    guarded: &'a Guarded,
    sign: char,
}

impl<'a> Marker<'a> {
    /// None if nothing in the variables could be taken for control, which is nearly always.
    pub fn new(variables: &Json, guarded: &'a Guarded) -> Result<Option<Self>, ApiError> {
        let mut needed = false;
        each_string(variables, &mut |text| needed = needed || guarded.places(text, false).next().is_some());
        if !needed {
            return Ok(None);
        }
        Ok(Some(Self { guarded, sign: free_sign(variables)? }))
    }

    pub fn mark(&self, value: &mut Json, assistant: bool) {
        match value {
            Json::String(text) => {
                let places: Vec<usize> = self.guarded.places(text, assistant).collect();
                if places.is_empty() {
                    return;
                }
                let mut marked = String::with_capacity(text.len() + places.len() * self.sign.len_utf8());
                let mut from = 0;
                for place in places {
                    marked.push_str(&text[from..place]);
                    marked.push(self.sign);
                    from = place;
                }
                marked.push_str(&text[from..]);
                *text = marked;
            }
            Json::Array(items) => items.iter_mut().for_each(|item| self.mark(item, assistant)),
            Json::Object(map) => {
                let assistant = assistant || map.get("role").and_then(Json::as_str) == Some("assistant");
                *map = std::mem::take(map)
                    .into_iter()
                    .map(|(key, mut value)| {
                        self.mark(&mut value, assistant);
                        let mut key = Json::String(key);
                        self.mark(&mut key, assistant);
                        (key.as_str().unwrap_or_default().to_owned(), value)
                    })
                    .collect();
            }
            _ => {}
        }
    }

    /// The text without marks, and where they were (byte offsets, ascending).
    pub fn unmark(&self, marked: &str) -> (String, Vec<usize>) {
        let (mut text, mut marks) = (String::with_capacity(marked.len()), Vec::new());
        for (index, piece) in marked.split(self.sign).enumerate() {
            if index > 0 {
                marks.push(text.len());
            }
            text.push_str(piece);
        }
        (text, marks)
    }
}

/// A character that no string has: noncharacters are of no use in text.
pub(super) fn free_sign(variables: &Json) -> Result<char, ApiError> {
    let mut taken = [false; 32];
    each_string(variables, &mut |text| {
        for character in text.chars().filter(|character| ('\u{fdd0}'..='\u{fdef}').contains(character)) {
            taken[character as usize - 0xfdd0] = true;
        }
    });
    let free = taken.iter().position(|taken| !taken).and_then(|at| char::from_u32(0xfdd0 + at as u32));
    free.ok_or_else(|| ApiError::invalid("messages", "The messages hold all Unicode noncharacters from U+FDD0 to U+FDEF."))
}

fn each_string(value: &Json, visit: &mut impl FnMut(&str)) {
    match value {
        Json::String(text) => visit(text),
        Json::Array(items) => items.iter().for_each(|item| each_string(item, visit)),
        Json::Object(map) => map.iter().for_each(|(key, value)| {
            visit(key);
            each_string(value, visit);
        }),
        _ => {}
    }
}

/// Bytes of all strings in a message's value: what a template can put into a prompt.
pub fn text_bytes(value: &Json) -> usize {
    let mut bytes = 0;
    each_string(value, &mut |text| bytes += text.len());
    bytes
}
