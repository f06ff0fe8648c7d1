//! Stop strings over a stream of text, whatever the borders at which it comes.
//!
//! Owns the text that may turn out to be the beginning of a stop string, and nothing more: each piece of text leaves as
//! soon as no stop string can begin in it. One automaton a stop string (Knuth, Morris and Pratt), so the work is linear
//! in text × stops, whatever they are.

/// Watches one sequence.
pub struct StopScanner {
    stops: Vec<Automaton>,
    include: bool,
    /// Text not yet let go: the longest suffix of the text that is a prefix of some stop string.
    held: String,
}

struct Automaton {
    text: Vec<u8>,
    /// Per prefix length, the length of its longest proper suffix that is a prefix too.
    fallback: Vec<usize>,
    /// Bytes of the stop string that the text now ends with.
    state: usize,
}

impl StopScanner {
    /// `stops` must not hold empty strings. With `include`, a stop string that is met stays in the text.
    #[must_use]
    pub fn new(stops: &[String], include: bool) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).map(|stop| Automaton::new(stop)).collect();
        Self { stops, include, held: String::new() }
    }

    /// Takes new text and appends to `out` what can be let go. `Some(index)`: that stop string is met; the text ends here.
    /// Of several, the one that ends earliest; then the first in the list.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<usize> {
        if self.stops.is_empty() {
            out.push_str(text);
            return None;
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (offset, &byte) in text.as_bytes().iter().enumerate() {
            let mut met = None;
            for (index, stop) in self.stops.iter_mut().enumerate() {
                if stop.step(byte) && met.is_none() {
                    met = Some(index);
                }
            }
            if let Some(index) = met {
                let end = before + offset + 1;
                let keep = if self.include { end } else { end - self.stops[index].text.len() };
                out.push_str(&self.held[..keep]);
                self.held.clear();
                self.stops.iter_mut().for_each(|stop| stop.state = 0);
                return Some(index);
            }
        }
        let hold = self.stops.iter().map(|stop| stop.state).max().unwrap_or(0);
        let free = self.held.len() - hold;
        out.push_str(&self.held[..free]);
        self.held.drain(..free);
        None
    }

    /// Text passes without being searched, as before `min_tokens`.
    pub fn pass(&mut self, text: &str, out: &mut String) {
        self.flush(out);
        out.push_str(text);
    }

    /// The sequence ended otherwise: what was held back is text after all.
    pub fn flush(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
        self.stops.iter_mut().for_each(|stop| stop.state = 0);
    }

    /// Bytes that are held back.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }
}

impl Automaton {
    fn new(text: &str) -> Self {
        let text = text.as_bytes().to_vec();
        let mut fallback = vec![0; text.len() + 1];
        let mut length = 0;
        for at in 1..text.len() {
            while length > 0 && text[at] != text[length] {
                length = fallback[length];
            }
            if text[at] == text[length] {
                length += 1;
            }
            fallback[at + 1] = length;
        }
        Self { text, fallback, state: 0 }
    }

    /// Whether the stop string is complete with this byte.
    fn step(&mut self, byte: u8) -> bool {
        while self.state > 0 && self.text[self.state] != byte {
            self.state = self.fallback[self.state];
        }
        if self.text[self.state] == byte {
            self.state += 1;
        }
        self.state == self.text.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (Vec<String>, Option<usize>, String) {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut scanner = StopScanner::new(&stops, include);
        let mut outs = Vec::new();
        for piece in pieces {
            let mut out = String::new();
            let met = scanner.push(piece, &mut out);
            outs.push(out);
            if met.is_some() {
                return (outs.clone(), met, outs.concat());
            }
        }
        let mut out = String::new();
        scanner.flush(&mut out);
        let text = outs.concat() + &out;
        (outs, None, text)
    }

    #[test]
    fn a_stop_across_pieces_is_never_shown() {
        let (outs, met, _) = run(&["STOP"], false, &["abcS", "T", "O", "Px"]);
        assert_eq!((outs, met), (vec!["abc".into(), String::new(), String::new(), String::new()], Some(0)));
    }

    #[test]
    fn a_false_start_is_let_go_at_once() {
        let (outs, met, text) = run(&["STOP"], false, &["S", "TS", "TOP"]);
        assert_eq!((outs[1].as_str(), met, text.as_str()), ("ST", Some(0), "ST"));
    }

    #[test]
    fn the_stop_that_ends_first_wins_then_the_first_in_the_list() {
        assert_eq!(run(&["bcdef", "cd"], false, &["abcdefg"]).1, Some(1));
        assert_eq!(run(&["cd", "bcd"], false, &["abcd"]), (vec!["ab".into()], Some(0), "ab".into()));
        assert_eq!(run(&["bcd", "cd"], false, &["abcd"]).2, "a");
    }

    #[test]
    fn included_on_request() {
        assert_eq!(run(&["cd"], true, &["abc", "def"]).2, "abcd");
    }

    #[test]
    fn characters_of_several_bytes_are_not_cut() {
        assert_eq!(run(&["éx"], false, &["è", "é", "y"]), (vec!["è".into(), String::new(), "éy".into()], None, "èéy".into()));
    }

    fn naive(stops: &[String], text: &str) -> Option<(usize, usize)> {
        let mut best: Option<(usize, usize)> = None;
        for (index, stop) in stops.iter().enumerate() {
            if let Some(start) = text.find(stop.as_str()) {
                let end = start + stop.len();
                if best.is_none_or(|(e, _)| end < e) {
                    best = Some((end, index));
                }
            }
        }
        best
    }

    proptest! {
        #[test]
        fn equals_a_search_in_the_whole_text(
            stops in prop::collection::vec("[abé]{1,4}", 1..4),
            pieces in prop::collection::vec("[abcé]{0,5}", 0..8),
        ) {
            let whole = pieces.concat();
            let mut scanner = StopScanner::new(&stops, false);
            let (mut out, mut met, mut seen) = (String::new(), None, String::new());
            for piece in &pieces {
                seen.push_str(piece);
                met = scanner.push(piece, &mut out);
                if met.is_some() { break }
                // What is held is the longest suffix that begins some stop, no more.
                let longest = (0..=seen.len()).filter(|&at| seen.is_char_boundary(at))
                    .map(|at| &seen[at..]).find(|tail| stops.iter().any(|s| s.starts_with(tail))).unwrap_or("");
                prop_assert_eq!(scanner.held(), longest.len());
            }
            match naive(&stops, &whole) {
                Some((end, index)) => {
                    prop_assert_eq!(met, Some(index));
                    prop_assert_eq!(&out, &whole[..end - stops[index].len()]);
                }
                None => {
                    scanner.flush(&mut out);
                    prop_assert_eq!((met, &out), (None, &whole));
                }
            }
        }
    }
}
