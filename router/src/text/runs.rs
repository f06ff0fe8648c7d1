//! Refuses text with extremely long runs of one kind of character.
//!
//! Tokenizers cut text into words by patterns with look-ahead, which a backtracking matcher runs with a limit on its
//! stack; where a run exceeds it, the matcher gives up silently and the rest of the prompt is tokenized wrongly. A
//! word of that length is also the only input on which merging is not linear. Real text never comes near.

use crate::error::ApiError;

/// Characters of one run. Below a quarter of the matcher's limits (a million), as a pattern may visit a character in
/// several alternatives.
pub const LONGEST_RUN: usize = 200_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Space,
    Letter,
    Digit,
    Other,
    /// Marks and the like, which patterns count to one class or another: they end no run.
    Joins,
}

fn kind(character: char) -> Kind {
    match character {
        'a'..='z' | 'A'..='Z' => Kind::Letter,
        '0'..='9' => Kind::Digit,
        ' ' | '\t' | '\n' | '\r' => Kind::Space,
        '\0'..='\x7f' | '\u{2000}'..='\u{206f}' | '\u{3000}'..='\u{303f}' | '\u{ff00}'..='\u{ff0f}' if !character.is_whitespace() => {
            Kind::Other
        }
        c if c.is_whitespace() => Kind::Space,
        c if c.is_alphabetic() => Kind::Letter,
        c if c.is_numeric() => Kind::Digit,
        _ => Kind::Joins,
    }
}

/// Checks a text.
///
/// # Errors
/// [`ApiError::Invalid`] if it has a run of more than [`LONGEST_RUN`] characters of one kind.
pub fn check(text: &str) -> Result<(), ApiError> {
    if text.len() <= LONGEST_RUN {
        return Ok(());
    }
    let (mut current, mut length) = (Kind::Joins, 0_usize);
    for character in text.chars() {
        let kind = kind(character);
        if kind == current || kind == Kind::Joins || current == Kind::Joins {
            length += 1;
            if current == Kind::Joins {
                current = kind;
            }
        } else {
            (current, length) = (kind, 1);
        }
        if length > LONGEST_RUN {
            let what = match current {
                Kind::Space => "white space",
                Kind::Letter => "letters",
                Kind::Digit => "digits",
                Kind::Other => "punctuation",
                Kind::Joins => "symbols",
            };
            return Err(ApiError::Invalid {
                message: format!("The text has more than {LONGEST_RUN} characters of {what} in a row, which can't be tokenized."),
                param: None,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_runs_are_refused() {
        for one in [" ", "a", "1", "!", "é", "\u{301}", "語", "\u{3000}"] {
            assert!(check(&one.repeat(LONGEST_RUN)).is_ok(), "{one}");
            assert!(check(&one.repeat(LONGEST_RUN + 1)).is_err(), "{one}");
        }
        assert!(check(&"word ".repeat(LONGEST_RUN)).is_ok());
        assert!(check(&"語。".repeat(LONGEST_RUN)).is_ok());
    }

    #[test]
    fn marks_do_not_end_a_run() {
        assert!(check(&"e\u{301}".repeat(LONGEST_RUN / 2 + 1)).is_err());
    }
}
