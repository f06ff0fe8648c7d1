//! How much text makes a token, by the server's own count: two probes of different size give characters per token and the tokens that
//! every request costs beside its text (template, BOS, the serial number). No tokenizer is loaded here.

use crate::Error;
use crate::client::Target;
use crate::prompt::{MAX_REQUESTS, Prompts};
use crate::stream::Failure;

/// A measured line: `tokens = overhead + characters / chars_per_token`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Calibration {
    pub chars_per_token: f64,
    /// Tokens of a prompt without body.
    pub overhead_tokens: f64,
    /// False: the server reports no usage and the line is a guess for English.
    pub measured: bool,
}

/// Usual for English text and large vocabularies.
const GUESS: Calibration = Calibration { chars_per_token: 4.5, overhead_tokens: 4.0, measured: false };
/// Requests that [`calibrate`] sends at most.
pub const PROBES: usize = 2;
const SHORT_CHARS: usize = 200;
const LONG_CHARS: std::ops::RangeInclusive<usize> = 800..=4_000;

impl Calibration {
    /// The line through two points of (characters, tokens). A server that reports nonsense gets the guess.
    pub fn through(short: (usize, u64), long: (usize, u64)) -> Calibration {
        let chars = long.0 as f64 - short.0 as f64;
        let tokens = long.1 as f64 - short.1 as f64;
        let chars_per_token = chars / tokens;
        if chars <= 0.0 || !(0.2..=50.0).contains(&chars_per_token) {
            return GUESS;
        }
        let overhead_tokens = (short.1 as f64 - short.0 as f64 / chars_per_token).max(0.0);
        Calibration { chars_per_token, overhead_tokens, measured: true }
    }

    /// Characters of body for a prompt of `tokens` in all, beside `shared` tokens of shared text.
    pub fn body_chars(&self, tokens: u32) -> usize {
        ((f64::from(tokens) - self.overhead_tokens).max(0.0) * self.chars_per_token).round() as usize
    }

    /// Characters that make `tokens` when added to a prompt.
    pub fn chars(&self, tokens: u32) -> usize {
        (f64::from(tokens) * self.chars_per_token).round() as usize
    }
}

/// Asks the server for one token each after two prompts. The first must succeed; without it a run would be all failures.
/// `tokens` is the prompt length wanted: the longer probe is about as long, so that the line is measured where it is used.
pub async fn calibrate(target: &Target, prompts: &Prompts, tokens: u32) -> Result<Calibration, Error> {
    let probe = async |index: usize, chars: usize| {
        let prompt = prompts.alone(MAX_REQUESTS + index, chars);
        // The serial number and its space are overhead; the text itself ends at a word border.
        let chars = prompt.len() - 7;
        let outcome = target.send(target.body(prompt, Some(1))).await;
        (chars, outcome)
    };
    let (short_chars, short) = probe(0, SHORT_CHARS).await;
    if let Err(failure) = &short.result
        // One token that is no text is an answer too.
        && *failure != Failure::Empty
    {
        return Err(Error::FirstRequest(format!("{}: {}", failure.kind(), failure.detail())));
    }
    let Some(short) = short.usage.filter(|usage| usage.prompt > 0) else { return Ok(GUESS) };
    let wanted = (f64::from(tokens) * GUESS.chars_per_token) as usize;
    let (long_chars, long) = probe(1, wanted.clamp(*LONG_CHARS.start(), *LONG_CHARS.end())).await;
    Ok(match long.usage {
        Some(long) => Calibration::through((short_chars, short.prompt), (long_chars, long.prompt)),
        // Too long for the model's context: one point and no overhead.
        None => Calibration::through((0, 0), (short_chars, short.prompt)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_gives_back_the_length_asked_for() {
        // 4 characters a token and 30 tokens of template.
        let line = Calibration::through((200, 80), (2_000, 530));
        assert!((line.chars_per_token - 4.0).abs() < 1e-9 && (line.overhead_tokens - 30.0).abs() < 1e-9 && line.measured);
        assert_eq!(line.body_chars(130), 400);
        assert_eq!(line.chars(1_000), 4_000);
        assert_eq!(line.body_chars(10), 0);
    }

    #[test]
    fn nonsense_counts_are_not_believed() {
        assert!(!Calibration::through((200, 50), (2_000, 50)).measured);
        assert!(!Calibration::through((200, 50), (2_000, 40)).measured);
        assert!(!Calibration::through((200, 50), (200, 50)).measured);
        assert!(!Calibration::through((200, 0), (2_000, 1)).measured);
    }
}
