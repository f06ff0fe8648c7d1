//! The incremental parser.
//!
//! Every decision looks at the text from a place on, and is the same whatever follows: a marker is found when it is
//! complete, and waited for while what is there may be its beginning. So cuts don't matter.

use super::Part;
use super::formats::{Body, ChatFormat, Format, HARMONY_CHANNEL, HARMONY_ENDS, HARMONY_MESSAGE, Thoughts};
use super::json_call::{ArgumentsScanner, CallScanner, Found, Status};
use super::literals::{self, Call, Extent, Tools};

/// Bytes of a call's header, at most.
const HEADER: usize = 512;

/// Splits one answer into parts.
pub struct OutputParser {
    format: &'static Format,
    thoughts: Option<&'static Thoughts>,
    /// None: calls are not looked for.
    tools: Option<Tools>,
    state: State,
    /// Text that is not decided on.
    held: String,
    /// Text since a call's opener, while it may turn out to be none.
    raw: String,
    /// White space at the end of content: not part of it if a call follows.
    blank: String,
    /// White space at the beginning of a section is left out.
    trim: bool,
    /// Whether an answer may still turn out to be a call without opener.
    bare: bool,
    calls: u32,
}

enum State {
    /// Nothing but white space came.
    Start,
    Thoughts,
    Content,
    /// Past an opener, or where one would be.
    Opened {
        bare: bool,
    },
    /// A call as a JSON object.
    Object {
        scanner: CallScanner,
        announced: bool,
        bare: bool,
    },
    Header,
    Arguments(ArgumentsScanner),
    /// All up to the closer is needed.
    Whole,
    Python,
    /// Past a call; with `json`, more may follow without an opener.
    Past {
        json: bool,
    },
    Harmony(Message),
}

#[derive(Clone, Copy, PartialEq)]
enum Message {
    Header,
    Thoughts,
    Content,
    Call { silent: bool },
}

impl OutputParser {
    /// For an answer to a prompt that ends with `prompt_end`; None if there is nothing to split.
    #[must_use]
    pub fn new(format: ChatFormat, tools: Option<Tools>, prompt_end: &str) -> Option<Self> {
        let harmony = matches!(format.calls.body, Body::Harmony);
        if !harmony && tools.is_none() && format.thoughts.is_none() {
            return None;
        }
        let open = |thoughts: &&Thoughts| prompt_end.trim_end().ends_with(thoughts.open);
        let state = match format.thoughts {
            _ if harmony => State::Harmony(harmony_start(prompt_end)),
            Some(thoughts) if open(&thoughts) => State::Thoughts,
            Some(_) => State::Start,
            None => State::Content,
        };
        let trim = matches!(state, State::Thoughts);
        Some(Self {
            bare: format.calls.bare && tools.is_some(),
            format: format.calls,
            thoughts: format.thoughts,
            tools,
            state,
            held: String::new(),
            raw: String::new(),
            blank: String::new(),
            trim,
            calls: 0,
        })
    }

    /// Takes text, and appends the parts that it decides.
    pub fn push(&mut self, text: &str, out: &mut Vec<Part>) {
        self.held.push_str(text);
        while !self.held.is_empty() && self.step(out) {}
    }

    /// The answer has ended.
    pub fn finish(&mut self, out: &mut Vec<Part>) {
        match &self.state {
            State::Start | State::Content => {
                let rest = std::mem::take(&mut self.held);
                self.content(&rest, out);
            }
            State::Thoughts | State::Harmony(Message::Thoughts) => {
                let rest = std::mem::take(&mut self.held);
                self.thought(&rest, out);
                self.blank.clear();
            }
            State::Opened { .. } | State::Header | State::Whole | State::Python | State::Object { announced: false, .. } => {
                let rest = std::mem::take(&mut self.held);
                self.raw.push_str(&rest);
                self.give_up(out);
            }
            State::Arguments(_) | State::Object { .. } | State::Past { .. } => {}
            State::Harmony(Message::Header) if self.held.trim_start().starts_with("<|") => {}
            State::Harmony(Message::Call { .. }) => {
                let rest = std::mem::take(&mut self.held);
                self.arguments(rest, out);
            }
            State::Harmony(Message::Header | Message::Content) => {
                let rest = std::mem::take(&mut self.held);
                self.content(&rest, out);
            }
        }
        self.held.clear();
        if !self.blank.is_empty() {
            say(out, std::mem::take(&mut self.blank));
        }
    }

