//! Cuts a byte stream into server-sent events, wherever the network cut it. Knows nothing of what the events mean.

/// One event: its `event:` name (empty if none) and its `data:` lines joined by newlines.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Event {
    pub name: String,
    pub data: String,
}

/// No single line of a sane server is longer; beyond it the stream is refused rather than kept in memory.
pub const MAX_LINE: usize = 4 << 20;

/// A line grew beyond [`MAX_LINE`].
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a line of the event stream is longer than {MAX_LINE} bytes")]
pub struct LineTooLong;

/// The state between two reads.
#[derive(Debug, Default)]
pub struct Parser {
    line: Vec<u8>,
    event: Event,
    has_data: bool,
    /// The last byte was a carriage return, so a newline right after it belongs to the same line end.
    after_cr: bool,
}

impl Parser {
    /// Takes the next bytes; calls `emit` for each event that they complete, in order.
    pub fn feed(&mut self, bytes: &[u8], mut emit: impl FnMut(Event)) -> Result<(), LineTooLong> {
        for &byte in bytes {
            let after_cr = std::mem::replace(&mut self.after_cr, byte == b'\r');
            match byte {
                b'\n' if after_cr => {}
                b'\n' | b'\r' => self.end_line(&mut emit),
                _ if self.line.len() >= MAX_LINE => return Err(LineTooLong),
                _ => self.line.push(byte),
            }
        }
        Ok(())
    }

    fn end_line(&mut self, emit: &mut impl FnMut(Event)) {
        let line = String::from_utf8_lossy(&self.line);
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            if std::mem::take(&mut self.has_data) {
                emit(event);
            }
            return;
        }
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => {
                if self.has_data {
                    self.event.data.push('\n');
                }
                self.event.data.push_str(value);
                self.has_data = true;
            }
            "event" => self.event.name = value.to_owned(),
            // Comments (keep-alives), ids and retry hints.
            _ => {}
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(chunks: &[&[u8]]) -> Vec<Event> {
        let (mut parser, mut out) = (Parser::default(), Vec::new());
        for chunk in chunks {
            parser.feed(chunk, |event| out.push(event)).unwrap();
        }
        out
    }

    fn data(text: &str) -> Event {
        Event { name: String::new(), data: text.into() }
    }

    #[test]
    fn cuts_at_every_byte_and_with_every_line_end() {
        for end in ["\n", "\r\n", "\r"] {
            let stream =
                format!(": hello{end}data: {{\"a\":1}}{end}{end}event: error{end}data:x{end}data: y{end}{end}data: [DONE]{end}{end}");
            let want = vec![data("{\"a\":1}"), Event { name: "error".into(), data: "x\ny".into() }, data("[DONE]")];
            let bytes: Vec<&[u8]> = stream.as_bytes().chunks(1).collect();
            assert_eq!(parse(&bytes), want, "{end:?}");
            assert_eq!(parse(&[stream.as_bytes()]), want, "{end:?}");
        }
    }

    #[test]
    fn a_multi_byte_character_may_be_cut_in_two() {
        let bytes = "data: grüße\n\n".as_bytes();
        let at = bytes.iter().position(|byte| *byte >= 0x80).unwrap() + 1;
        assert_eq!(parse(&[&bytes[..at], &bytes[at..]]), vec![data("grüße")]);
    }

    #[test]
    fn an_unfinished_event_is_not_an_event() {
        assert_eq!(parse(&[b"data: half"]), vec![]);
        assert_eq!(parse(&[b"data: half\n"]), vec![]);
        assert_eq!(parse(&[b"event: ping\n\n"]), vec![]);
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut parser = Parser::default();
        let block = vec![b'x'; MAX_LINE];
        assert_eq!(parser.feed(&block, |_| {}), Ok(()));
        assert_eq!(parser.feed(b"x", |_| {}), Err(LineTooLong));
    }
}
