//! The texts of special tokens, found in a text in one pass: each place is looked at for no longer than it agrees with
//! some token, so neither the number of tokens nor the text can make it slow.

use std::collections::HashMap;

/// A set of texts.
#[derive(Clone, Debug, Default)]
pub struct SpecialTexts {
    /// From a node by a byte to the next; node 0 is the beginning.
    steps: HashMap<(u32, u8), u32>,
    /// The text that ends at a node, by its number.
    ends: Vec<Option<u32>>,
}

impl SpecialTexts {
    /// Empty texts are left out.
    #[must_use]
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        let mut set = Self { steps: HashMap::new(), ends: vec![None] };
        for (number, text) in texts.into_iter().enumerate().filter(|(_, text)| !text.is_empty()) {
            let mut node = 0;
            for &byte in text.as_bytes() {
                let next = set.ends.len() as u32;
                node = *set.steps.entry((node, byte)).or_insert(next);
                if node == next {
                    set.ends.push(None);
                }
            }
            set.ends[node as usize].get_or_insert(number as u32);
        }
        set
    }

    /// The longest text that `rest` starts with: its number and its length.
    #[must_use]
    pub fn longest(&self, rest: &[u8]) -> Option<(u32, usize)> {
        let (mut node, mut found) = (0, None);
        for (at, &byte) in rest.iter().enumerate() {
            let Some(&next) = self.steps.get(&(node, byte)) else { break };
            node = next;
            if let Some(number) = self.ends[node as usize] {
                found = Some((number, at + 1));
            }
        }
        found
    }

    /// Whether `rest` starts with one of the texts, or is the beginning of one.
    #[must_use]
    pub fn begins(&self, rest: &[u8]) -> bool {
        let mut node = 0;
        for &byte in rest {
            let Some(&next) = self.steps.get(&(node, byte)) else { return false };
            node = next;
            if self.ends[node as usize].is_some() {
                return true;
            }
        }
        node != 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn equals_a_comparison_with_each(texts in prop::collection::vec("[ab<é]{1,4}", 0..6), text in "[ab<é]{0,12}") {
            let set = SpecialTexts::new(texts.iter().map(String::as_str));
            for (at, _) in text.char_indices() {
                let rest = &text[at..];
                let longest = texts.iter().filter(|t| rest.starts_with(t.as_str())).map(String::len).max();
                let found = set.longest(rest.as_bytes());
                prop_assert_eq!(found.map(|(_, length)| length), longest);
                if let Some((number, length)) = found {
                    prop_assert_eq!(texts[number as usize].as_str(), &rest[..length]);
                }
                let begins = texts.iter().any(|t| rest.starts_with(t.as_str()) || t.starts_with(rest));
                prop_assert_eq!(set.begins(rest.as_bytes()), begins);
            }
        }
    }
}