    /// Whether something was decided, and more may be.
    fn step(&mut self, out: &mut Vec<Part>) -> bool {
        match &self.state {
            State::Start => self.start(),
            State::Thoughts => self.in_thoughts(out),
            State::Content => self.in_content(out),
            State::Opened { bare } => self.opened(*bare, out),
            State::Object { .. } => self.in_object(out),
            State::Header => self.in_header(out),
            State::Arguments(_) => self.in_arguments(out),
            State::Whole => self.in_whole(out),
            State::Python => self.in_python(out),
            State::Past { json } => self.past(*json),
            State::Harmony(Message::Header) => self.harmony_header(out),
            State::Harmony(message) => self.harmony_body(*message, out),
        }
    }

    fn start(&mut self) -> bool {
        let text = self.held.trim_start();
        let Some(thoughts) = self.thoughts.filter(|_| !text.is_empty()) else { return false };
        if let Some(rest) = text.strip_prefix(thoughts.open) {
            self.held = rest.to_owned();
            self.state = State::Thoughts;
            self.trim = true;
        } else if thoughts.open.starts_with(text) {
            return false;
        } else {
            self.state = State::Content;
        }
        true
    }

    fn in_thoughts(&mut self, out: &mut Vec<Part>) -> bool {
        let Some(thoughts) = self.thoughts else { return false };
        let (before, found) = self.until(&[thoughts.close]);
        self.thought(&before, out);
        if let Some(marker) = found {
            self.held.drain(..marker.len());
            self.blank.clear();
            self.trim = true;
            self.state = State::Content;
        }
        found.is_some()
    }

    fn in_content(&mut self, out: &mut Vec<Part>) -> bool {
        if self.tools.is_none() {
            let all = std::mem::take(&mut self.held);
            self.content(&all, out);
            return false;
        }
        if self.bare {
            let text = self.held.trim_start();
            if text.is_empty() {
                return false;
            }
            let blank = self.held.len() - text.len();
            self.bare = false;
            if text.starts_with(['{', '[']) {
                let blank: String = self.held.drain(..blank).collect();
                self.content(&blank, out);
                self.raw.clear();
                self.state = State::Opened { bare: true };
                return true;
            }
        }
        let (before, found) = self.until(self.format.openers);
        self.content(&before, out);
        if let Some(marker) = found {
            self.raw.clear();
            self.take(marker.len());
            self.state = State::Opened { bare: false };
        }
        found.is_some()
    }

    fn opened(&mut self, bare: bool, out: &mut Vec<Part>) -> bool {
        let text = self.held.trim_start();
        let blank = self.held.len() - text.len();
        let format = self.format;
        if text.is_empty() {
            return false;
        }
        if let Some(opener) = format.openers.iter().find(|opener| text.starts_with(**opener)) {
            self.take(blank + opener.len());
            self.state = State::Opened { bare: false };
            return true;
        }
        if may_become(text, format.openers) || may_become(text, format.closers) {
            return false;
        }
        match text.as_bytes()[0] {
            b'{' => {
                self.take(blank + 1);
                self.state = State::Object { scanner: CallScanner::new(bare), announced: false, bare };
                true
            }
            b'[' => {
                let inner = text[1..].trim_start();
                match inner.chars().next() {
                    None => return false,
                    Some('{') => {
                        let length = self.held.len() - inner.len();
                        self.take(length);
                    }
                    Some(c) if format.bare && (c.is_alphabetic() || c == '_') => {
                        self.take(blank);
                        self.state = State::Python;
                    }
                    Some(_) => {
                        self.take(blank + 1);
                        self.give_up(out);
                    }
                }
                true
            }
            _ => {
                self.state = match format.body {
                    Body::Tagged | Body::Braces(_) if !bare => State::Whole,
                    Body::Named(_) if !bare => State::Header,
                    _ => {
                        self.give_up(out);
                        return true;
                    }
                };
                true
            }
        }
    }

    fn in_object(&mut self, out: &mut Vec<Part>) -> bool {
        let held = std::mem::take(&mut self.held);
        let mut found = Vec::new();
        for (at, c) in held.char_indices() {
            let State::Object { scanner, announced, bare } = &mut self.state else { break };
            let mut status = scanner.feed(c, &mut found);
            if !*announced {
                self.raw.push(c);
                let name = found.iter().find_map(|found| if let Found::Name { name, .. } = found { Some(name.as_str()) } else { None });
                match name {
                    Some(name) if *bare && !self.tools.as_ref().is_some_and(|tools| tools.has(name)) => status = Status::Failed,
                    Some(_) => *announced = true,
                    None => {}
                }
            }
            match status {
                Status::More => {}
                Status::Done => {
                    self.say_found(&mut found, out);
                    self.held = held[at + c.len_utf8()..].to_owned();
                    self.state = State::Past { json: true };
                    return true;
                }
                Status::Failed => {
                    self.held = held[at + c.len_utf8()..].to_owned();
                    self.give_up(out);
                    return true;
                }
            }
        }
        self.say_found(&mut found, out);
        false
    }

