//! The harmony format (gpt-oss): an answer is messages with channels and recipients.

use super::Part;
use super::formats::{HARMONY_CHANNEL, HARMONY_ENDS, HARMONY_MESSAGE};
use super::markers::{first, may_become};
use super::parser::{HEADER, OutputParser, State};

/// Where in a message the parser stands.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Message {
    Header,
    Thoughts,
    Content,
    Call { silent: bool },
}

/// Where an answer in the harmony format begins: after `<|start|>assistant`, or within a message that is continued.
pub(super) fn start(prompt_end: &str) -> Message {
    let within = prompt_end.rfind(HARMONY_MESSAGE).is_some_and(|at| first(&prompt_end[at..], &HARMONY_ENDS).is_none());
    if !within {
        return Message::Header;
    }
    let channel = prompt_end.rsplit_once(HARMONY_CHANNEL).map_or("", |(_, rest)| rest);
    if channel.starts_with("analysis") { Message::Thoughts } else { Message::Content }
}

impl OutputParser {
    pub(super) fn harmony_header(&mut self, out: &mut Vec<Part>) -> bool {
        let text = self.held.trim_start();
        if text.is_empty() {
            return false;
        }
        let starts = [HARMONY_CHANNEL, "<|start|>", "to="];
        if may_become(text, &starts) {
            return false;
        }
        let window = &self.held[..self.held.floor_char_boundary(HEADER)];
        let end = window.find(HARMONY_MESSAGE).filter(|_| starts.iter().any(|start| text.starts_with(start)));
        let Some(end) = end else {
            let header = starts.iter().any(|start| text.starts_with(start));
            if header && self.held.len() < HEADER + 4 {
                return false;
            }
            self.state = State::Harmony(Message::Content);
            return true;
        };
        let header = window[..end].to_owned();
        self.held.drain(..end + HARMONY_MESSAGE.len());
        let word = |text: &str| text.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default().to_owned();
        let channel = header.rsplit_once(HARMONY_CHANNEL).map(|(_, rest)| word(rest)).unwrap_or_default();
        let recipient = header.split_once("to=").map(|(_, rest)| word(rest)).filter(|to| !to.is_empty());
        let message = match recipient {
            Some(to) if self.tools.is_some() => {
                self.announce(None, to.strip_prefix("functions.").unwrap_or(&to).to_owned(), out);
                Message::Call { silent: true }
            }
            _ if channel == "analysis" => Message::Thoughts,
            _ => Message::Content,
        };
        self.state = State::Harmony(message);
        true
    }

    pub(super) fn harmony_body(&mut self, message: Message, out: &mut Vec<Part>) -> bool {
        let (text, found) = self.until(&HARMONY_ENDS);
        let silent = match message {
            Message::Call { silent } if text.is_empty() => silent,
            _ => false,
        };
        match message {
            Message::Thoughts => self.thought(&text, out),
            Message::Call { .. } if !text.is_empty() => self.arguments(text, out),
            Message::Call { .. } => {}
            Message::Content | Message::Header => self.content(&text, out),
        }
        if let Message::Call { .. } = message {
            self.state = State::Harmony(Message::Call { silent });
            if silent && found.is_some() {
                self.arguments("{}".to_owned(), out);
            }
        }
        if let Some(marker) = found {
            if marker != "<|start|>" {
                self.held.drain(..marker.len());
            }
            if message == Message::Thoughts {
                self.blank.clear();
            }
            self.state = State::Harmony(Message::Header);
        }
        found.is_some()
    }
}
