//! Ids to text, one at a time: only complete characters come out, and all that came out, joined, is what decoding all
//! ids at once gives.
//!
//! Owns the bytes of an unfinished character. Costs a table look-up a token, whatever came before.
//!
//! One difference from decoding at once is deliberate: sentencepiece-like decoders look at a whole run of byte tokens and,
//! if any part of it is broken, replace every byte of it. A stream can't take back the good characters that it sent, so
//! here only the broken bytes are replaced.

use std::sync::Arc;

use super::tokenizer::Tokenizer;
use super::vocabulary::Joining;

/// Prompt ids by which a window decoder is primed.
const WINDOW_PRIME: usize = 6;

/// Decodes one sequence.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Special tokens whose text is shown all the same.
    kept: Vec<u32>,
    state: State,
}

enum State {
    Bytes { characters: Characters, start: Start },
    Window(Window),
}

/// What is left to drop at the beginning of a text.
enum Start {
    Strip(usize),
    FirstTokenBare,
    Past,
}

impl Detokenizer {
    /// For what follows `prompt`: whether a leading space belongs to the text depends on there being something before.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[u32], skip_special: bool) -> Self {
        let vocabulary = &tokenizer.vocabulary;
        let visible = |id: &&u32| !(vocabulary.bytes(**id).is_empty() || (skip_special && vocabulary.is_special(**id)));
        let after_text = prompt.iter().rev().find(visible).is_some();
        let start = match vocabulary.joining {
            _ if after_text => Start::Past,
            Joining::Bytes { strip: 0 } => Start::Past,
            Joining::Bytes { strip } => Start::Strip(strip),
            Joining::BytesFirstTokenBare => Start::FirstTokenBare,
            Joining::Window => Start::Past,
        };
        let state = match vocabulary.joining {
            Joining::Window => State::Window(Window::new(&tokenizer, &prompt[prompt.len().saturating_sub(WINDOW_PRIME)..], skip_special)),
            _ => {
                let mut characters = Characters::default();
                // A prompt given as ids may end within a character.
                let mut ignored = String::new();
                for &id in &prompt[prompt.len().saturating_sub(4)..] {
                    if !(skip_special && vocabulary.is_special(id)) {
                        characters.push(vocabulary.bytes(id), &mut ignored);
                    }
                }
                characters.foreign = characters.length;
                State::Bytes { characters, start }
            }
        };
        Self { tokenizer, skip_special, kept: Vec::new(), state }
    }

    /// Shows the text of these special tokens, whatever is skipped. (Not with a decoder that only knows whole texts.)
    #[must_use]
    pub fn keeping(mut self, ids: &[u32]) -> Self {
        self.kept = ids.to_vec();
        self
    }

    /// Appends the text that `id` completes.
    pub fn push(&mut self, id: u32, out: &mut String) {
        let vocabulary = &self.tokenizer.vocabulary;
        if self.skip_special && vocabulary.is_special(id) && !self.kept.contains(&id) {
            return;
        }
        match &mut self.state {
            State::Window(window) => window.push(&self.tokenizer, id, self.skip_special, out),
            State::Bytes { characters, start } => {
                let mut bytes = vocabulary.bytes(id);
                match start {
                    Start::Past => {}
                    Start::Strip(left) => {
                        while *left > 0 && bytes.first() == Some(&b' ') {
                            bytes = &bytes[1..];
                            *left -= 1;
                        }
                        if !bytes.is_empty() || *left == 0 {
                            *start = Start::Past;
                        }
                    }
                    Start::FirstTokenBare => {
                        *start = Start::Past;
                        let bare: Vec<u8> = bytes.iter().copied().filter(|&byte| byte != b' ').collect();
                        characters.push(&bare, out);
                        return;
                    }
                }
                characters.push(bytes, out);
            }
        }
    }

    /// Appends what is left: U+FFFD for an unfinished character.
    pub fn flush(&mut self, out: &mut String) {
        match &mut self.state {
            State::Bytes { characters, .. } => characters.flush(out),
            State::Window(window) => window.flush(&self.tokenizer, self.skip_special, out),
        }
    }

    /// Whether bytes of an unfinished character wait.
    #[must_use]
    pub fn pending(&self) -> bool {
        match &self.state {
            State::Bytes { characters, .. } => characters.length > characters.foreign,
            State::Window(window) => window.pending,
        }
    }
}