    fn say_found(&mut self, found: &mut Vec<Found>, out: &mut Vec<Part>) {
        for found in found.drain(..) {
            match found {
                Found::Name { id, name } => self.announce(id, name, out),
                Found::Arguments(text) => self.arguments(text, out),
            }
        }
    }

    fn in_header(&mut self, out: &mut Vec<Part>) -> bool {
        let window = &self.held[..self.held.floor_char_boundary(HEADER)];
        let brace = window.find('{');
        let closer = self.format.closers.iter().filter(|closer| **closer != "```").filter_map(|closer| window.find(closer)).min();
        let Some(end) = brace.into_iter().chain(closer).min() else {
            // As much as can't be a header any more, and the window is as it will ever be.
            if self.held.len() < HEADER + 4 {
                return false;
            }
            self.take(1);
            self.give_up(out);
            return true;
        };
        let Body::Named(read) = self.format.body else { return false };
        let named = read(&window[..end]).and_then(|(id, name)| Some((id, literals::plain_name(&name)?)));
        let Some((id, name)) = named else {
            self.take(end);
            self.give_up(out);
            return true;
        };
        self.held.drain(..end);
        self.announce(id, name, out);
        if brace == Some(end) {
            self.held.drain(..1);
            self.arguments("{".to_owned(), out);
            self.state = State::Arguments(ArgumentsScanner::new());
        } else {
            self.arguments("{}".to_owned(), out);
            self.state = State::Past { json: false };
        }
        true
    }

    fn in_arguments(&mut self, out: &mut Vec<Part>) -> bool {
        let State::Arguments(scanner) = &mut self.state else { return false };
        let end = self.held.char_indices().find(|(_, c)| scanner.feed(*c)).map(|(at, c)| at + c.len_utf8());
        let text: String = self.held.drain(..end.unwrap_or(self.held.len())).collect();
        self.arguments(text, out);
        if end.is_some() {
            self.state = State::Past { json: false };
        }
        end.is_some()
    }

    fn in_whole(&mut self, out: &mut Vec<Part>) -> bool {
        let Some((at, closer)) = first(&self.held, self.format.closers) else { return false };
        let Some(tools) = &self.tools else { return false };
        let call = match self.format.body {
            Body::Braces(quote) => literals::braces(&self.held[..at], quote),
            _ => literals::tagged(&self.held[..at], tools),
        };
        self.take(at + closer.len());
        match call {
            Some(call) => self.whole_call(call, out),
            None => self.give_up(out),
        }
        true
    }

    fn in_python(&mut self, out: &mut Vec<Part>) -> bool {
        let Some(tools) = &self.tools else { return false };
        match literals::python_extent(&self.held, tools) {
            Extent::Open => return false,
            Extent::None => {
                self.take(1);
                self.give_up(out);
            }
            Extent::To(end) => {
                let calls = literals::python(&self.held[..end]);
                self.take(end);
                match calls {
                    Some(calls) => calls.into_iter().for_each(|call| self.whole_call(call, out)),
                    None => self.give_up(out),
                }
            }
        }
        true
    }

    fn whole_call(&mut self, (name, arguments): Call, out: &mut Vec<Part>) {
        self.announce(None, name, out);
        self.arguments(serde_json::Value::Object(arguments).to_string(), out);
        self.state = State::Past { json: false };
    }

    fn past(&mut self, json: bool) -> bool {
        let text = self.held.trim_start();
        let blank = self.held.len() - text.len();
        let format = self.format;
        if text.is_empty() {
            return false;
        }
        if let Some(opener) = format.openers.iter().find(|opener| text.starts_with(**opener)) {
            self.raw.clear();
            self.held.drain(..blank);
            self.take(opener.len());
            self.state = State::Opened { bare: false };
        } else if let Some(closer) = format.closers.iter().find(|closer| text.starts_with(**closer)) {
            self.held.drain(..blank + closer.len());
            self.state = State::Past { json: false };
        } else if may_become(text, format.openers) || may_become(text, format.closers) {
            return false;
        } else {
            match text.as_bytes()[0] {
                b',' | b';' | b'[' if json => drop(self.held.drain(..=blank)),
                b']' if json => {
                    self.held.drain(..=blank);
                    self.state = State::Past { json: false };
                }
                b'{' if json => {
                    self.raw.clear();
                    self.held.drain(..blank);
                    self.take(1);
                    self.state = State::Object { scanner: CallScanner::new(format.bare), announced: false, bare: format.bare };
                }
                _ => {
                    self.trim = true;
                    self.state = State::Content;
                }
            }
        }
        true
    }

