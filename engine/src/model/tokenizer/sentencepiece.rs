//! SentencePiece scores → ranked merges.
//!
//! SentencePiece joins the neighbours whose joint piece has the highest score, the leftmost of equals. Ranked merges do
//! the same: every way to split a piece into two others becomes a merge, ranked by the score of the piece. Only where
//! the same piece can be made in two ways at two places at once may the order differ, as in every converter to this form.

use super::vocabulary::{TokenType, Vocabulary};

/// Merges, first ones first.
pub(super) fn merges<'v>(vocabulary: &'v Vocabulary<'_>, scores: &[f32]) -> Vec<(&'v str, &'v str)> {
    let piece = |text: &str| {
        let id = *vocabulary.ids.get(text)? as usize;
        matches!(vocabulary.types.get(id), Some(TokenType::Normal | TokenType::UserDefined | TokenType::Unused)).then(|| scores[id])
    };
    let mut ranked = Vec::new();
    for (id, text) in vocabulary.tokens.iter().enumerate() {
        if !matches!(vocabulary.types.get(id), Some(TokenType::Normal)) {
            continue;
        }
        let start = ranked.len();
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(left_score), Some(right_score)) = (piece(left), piece(right)) {
                ranked.push((scores[id], left_score, right_score, left, right));
            }
        }
        // Of the ways to make one piece, the one of the likelier parts first.
        ranked[start..].sort_by(|a, b| b.1.total_cmp(&a.1).then(b.2.total_cmp(&a.2)));
    }
    // Stable: equal pieces stay in order of id.
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
    ranked.into_iter().map(|(.., left, right)| (left, right)).collect()
}

/// Merges of a vocabulary whose tokens join in the order of their ids (tiktoken's form): every way to split a token into
/// two others, ranked by the token's id; of several ways, the earlier parts first.
pub(super) fn merges_by_id<'v>(vocabulary: &'v Vocabulary<'_>) -> Vec<(&'v str, &'v str)> {
    let mut ranked = Vec::new();
    for (id, text) in vocabulary.tokens.iter().enumerate() {
        if !matches!(vocabulary.types.get(id), Some(TokenType::Normal)) {
            continue;
        }
        let start = ranked.len();
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(&a), Some(&b)) = (vocabulary.ids.get(left), vocabulary.ids.get(right)) {
                ranked.push((a, b, left, right));
            }
        }
        ranked[start..].sort_by_key(|&(a, b, ..)| (a, b));
    }
    ranked.into_iter().map(|(.., left, right)| (left, right)).collect()
}