/// Bytes to characters; broken ones become U+FFFD as `String::from_utf8_lossy` has it.
#[derive(Default)]
struct Characters {
    /// The beginning of a character.
    held: [u8; 4],
    length: usize,
    /// How many of the held bytes belong to the prompt. If they turn out broken, that is not ours to show.
    foreign: usize,
}

impl Characters {
    fn push(&mut self, bytes: &[u8], out: &mut String) {
        let mut rest = bytes;
        // At most three bytes are held, so this is short: feed single bytes until the held character is decided.
        while self.length > 0 {
            let Some((&first, tail)) = rest.split_first() else { return };
            self.held[self.length] = first;
            let candidate = &self.held[..=self.length];
            match std::str::from_utf8(candidate) {
                Ok(text) => {
                    out.push_str(text);
                    self.forget();
                    rest = tail;
                }
                Err(error) if error.error_len().is_none() => {
                    self.length += 1;
                    rest = tail;
                }
                // The held bytes can't go on with this one: they are broken, and it starts anew.
                Err(_) => self.break_held(out),
            }
        }
        self.whole(rest, out);
    }

    fn whole(&mut self, mut bytes: &[u8], out: &mut String) {
        loop {
            match std::str::from_utf8(bytes) {
                Ok(text) => return out.push_str(text),
                Err(error) => {
                    let (valid, rest) = bytes.split_at(error.valid_up_to());
                    out.push_str(std::str::from_utf8(valid).unwrap_or_default());
                    match error.error_len() {
                        Some(broken) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            bytes = &rest[broken..];
                        }
                        None => {
                            self.held[..rest.len()].copy_from_slice(rest);
                            self.length = rest.len();
                            return;
                        }
                    }
                }
            }
        }
    }

    fn break_held(&mut self, out: &mut String) {
        if self.foreign == 0 {
            out.push(char::REPLACEMENT_CHARACTER);
        }
        self.forget();
    }

    fn forget(&mut self) {
        (self.length, self.foreign) = (0, 0);
    }

    fn flush(&mut self, out: &mut String) {
        if self.length > self.foreign {
            self.break_held(out);
        }
        self.forget();
    }
}

/// Decodes by the tokenizer's own decoder over the last few ids.
struct Window {
    ids: Vec<u32>,
    /// The text of `ids[..read]`, already given out.
    read: usize,
    given: String,
    pending: bool,
}

impl Window {
    fn new(tokenizer: &Tokenizer, prime: &[u32], skip_special: bool) -> Self {
        let given = tokenizer.decode(prime, skip_special).unwrap_or_default();
        Self { ids: prime.to_vec(), read: prime.len(), given, pending: false }
    }

    fn push(&mut self, tokenizer: &Tokenizer, id: u32, skip_special: bool, out: &mut String) {
        self.ids.push(id);
        let text = tokenizer.decode(&self.ids, skip_special).unwrap_or_default();
        if text.ends_with(char::REPLACEMENT_CHARACTER) && self.ids.len() - self.read < 4 {
            self.pending = true;
            return;
        }
        self.advance(tokenizer, &text, skip_special, out);
    }

    fn advance(&mut self, tokenizer: &Tokenizer, text: &str, skip_special: bool, out: &mut String) {
        // A decoder that changes what it said before can't be followed; show what is new by length.
        out.push_str(text.get(self.given.len()..).unwrap_or_default());
        self.pending = false;
        self.ids.drain(..self.read);
        self.read = self.ids.len();
        self.given = tokenizer.decode(&self.ids, skip_special).unwrap_or_default();
    }

    fn flush(&mut self, tokenizer: &Tokenizer, skip_special: bool, out: &mut String) {
        if self.pending {
            let text = tokenizer.decode(&self.ids, skip_special).unwrap_or_default();
            self.advance(tokenizer, &text, skip_special, out);
        }
    }
}