    fn harmony_header(&mut self, out: &mut Vec<Part>) -> bool {
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

    fn harmony_body(&mut self, message: Message, out: &mut Vec<Part>) -> bool {
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

    /// Takes what comes before the first of `markers`, or what can't be part of one.
    fn until(&mut self, markers: &[&'static str]) -> (String, Option<&'static str>) {
        let found = first(&self.held, markers);
        let end = found.map_or_else(|| self.held.len() - beginning(&self.held, markers), |(at, _)| at);
        (self.held.drain(..end).collect(), found.map(|(_, marker)| marker))
    }

    /// Moves text to what may have to be given back.
    fn take(&mut self, length: usize) {
        let length = self.held.ceil_char_boundary(length);
        self.raw.extend(self.held.drain(..length));
    }

    /// What looked like a call is text.
    fn give_up(&mut self, out: &mut Vec<Part>) {
        let raw = std::mem::take(&mut self.raw);
        self.content(&raw, out);
        self.state = State::Content;
    }

    fn announce(&mut self, id: Option<String>, name: String, out: &mut Vec<Part>) {
        self.raw.clear();
        self.blank.clear();
        out.push(Part::Call { index: self.calls, id, name });
        self.calls += 1;
    }

    fn arguments(&mut self, text: String, out: &mut Vec<Part>) {
        if text.is_empty() {
            return;
        }
        let number = self.calls.saturating_sub(1);
        match out.last_mut() {
            Some(Part::Arguments { index, text: before }) if *index == number => before.push_str(&text),
            _ => out.push(Part::Arguments { index: number, text }),
        }
    }

    fn content(&mut self, text: &str, out: &mut Vec<Part>) {
        if let Some(ready) = self.without_blank(text, self.tools.is_some()) {
            say(out, ready);
        }
    }

    fn thought(&mut self, text: &str, out: &mut Vec<Part>) {
        let Some(ready) = self.without_blank(text, true) else { return };
        match out.last_mut() {
            Some(Part::Reasoning(before)) => before.push_str(&ready),
            _ => out.push(Part::Reasoning(ready)),
        }
    }

    /// Text without what is white space at a section's beginning, or may be at its end.
    fn without_blank(&mut self, text: &str, hold: bool) -> Option<String> {
        let text = if self.trim { text.trim_start() } else { text };
        if text.is_empty() {
            return None;
        }
        self.trim = false;
        let end = if hold { text.trim_end().len() } else { text.len() };
        let ready = (end > 0).then(|| std::mem::take(&mut self.blank) + &text[..end]);
        self.blank.push_str(&text[end..]);
        ready
    }
}

fn say(out: &mut Vec<Part>, text: String) {
    match out.last_mut() {
        Some(Part::Content(before)) => before.push_str(&text),
        _ => out.push(Part::Content(text)),
    }
}

/// Where an answer in the harmony format begins: after `<|start|>assistant`, or within a message that is continued.
fn harmony_start(prompt_end: &str) -> Message {
    let within = prompt_end.rfind(HARMONY_MESSAGE).is_some_and(|at| first(&prompt_end[at..], &HARMONY_ENDS).is_none());
    if !within {
        return Message::Header;
    }
    let channel = prompt_end.rsplit_once(HARMONY_CHANNEL).map_or("", |(_, rest)| rest);
    if channel.starts_with("analysis") { Message::Thoughts } else { Message::Content }
}

/// The marker that is complete first.
fn first(text: &str, markers: &[&'static str]) -> Option<(usize, &'static str)> {
    markers.iter().filter_map(|marker| text.find(marker).map(|at| (at, *marker))).min_by_key(|(at, marker)| at + marker.len())
}

/// Bytes at the end of a text that may be the beginning of a marker.
fn beginning(text: &str, markers: &[&str]) -> usize {
    let longest = markers.iter().map(|marker| marker.len()).max().unwrap_or(0);
    let from = text.ceil_char_boundary(text.len().saturating_sub(longest.saturating_sub(1)));
    let starts = text[from..].char_indices().map(|(at, _)| from + at);
    starts.into_iter().find(|&at| markers.iter().any(|marker| marker.starts_with(&text[at..]))).map_or(0, |at| text.len() - at)
}

/// Whether a text is the beginning of a marker, and not all of it.
fn may_become(text: &str, markers: &[&str]) -> bool {
    markers.iter().any(|marker| marker.len() > text.len() && marker.starts_with(text))
}
